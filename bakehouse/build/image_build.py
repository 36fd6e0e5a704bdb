"""llama.cpp built in a container: context, configure, accept, compile, verify.

The same order and the same rules as on the host: what CMake configured is judged before anything is
compiled, and the image counts once its server has shown the pinned stamp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from bakehouse.base import Frozen, to_json
from bakehouse.build import configure as file_api
from bakehouse.build import steps
from bakehouse.build.ensure import write_source
from bakehouse.build.first import FirstError, first_build_error, first_cmake_error
from bakehouse.build.image_cuda import (
    DRIVER,
    accept_image_devices,
    accept_image_files,
    ask_server,
    with_toolkit,
)
from bakehouse.build.image_files import ImageFile, image_files, read_tar, tree_digest
from bakehouse.build.ninja import NinjaWatch
from bakehouse.build.work import digest_lock
from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.engines.configured import Configured, Expected
from bakehouse.engines.llamacpp.accept import RULES
from bakehouse.engines.llamacpp.cmake import git_stand_in
from bakehouse.engines.llamacpp.cuda import decisive, refuse_cuda
from bakehouse.errors import BuildFailed, HostError
from bakehouse.lock import Lock
from bakehouse.plan.built import base_name
from bakehouse.plan.dockerfile import script
from bakehouse.plan.image_build import CUDA_ROOT, SCRIPTS, expected_of
from bakehouse.plan.types import ImagePlan, Step
from bakehouse.ports.docker import OURS, ContainerSpec, ImageFacts
from bakehouse.ports.docker_errors import explain
from bakehouse.ports.process import Captured, Finished, environment
from bakehouse.recipe.model import Build
from bakehouse.records.store import Run
from bakehouse.redact import clean
from bakehouse.toolkit.views import Told
from bakehouse.util.files import write_atomic

PASSED_ON = (
    "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY",
)  # fmt: skip
OLD_CLIENT = 23
"""From this version on, Docker's command line builds with BuildKit only through buildx."""
_PREFIX = re.compile(r"^#\d+ (?:\d+\.\d+ )?")
"""What BuildKit writes before every line."""
_LACKS = re.compile(r"(?:line )?\d+: ([\w./+-]+): (?:command )?not found$")
"""A shell's word for a program that is not there."""
_ROOTS = ("/build/src", "../src", "/build")


def build_environment(ctx: Context) -> dict[str, str]:
    """What `docker build` gets to see. Raises HostError where there is no command line."""
    extra = {name: ctx.environment[name] for name in PASSED_ON if name in ctx.environment}
    env = environment(extra, base=ctx.environment)
    if ctx.processes.capture(("docker", "buildx", "version"), env=env, timeout=20).ok:
        return {**env, "DOCKER_BUILDKIT": "1"}
    said = ctx.processes.capture(("docker", "--version"), env=env, timeout=20)
    if not said.ok:
        raise HostError(
            "building an image takes Docker's command line, which is not here",
            where=said.err.strip() or "docker --version", id="docker-cli",
            hint="install it: docker-ce-cli and docker-buildx-plugin, or Debian's docker.io",
        )  # fmt: skip
    found = re.search(r"version (\d+)", said.out)
    old = found is not None and int(found[1]) < OLD_CLIENT
    return {**env, "DOCKER_BUILDKIT": "1" if old and ctx.docker.facts().buildkit else "0"}


class Built(Frozen):
    """What is written down of an image that was built."""

    id: str
    content: str
    """Digest of `files`."""
    checks: tuple[Check, ...]
    files: tuple[ImageFile, ...]


Made = tuple[ImageFacts, str, tuple[Check, ...]]
"""An image that was built, its content's digest, and the evidence."""


def built_already(ctx: Context, plan: ImagePlan) -> Made | None:
    """The image of this plan, where it is here and nobody changed it, and what proved it then."""
    try:
        kept = Built.model_validate_json(kept_record(ctx, plan).read_bytes())
    except (OSError, ValueError):
        return None
    found = ctx.docker.image(plan.image)
    return (found, kept.content, kept.checks) if found and found.id == kept.id else None


def kept_record(ctx: Context, plan: ImagePlan) -> Path:
    """Where it is written down what was built for a plan."""
    return ctx.places.images / "built" / f"{plan.digest}.json"


def build_image(ctx: Context, lock: Lock, plan: ImagePlan, build: Build, run: Run) -> Made:
    """Build the plan's image; its base images are here. `build` is the recipe's, as built here.

    Raises BuildFailed (6), HostError (9), LockError (4).
    """
    env = build_environment(ctx)
    name_bases(ctx, plan)
    folder = ctx.places.images / ".work" / plan.digest
    evidence = f"{plan.image}-evidence"
    with digest_lock(ctx, ctx.places.images, plan.digest):
        if there := built_already(ctx, plan):
            return there
        steps.clear(folder)
        try:
            with run.step("source"):
                write_context(ctx, lock, plan, folder)
            configured = _configure(ctx, plan, run, env, folder)
            expected, told = with_toolkit(
                expected_of(build, lock, plan.arch), build, CUDA_ROOT, folder / "evidence",
                configured.log_path,
            )  # fmt: skip
            checks = _accept(configured, expected, run)
            _compile(ctx, plan, run, env, folder)
            return _proven(ctx, lock, plan, run, folder, checks, expected, told)
        finally:
            # Not sooner: the classic builder makes every stage again whose image is gone.
            ctx.docker.remove_image(evidence)
            steps.clear(folder)


def name_bases(ctx: Context, plan: ImagePlan) -> None:
    """Give local base images a name: a Dockerfile cannot say an id."""
    for pin in plan.pins.values():
        if pin.local:
            repository, _, tag = base_name(pin).rpartition(":")
            ctx.docker.tag(pin.id, repository, tag)


def keep_record(
    ctx: Context,
    plan: ImagePlan,
    found: ImageFacts,
    checks: tuple[Check, ...],
    files: tuple[ImageFile, ...] | None = None,
) -> Made:
    """Write down what was built, file by file, and what proved it."""
    files = image_files(ctx.docker, found.id) if files is None else files
    built = Built(id=found.id, content=tree_digest(files), checks=checks, files=files)
    write_atomic(kept_record(ctx, plan), to_json(built).encode())
    return found, built.content, checks


def write_context(ctx: Context, lock: Lock, plan: ImagePlan, folder: Path) -> None:
    """Write what the Dockerfile uses, and nothing else."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    write_source(ctx, lock, folder / "src")
    (folder / "Dockerfile").write_text(str(plan.dockerfile))
    (folder / "query.json").write_text(file_api.questions())
    for name, data in {
        "git": git_stand_in(lock).encode(),
        **{s: script(s) for s in SCRIPTS},
    }.items():
        (tools / name).write_bytes(data)
        (tools / name).chmod(0o755)


def _configure(
    ctx: Context, plan: ImagePlan, run: Run, env: dict[str, str], folder: Path
) -> Configured:
    step = plan.step("configure")
    ctx.progress.say("configure in the builder")
    log = docker_build(ctx, step, run, env, folder, lambda _: None, first_cmake_error)
    out = folder / "evidence"
    container = ctx.docker.create(
        ContainerSpec(image=f"{plan.image}-evidence", argv=("none",), network="none")
    )
    try:
        for entry, content in read_tar(ctx.docker.export(container)):
            path = out / entry.name
            if content and out in path.resolve().parents:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    finally:
        ctx.docker.remove(container)
    said = log.with_name(f"{log.stem}-cmake.log")
    said.write_bytes((out / "configure.log").read_bytes())
    try:
        return file_api.read(out, said, folder / "src")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildFailed(
            f"CMake's answers about the build cannot be read: {error}", where=str(said),
            hint="the builder image needs CMake 3.20 or newer",
        ) from error  # fmt: skip


def _accept(configured: Configured, expected: Expected, run: Run) -> tuple[Check, ...]:
    with run.step("accept"):
        checks = tuple(c for rule in RULES for c in rule(configured, expected))
    run.checks(checks)
    refuse_cuda(configured, expected, checks)
    steps.all_passed("what CMake configured is not what was asked for", decisive(checks))
    return checks


def _compile(ctx: Context, plan: ImagePlan, run: Run, env: dict[str, str], folder: Path) -> None:
    with ctx.progress.bar("compile", "steps") as bar:
        watch = NinjaWatch(bar)
        step = plan.step("compile")
        docker_build(ctx, step, run, env, folder, watch.line, first_build_error)


def docker_build(
    ctx: Context,
    step: Step,
    run: Run,
    env: dict[str, str],
    folder: Path,
    on_line: Callable[[str], None],
    first: Callable[..., FirstError | None],
) -> Path:
    """Run one `docker build`; give its log. Raises BuildFailed or HostError, first cause first."""
    with run.step(step.id, step.argv) as taken:
        done = ctx.processes.run(
            step.argv, env=env, cwd=folder, log=taken.log, keep_lines=20_000,
            on_line=lambda line: on_line(_PREFIX.sub("", line)),
        )  # fmt: skip
        taken.ended(done)
    if done.ok:
        return taken.log
    raise _failed(step.id, done, first, taken.log)


def _failed(
    what: str, done: Finished, first: Callable[..., FirstError | None], log: Path
) -> HostError | BuildFailed:
    lines = [_PREFIX.sub("", line) for line in done.lines]
    known = explain("\n".join(lines), str(log))
    if isinstance(known, HostError) and known.id in ("disk-full", "image-platform", "network"):
        return known
    error = first(lines, _ROOTS)
    lacks = next((found for line in lines if (found := _LACKS.search(line))), None)
    if error is None and lacks:
        return BuildFailed(
            f"{what} failed: the image that it runs in has no {clean(lacks[1])}", where=str(log),
            hint="take a builder image with a compiler, CMake, Ninja and binutils: NVIDIA's "
            "development images lack CMake and Ninja, so derive one with them"
            if what in ("configure", "compile") else "bring it with the base image",
            id="image-lacks",
        )  # fmt: skip
    if error is None:
        said = next((ln for ln in reversed(lines) if ln.strip()), f"code {done.code}")
        return BuildFailed(f"{what} failed: {clean(said)}", where=str(log), hint=f"see {log}")
    return BuildFailed(
        f"{what} failed: {error.message}", where=error.place(str(log)), hint=f"the whole log: {log}"
    )


def labelled(plan: ImagePlan, found: ImageFacts) -> Check:
    """Whether an image says of itself what was planned."""
    wrong = {n: found.labels.get(n) for n, v in plan.labels.items() if found.labels.get(n) != v}
    seen = f"others: {wrong}" if wrong else "as planned"
    return check("image.labels", f"{len(plan.labels)} of ours", seen, plan.image, ok=not wrong)


def _proven(
    ctx: Context,
    lock: Lock,
    plan: ImagePlan,
    run: Run,
    folder: Path,
    checks: tuple[Check, ...],
    expected: Expected,
    told: Told | None,
) -> Made:
    """Hold the image against the plan, its files against what they need, and run its server."""
    found = ctx.docker.image(plan.image)
    if found is None:
        raise BuildFailed("the build left no image", where=plan.image, hint="see its log")
    inside = folder / "inside"
    inside.mkdir()
    below = plan.server.rpartition("/")[0]
    files = image_files(ctx.docker, found.id, below=below, target=inside)
    not_root = check("image.user", "not root", found.user or "root", plan.image,
                     ok=not found.has_root)  # fmt: skip
    seen: tuple[Check, ...] = (labelled(plan, found), not_root)
    seen += accept_image_files(inside, files, expected, told, image=plan.image, server_folder=below)
    run.checks(seen)
    steps.all_passed("the image that was built is not what was asked for", seen)
    ran = _run_server(ctx, lock, plan, found, run, told)
    if expected.cuda and ctx.docker.facts().nvidia:
        ran += accept_image_devices(ctx, found.id, plan.server, inside, run)
    run.checks(ran)
    steps.all_passed("the image that was built does not prove itself", (*seen, *ran))
    return keep_record(ctx, plan, found, (*checks, *seen, *ran), files)


def _run_server(
    ctx: Context, lock: Lock, plan: ImagePlan, found: ImageFacts, run: Run, told: Told | None
) -> tuple[Check, ...]:
    """Run the image's server for the pinned stamp."""
    step = plan.step("verify")
    spec = ContainerSpec(
        image=found.id, entrypoint=step.argv[:1], argv=step.argv[1:], network="none",
        drop_capabilities=True, labels={OURS: "question"},
    )  # fmt: skip
    with run.step(step.id, step.argv) as taken:
        said = ask_server(ctx, spec, run, told.stub if told else None)
        taken.log.write_text(said.out + said.err)
        taken.code = said.code
    if said.code and DRIVER in said.err:
        run.fact("driver", "this engine has no GPU and no stub of the driver: not run here")
        ctx.progress.say("no GPU here: that the server runs is not known yet")
        return ()
    caught = Captured(step.argv, said.code, said.out, said.err)
    where = f"{' '.join(step.argv)} in {plan.image}"
    return steps.judge_version(caught, lock.stamp, lock.build_number, where)
