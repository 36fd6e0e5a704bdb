"""What must hold of a finished build before it is launched: it knows the flags, it sees the GPU."""

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
"""Seconds for a server to tell its flags or its devices."""
NO_GPU = "-1"
"""With this, no device is touched: on a busy GPU the text of --help can stop partway."""


def ask_help(ctx: Context, server: str, kept: Path | None = None) -> Help:
    """Give what the server says of its flags; a complete answer is kept at `kept`."""
    if kept is not None:
        with suppress(OSError):
            found = parse_help(kept.read_text())
            if found.complete:
                return found
    env = environment({"CUDA_VISIBLE_DEVICES": NO_GPU}, ctx.environment)
    said = ctx.processes.capture((server, "--help"), env=env, timeout=ASK_S)
    found = parse_help(said.out)
    if not said.ok:
        return Help(found.entries, complete=False)
    if found.complete and kept is not None:
        with suppress(OSError):  # where it cannot be kept, it is asked for again
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(kept, said.out.encode(), sync=False)
    return found


def know_flags(
    ctx: Context, build: BuildPlan, plan: ServePlan, origin: Origin
) -> tuple[Check, ...]:
    """Hold the command against the built server's own --help.

    Raises RecipeError, at the command, for a flag that this server does not have. What is unknown,
    since the text stops early, is given back: the server itself ends on a flag that it lacks.
    """
    kept = Path(build.artifact).parent / ".help" / f"{build.digest}.txt"
    # A command may run the server below another program, such as numactl.
    begin = plan.argv.index(build.server) if build.server in plan.argv else 0
    known = ask_help(ctx, build.server, kept)
    checks = judge_flags(plan.argv[begin:], known, f"{build.server} --help")
    wrong = [one for one in checks if one.verdict is Verdict.FAILED]
    if wrong:
        error = RecipeError(
            f"the server that was built does not take the command of {plan.name}",
            [
                origin.fault(f"serve.command: {one.observed}", f"asked: {one.where}")
                for one in wrong
            ],
        )
        error.id, error.checks = "flag-unknown", checks
        raise error
    return checks


def see_gpu(
    ctx: Context, build: BuildPlan, plan: ServePlan, layers: int | None
) -> tuple[Check, ...]:
    """Have a CUDA build list its devices, where layers are wanted on a GPU.

    Raises HostError where it sees none, others than the driver, or one that it has no code for.
    """
    if build.expected.cuda is None or not layers:
        return ()
    env = environment(plan.env, ctx.environment)
    argv = (build.server, "--list-devices")
    said = ctx.processes.capture(argv, env=env, timeout=ASK_S)
    checks = judge_devices(ctx, Path(build.artifact), said.out if said.ok else "", plan.env)
    wrong = [one for one in checks if one.verdict is Verdict.FAILED]
    if wrong:
        said_wrong = (said.err.strip().splitlines() or [""])[0] if not said.ok else ""
        raise HostError(
            f"the server cannot use this machine's GPU: expected {wrong[0].expected}; "
            f"observed {wrong[0].observed}",
            where=said_wrong or wrong[0].where,
            hint="`invoke doctor` shows what the driver reports; build for this GPU with "
            "--set build.cmake.CMAKE_CUDA_ARCHITECTURES=native",
            id="no-gpu",
            checks=checks,
        )
    return checks


def judge_devices(
    ctx: Context, artifact: Path, listed: str, env: Mapping[str, str]
) -> tuple[Check, ...]:
    """Judge a list of devices; where the recipe shows the server only some GPUs, only by those."""
    names = [name for _, name in parse_devices(listed)]
    if not names:
        expected = "a CUDA device, since layers are wanted on it"
        return (check("cuda.devices", expected, "(none)", "llama-server --list-devices", ok=False),)
    gpus = read_gpus(ctx.processes)
    if "CUDA_VISIBLE_DEVICES" in env:
        gpus = tuple(gpu for gpu in gpus if gpu.name in names)[: len(names)]
    file = find_cuda_file(artifact)
    return accept_devices(listed, gpus, read_cuda_file(file).embedded if file else frozenset())


def unknown_lines(checks: Sequence[Check]) -> list[str]:
    """What to say of the checks that came to nothing."""
    return [f"not known before launch: {one.id}: {one.observed}" for one in not_passed(checks)]
