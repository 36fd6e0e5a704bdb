"""Checks of a finished build before it is launched: it supports the flags, and it sees the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bakehouse import atomic
from bakehouse.checks import Check, Verdict, check, not_passed
from bakehouse.context import Context
from bakehouse.engines.llamacpp.help import Help, judge_flags, parse_help
from bakehouse.errors import HostError, RecipeError
from bakehouse.host import read_gpus
from bakehouse.plan.types import BuildPlan, ServePlan
from bakehouse.ports.process import environment
from bakehouse.recipe.faults import Origin
from bakehouse.toolkit.artifact import accept_devices, find_cuda_file, parse_devices
from bakehouse.toolkit.embedded import read_cuda_file

ASK_S = 60.0
"""Seconds for a server to print its flags or its devices."""
NO_GPU = "-1"
"""Hides all devices: on a busy GPU the text of --help can stop partway."""


def ask_help(ctx: Context, server: str, kept: Path | None = None) -> Help:
    """Return a server's `--help`; a complete one is cached at `kept`."""
    if kept is not None:
        with suppress(OSError):
            found = parse_help(kept.read_text())
            if found.complete:
                return found
    env = environment({"CUDA_VISIBLE_DEVICES": NO_GPU}, ctx.environment)
    done = ctx.processes.capture((server, "--help"), env=env, timeout=ASK_S)
    found = parse_help(done.out)
    if not done.ok:
        return Help(found.entries, complete=False)
    if found.complete and kept is not None:
        with suppress(OSError):  # without a cache it is asked again
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(kept, done.out.encode(), sync=False)
    return found


def know_flags(
    ctx: Context, build: BuildPlan, plan: ServePlan, origin: Origin
) -> tuple[Check, ...]:
    """Check a command against the built server's own `--help`.

    Raises RecipeError, at the command, for a flag that this server does not support. Flags are
    unknown if the text stops early; the server itself exits on a flag that it does not support.
    """
    kept = Path(build.artifact).parent / ".help" / f"{build.digest}.txt"
    # The server may be started by another program, such as numactl.
    begin = plan.argv.index(build.server) if build.server in plan.argv else 0
    known = ask_help(ctx, build.server, kept)
    checks = judge_flags(plan.argv[begin:], known, f"{build.server} --help")
    if wrong := [one for one in checks if one.verdict is Verdict.FAILED]:
        error = RecipeError(
            f"the built server does not support the command of {plan.name}",
            [origin.fault(f"serve.command: {one.observed}", f"see {one.where}") for one in wrong],
        )
        error.id, error.checks = "flag-unknown", checks
        raise error
    return checks


def see_gpu(
    ctx: Context, build: BuildPlan, plan: ServePlan, layers: int | None
) -> tuple[Check, ...]:
    """Check the devices that a CUDA build lists, if layers are to run on a GPU.

    Raises HostError if it lists none, or others than the driver, or one it has no code for.
    """
    if build.expected.cuda is None or not layers:
        return ()
    argv = (build.server, "--list-devices")
    env = environment(plan.env, ctx.environment)
    done = ctx.processes.capture(argv, env=env, timeout=ASK_S)
    checks = judge_devices(ctx, Path(build.artifact), done.out if done.ok else "", plan.env)
    if wrong := next((one for one in checks if one.verdict is Verdict.FAILED), None):
        stderr = "" if done.ok else done.err.strip().partition("\n")[0]
        raise HostError(
            f"the server cannot use this machine's GPU: expected {wrong.expected}; observed "
            f"{wrong.observed}",
            where=stderr or wrong.where, id="no-gpu", checks=checks,
            hint="`invoke doctor` shows what the driver reports; build for this GPU with "
            "--set build.cmake.CMAKE_CUDA_ARCHITECTURES=native",
        )  # fmt: skip
    return checks


def judge_devices(
    ctx: Context, artifact: Path, listed: str, env: Mapping[str, str]
) -> tuple[Check, ...]:
    """Judge a list of devices, by those GPUs that the recipe makes visible."""
    names = [name for _, name in parse_devices(listed)]
    if not names:
        expected = "a CUDA device, since layers are to run on it"
        return (check("cuda.devices", expected, "(none)", "llama-server --list-devices", ok=False),)
    gpus = read_gpus(ctx.processes)
    if "CUDA_VISIBLE_DEVICES" in env:
        gpus = tuple(gpu for gpu in gpus if gpu.name in names)[: len(names)]
    file = find_cuda_file(artifact)
    return accept_devices(listed, gpus, read_cuda_file(file).embedded if file else frozenset())


def unknown_lines(checks: Sequence[Check]) -> list[str]:
    """Describe the checks without a result."""
    return [f"not known before launch: {one.id}: {one.observed}" for one in not_passed(checks)]
