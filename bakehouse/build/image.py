"""Pull or build a plan's image, and verify that it supports what the recipe needs.

llama.cpp is built in a container by the same steps and rules as on this machine: CMake's
configuration is checked before anything is compiled, and the finished server must report the pinned
stamp. The CUDA toolkit is the builder image's: `docker/toolkit.sh` describes it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from bakehouse.build import builder, cmake_file_api
from bakehouse.build.artifact import check_files
from bakehouse.build.builder import DRIVER, digest_lock, write_source
from bakehouse.build.error_parser import (
    FirstError,
    NinjaWatch,
    first_build_error,
    first_cmake_error,
)
from bakehouse.context import Context
from bakehouse.cuda.configure import ARCHITECTURES, for_builder, wants_cuda
from bakehouse.cuda.toolkit import ImageView, NotAToolkit, Requested, inspect, split_list
from bakehouse.cuda.verify import accept_artifact
from bakehouse.engines.base import Configured, CudaExpected, Expected
from bakehouse.engines.llamacpp.cmake import git_stand_in, recipe_definitions
from bakehouse.engines.vllm.image_probe import (
    as_facts,
    names_of,
    probe_image,
    require_capabilities,
    summary,
)
from bakehouse.errors import BakehouseError, BuildFailed, HostError
from bakehouse.lock import Lock
from bakehouse.models import Check, Frozen, check, digest, to_json
from bakehouse.plan.image import CUDA_ROOT, SCRIPTS, base_name, expected_of, script
from bakehouse.plan.types import ImagePlan
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import Build
from bakehouse.redact import clean
from bakehouse.runs.store import Run
from bakehouse.sources.images import ensure_image
from bakehouse.sources.weights import architectures
from bakehouse.system.docker.client import DockerClient
from bakehouse.system.docker.errors import explain
from bakehouse.system.docker.models import OURS, ContainerSpec, ImageFacts, Mount
from bakehouse.system.process import Captured, Finished, environment
from bakehouse.util.files import write_atomic

PASSED_ON = (
    "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY",
)  # fmt: skip
OLD_CLIENT = 23
"""From this version on, Docker's command line builds with BuildKit only through buildx."""
STUB_FOLDER = "/run/bakehouse-driver-stub"
ENGINE_FILES = (
    ".dockerenv", "dev/", "proc/", "sys/", "etc/hostname", "etc/hosts", "etc/resolv.conf",
    "etc/mtab",
)  # fmt: skip
"""Files that the engine adds to every container."""
_BUILDKIT_PREFIX = re.compile(r"^#\d+ (?:\d+\.\d+ )?")
_MISSING_PROGRAM = re.compile(r"(?:line )?\d+: ([\w./+-]+): (?:command )?not found$")
_SOURCE_ROOTS = ("/build/src", "../src", "/build")


class ImageArtifact(Frozen):
    """A verified image on this machine. Size in bytes, unpacked."""

    image: str
    """The name that it is run by."""
    id: str
    """The engine's id of its content."""
    digest: str
    """Of the plan."""
    size: int
    user: str
    entrypoint: tuple[str, ...]
    says: str = ""
    """Versions that it reports."""
    version: str = ""
    """The engine's version that it reports; empty if it was not queried."""
    content: str = ""
    """Digest of the file tree, if it was built here."""
    checks: tuple[Check, ...]
    reused: bool
    """Whether nothing had to be pulled, built or queried."""
    seconds: float


class ImageFile(Frozen):
    """One entry of a file tree. Mode as in `0755`; `link` is a link's target."""

    path: str
    kind: str
    mode: str
    owner: str
    size: int = 0
    sha256: str = ""
    link: str = ""


class Built(Frozen):
    """The record of an image that was built."""

    id: str
    content: str
    """Digest of `files`."""
    checks: tuple[Check, ...]
    files: tuple[ImageFile, ...]


class BuiltImage(NamedTuple):
    """An image, the digest of its file tree if it was built here, and its checks."""

    facts: ImageFacts
    content: str = ""
    checks: tuple[Check, ...] = ()


def ensure(
    ctx: Context, loaded: LoadedRecipe, lock: Lock, plan: ImagePlan, run: Run
) -> ImageArtifact:
    """Pull or build the plan's image, and verify that it supports what the recipe needs.

    Raises HostError (9), LockError (4), NotFound (3), BuildFailed (6) if it does not.
    """
    started = ctx.clock.monotonic()
    run.pin(build=plan.digest)
    built, reused = _pull_or_build(ctx, loaded, lock, plan, run)
    checks, found, needs = built.checks, None, plan.asks
    if needs:  # an image of vLLM
        wanted = {
            role: needs.overridden.get(role)
            or architectures(ctx, loaded.folder, loaded.recipe, lock, role)
            for role in needs.roles
        }
        with run.step("able"):
            names = names_of(wanted, needs)
            found, kept = probe_image(ctx, built.facts.id, plan.image, names)
        reused = reused and kept
        run.fact("image", {"ref": plan.image, "id": built.facts.id, **as_facts(found)})
        for name, version in found.versions.items():
            run.version(name, version)
        supported = require_capabilities(found, needs, wanted, plan.image)
        run.checks(supported)
        checks += supported
    return ImageArtifact(
        image=plan.image, id=built.facts.id, digest=plan.digest, size=built.facts.size,
        user=built.facts.user, entrypoint=built.facts.entrypoint, content=built.content,
        says=summary(found) if found else "", checks=checks,
        version=found.versions.get("vllm", "") if found else "", reused=reused,
        seconds=round(ctx.clock.monotonic() - started, 3),
    )  # fmt: skip


def _pull_or_build(
    ctx: Context, loaded: LoadedRecipe, lock: Lock, plan: ImagePlan, run: Run
) -> tuple[BuiltImage, bool]:
    """The image, and whether it was here already."""
    if plan.dockerfile and (kept := built_already(ctx, plan)):
        run.checks(kept.checks)
        return kept, True
    present = ctx.docker.image(plan.image) is not None
    for role, pin in plan.pins.items():
        with run.step("pull" if role == "image" else f"pull-{role}"):
            found = ensure_image(ctx, pin, plan.arch)
    if not plan.dockerfile:
        return BuiltImage(found), present
    if loaded.recipe.image:
        from bakehouse.build.image_overlay import lay_over  # it imports this module

        return lay_over(ctx, lock, plan, run, recipes=loaded.folder), False
    build = for_builder(ctx, loaded.recipe).build or Build()
    return build_image(ctx, lock, plan, build, run), False


# Any image that is built by `docker build`.


@dataclass(frozen=True)
class DockerBuild:
    """One build of a plan's image, in a work folder that holds its context."""

    ctx: Context
    plan: ImagePlan
    run: Run
    env: dict[str, str]
    folder: Path

    @classmethod
    def start(cls, ctx: Context, plan: ImagePlan, run: Run) -> DockerBuild:
        """Prepare a build whose base images are here. Raises HostError without Docker's CLI."""
        extra = {name: ctx.environment[name] for name in PASSED_ON if name in ctx.environment}
        env = environment(extra, base=ctx.environment)
        env["DOCKER_BUILDKIT"] = "1"
        if not ctx.processes.capture(("docker", "buildx", "version"), env=env, timeout=20).ok:
            version = ctx.processes.capture(("docker", "--version"), env=env, timeout=20)
            if not version.ok:
                raise HostError(
                    "building an image needs Docker's command line, which was not found",
                    where=version.err.strip() or "docker --version", id="docker-cli",
                    hint="install it: docker-ce-cli and docker-buildx-plugin, or Debian's "
                    "docker.io",
                )  # fmt: skip
            found = re.search(r"version (\d+)", version.out)
            old = found is not None and int(found[1]) < OLD_CLIENT
            env["DOCKER_BUILDKIT"] = "1" if old and ctx.docker.facts().buildkit else "0"
        for pin in plan.pins.values():
            if pin.local:  # a Dockerfile cannot name an image by id
                repository, _, tag = base_name(pin).rpartition(":")
                ctx.docker.tag(pin.id, repository, tag)
        return cls(ctx, plan, run, env, ctx.places.images / ".work" / plan.digest)

    def docker(
        self,
        step_id: str,
        first: Callable[..., FirstError | None] | None = None,
        on_line: Callable[[str], None] = lambda _: None,
    ) -> Path:
        """Run a step's `docker build`; return its log. `first` finds a compiler's first error.

        Raises BuildFailed or HostError, first cause first.
        """
        step = self.plan.step(step_id)
        with self.run.step(step.id, step.argv) as taken:
            done = self.ctx.processes.run(
                step.argv, env=self.env, cwd=self.folder, log=taken.log, keep_lines=20_000,
                on_line=lambda line: on_line(_BUILDKIT_PREFIX.sub("", line)),
            )  # fmt: skip
            taken.ended(done)
        if done.ok:
            return taken.log
        raise _failed(step.id, done, first, taken.log)

    def result(self) -> ImageFacts:
        """Return the image that was built. Raises BuildFailed if there is none."""
        found = self.ctx.docker.image(self.plan.image)
        if found is None:
            raise BuildFailed("the build left no image", where=self.plan.image, hint="see its log")
        return found

    def keep(
        self,
        found: ImageFacts,
        checks: tuple[Check, ...],
        files: tuple[ImageFile, ...] | None = None,
    ) -> BuiltImage:
        """Record what was built, file by file, and its checks."""
        files = image_files(self.ctx.docker, found.id) if files is None else files
        built = Built(id=found.id, content=tree_digest(files), checks=checks, files=files)
        write_atomic(_record_path(self.ctx, self.plan), to_json(built).encode())
        return BuiltImage(found, built.content, checks)


def built_already(ctx: Context, plan: ImagePlan) -> BuiltImage | None:
    """Return the image of this plan and its checks, if it is here and unchanged."""
    try:
        kept = Built.model_validate_json(_record_path(ctx, plan).read_bytes())
    except (OSError, ValueError):
        return None
    found = ctx.docker.image(plan.image)
    return BuiltImage(found, kept.content, kept.checks) if found and found.id == kept.id else None


def _record_path(ctx: Context, plan: ImagePlan) -> Path:
    return ctx.places.images / "built" / f"{plan.digest}.json"


def _failed(
    what: str, done: Finished, first: Callable[..., FirstError | None] | None, log: Path
) -> HostError | BuildFailed:
    lines = [_BUILDKIT_PREFIX.sub("", line) for line in done.lines]
    error_of_docker = explain("\n".join(lines), str(log))
    ids = ("disk-full", "image-platform", "network")
    if isinstance(error_of_docker, HostError) and error_of_docker.id in ids:
        return error_of_docker
    if error := first(lines, _SOURCE_ROOTS) if first else None:
        where, hint = error.place(str(log)), f"the whole log: {log}"
        return BuildFailed(f"{what} failed: {error.message}", where=where, hint=hint)
    if missing := next((found for line in lines if (found := _MISSING_PROGRAM.search(line))), None):
        return BuildFailed(
            f"{what} failed: the image has no {clean(missing[1])}", where=str(log),
            hint="use a builder image with a compiler, CMake, Ninja and binutils: NVIDIA's "
            "development images lack CMake and Ninja, so derive one with them"
            if what in ("configure", "compile") else "use a base image that has it",
            id="image-lacks",
        )  # fmt: skip
    last = next((line for line in reversed(lines) if line.strip()), f"exit code {done.code}")
    return BuildFailed(f"{what} failed: {clean(last)}", where=str(log), hint=f"see {log}")


def check_labels(plan: ImagePlan, found: ImageFacts) -> Check:
    """Check that an image has the planned labels."""
    wrong = {n: found.labels.get(n) for n, v in plan.labels.items() if found.labels.get(n) != v}
    observed = f"others: {wrong}" if wrong else "as planned"
    expected = f"{len(plan.labels)} labels of Bakehouse"
    return check("image.labels", expected, observed, plan.image, ok=not wrong)


# The file tree of an image: two builds of the same inputs are compared by it. Digests of images
# differ even for equal files, since they cover times.


_KINDS = {
    **dict.fromkeys(tarfile.REGULAR_TYPES, "file"),
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "hard link",
}


class _Chunks:
    """Chunks as a file that `tarfile` reads as a stream."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)

    def read(self, _: int) -> bytes:
        return next((chunk for chunk in self._chunks if chunk), b"")


@contextmanager
def exported(
    docker: DockerClient, image: str
) -> Iterator[Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]]:
    """Iterate over an image's entries, with the content of files; its container never starts."""
    container = docker.create(ContainerSpec(image=image, argv=("none",), network="none"))
    try:
        with tarfile.open(fileobj=cast(Any, _Chunks(docker.export(container))), mode="r|") as tar:
            yield ((e, tar.extractfile(e) if e.isfile() else None) for e in tar)
    finally:
        docker.remove(container)


def image_files(
    docker: DockerClient, image: str, *, below: str = "", target: Path | None = None
) -> tuple[ImageFile, ...]:
    """List an image's file tree, with the sha256 of every file.

    Files directly in the image's folder `below` are also written to `target`.
    """
    found = []
    with exported(docker, image) as entries:
        for entry, content in entries:
            if entry.name.startswith(ENGINE_FILES):
                continue
            folder, _, name = f"/{entry.name}".rpartition("/")
            copy = target / name if target and entry.isfile() and folder == below else None
            hashed = hashlib.sha256()
            with copy.open("wb") if copy else nullcontext() as kept:
                while content and (piece := content.read(2**20)):
                    hashed.update(piece)
                    if kept:
                        kept.write(piece)
            found.append(
                ImageFile(
                    path=entry.name.strip("/"),
                    kind=_KINDS.get(entry.type, "other"),
                    mode=f"{entry.mode:04o}",
                    owner=f"{entry.uid}:{entry.gid}",
                    size=entry.size if entry.isfile() else 0,
                    sha256=hashed.hexdigest() if entry.isfile() else "",
                    link=entry.linkname,
                )
            )
    return tuple(sorted(found, key=lambda file: file.path))


def tree_digest(files: Iterable[ImageFile]) -> str:
    """Return one digest for a whole file tree."""
    return digest([file.to_data() for file in files])


# llama.cpp in a container.


def build_image(ctx: Context, lock: Lock, plan: ImagePlan, build: Build, run: Run) -> BuiltImage:
    """Build the plan's image; its base images are here. `build` has `native` expanded.

    Raises BuildFailed (6), HostError (9), LockError (4).
    """
    job = DockerBuild.start(ctx, plan, run)
    with digest_lock(ctx, ctx.places.images, plan.digest):
        if kept := built_already(ctx, plan):
            return kept
        shutil.rmtree(job.folder, ignore_errors=True)
        try:
            with run.step("source"):  # exactly the files that the Dockerfile uses
                (job.folder / "tools").mkdir(parents=True)
                write_source(ctx, lock, job.folder / "src")
                (job.folder / "Dockerfile").write_text(str(plan.dockerfile))
                (job.folder / "query.json").write_text(cmake_file_api.questions())
                tools = {"git": git_stand_in(lock).encode(), **{s: script(s) for s in SCRIPTS}}
                for name, data in tools.items():
                    (job.folder / "tools" / name).write_bytes(data)
                    (job.folder / "tools" / name).chmod(0o755)
            configured = _configure(job)
            expected, toolkit = _with_toolkit(
                expected_of(build, lock, plan.arch), build, job.folder / "evidence",
                configured.log_path,
            )  # fmt: skip
            checks = builder.accept(run, configured, expected)
            with ctx.progress.bar("compile", "steps") as bar:
                job.docker("compile", first_build_error, NinjaWatch(bar).line)
            return _verify(job, lock, checks, expected, toolkit)
        finally:
            # Not sooner: the classic builder rebuilds every stage whose image is gone.
            ctx.docker.remove_image(f"{plan.image}-evidence")
            shutil.rmtree(job.folder, ignore_errors=True)


def _configure(job: DockerBuild) -> Configured:
    job.ctx.progress.say("configure in the builder")
    log = job.docker("configure", first_cmake_error)
    out = job.folder / "evidence"
    with exported(job.ctx.docker, f"{job.plan.image}-evidence") as entries:
        for entry, content in entries:
            path = out / entry.name
            if content and out in path.resolve().parents:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    cmake_log = log.with_name(f"{log.stem}-cmake.log")
    cmake_log.write_bytes((out / "configure.log").read_bytes())
    try:
        return cmake_file_api.read(out, cmake_log, job.folder / "src")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildFailed(
            f"CMake's file API answers cannot be read: {error}", where=str(cmake_log),
            hint="the builder image needs CMake 3.20 or newer",
        ) from error  # fmt: skip


def _with_toolkit(
    expected: Expected, build: Build, evidence: Path, log: str
) -> tuple[Expected, ImageView | None]:
    """Add the builder's CUDA toolkit to what is expected. Raises BuildFailed if none works."""
    if build.cuda is None or not wants_cuda(build):
        return expected, None
    try:
        described = ImageView(evidence / "toolkit")
        toolkit = inspect(described, Path(CUDA_ROOT, "bin", "nvcc"))
        if toolkit.faults:
            raise NotAToolkit("; ".join(toolkit.faults))
    except (OSError, ValueError, NotAToolkit) as error:
        raise BuildFailed(
            f"the builder image has no complete CUDA toolkit at {CUDA_ROOT}: {error}", where=log,
            hint="use a development image with CUDA, such as nvidia/cuda:13.0.2-devel-ubuntu24.04",
            id="no-toolkit",
        ) from error  # fmt: skip
    requested = Requested(
        version=build.cuda.version, definitions=recipe_definitions(build.cmake),
        architectures=split_list(str(build.cmake.get(ARCHITECTURES, ""))),
    )  # fmt: skip
    cuda = CudaExpected(toolkit=toolkit, requested=requested, links=dict(described.links))
    return expected.model_copy(update={"cuda": cuda}), described


def _verify(
    job: DockerBuild,
    lock: Lock,
    configured: tuple[Check, ...],
    expected: Expected,
    toolkit: ImageView | None,
) -> BuiltImage:
    """Check the image, its files and their libraries, and run its server."""
    plan, found = job.plan, job.result()
    inside = job.folder / "inside"
    inside.mkdir()
    below, cuda = plan.server.rpartition("/")[0], expected.cuda
    files = image_files(job.ctx.docker, found.id, below=below, target=inside)
    not_root = check("image.user", "not root", found.user or "root", plan.image,
                     ok=not found.has_root)  # fmt: skip
    where = f"{below} in {plan.image}"
    installed = check_files(inside, sorted(file.name for file in inside.iterdir()), where)
    present = {PurePosixPath(file.path).name for file in files if file.kind != "folder"}
    missing = ", ".join(sorted(set(installed.system) - present - {DRIVER}))
    lacks = f"the runtime image lacks {missing}" if missing else "all of them"
    libraries = check("image.libraries", "every library that the built files load", lacks, where,
                      ok=not missing)  # fmt: skip
    of_files = [*installed.checks, libraries]
    if cuda and toolkit:
        of_files += accept_artifact(inside, cuda.toolkit, cuda.requested, toolkit.same)
    # The copies in `inside` are removed afterwards: name the image's own files instead.
    checks: tuple[Check, ...] = (check_labels(plan, found), not_root)
    for one in of_files:
        observed = one.observed and one.observed.replace(str(inside), below)
        changes = {"observed": observed, "where": one.where.replace(str(inside), below)}
        checks += (one.model_copy(update=changes),)
    job.run.checks(checks)
    builder.all_passed("the built image is not as planned", checks)
    ran = _run_server(job, lock, found, toolkit.stub if toolkit else None)
    if cuda and job.ctx.docker.facts().nvidia:
        question = _question(found.id, plan.server, "--list-devices")
        ask = question.model_copy(update={"gpus": "all"})
        ran += builder.check_devices(
            job.ctx, job.run, inside, lambda: job.ctx.docker.ask(ask, timeout=builder.VERSION_S).out
        )
    job.run.checks(ran)
    builder.all_passed("the built image failed verification", (*checks, *ran))
    return job.keep(found, (*configured, *checks, *ran), files)


def _run_server(
    job: DockerBuild, lock: Lock, found: ImageFacts, stub: Path | None
) -> tuple[Check, ...]:
    """Run the image's server and check its stamp.

    A CUDA server does not start without a driver: it gets a GPU if the engine has one, else the
    toolkit's stub of the driver, which is enough for a version.
    """
    step, docker = job.plan.step("verify"), job.ctx.docker
    spec = _question(found.id, *step.argv)
    with job.run.step(step.id, step.argv) as taken:
        answer = docker.ask(spec, timeout=builder.VERSION_S)
        if answer.code and DRIVER in answer.err:
            if docker.facts().nvidia:
                with_gpu = spec.model_copy(update={"gpus": "all"})
                answer = docker.ask(with_gpu, timeout=builder.VERSION_S)
            elif stub:
                mount = Mount(source=str(stub.absolute()), target=f"{STUB_FOLDER}/{DRIVER}")
                env = {**spec.env, "LD_LIBRARY_PATH": STUB_FOLDER}
                with_stub = spec.model_copy(update={"mounts": (mount,), "env": env})
                with suppress(BakehouseError):  # an engine elsewhere does not see our files
                    instead = docker.ask(with_stub, timeout=builder.VERSION_S)
                    if not instead.code:
                        job.run.fact("driver", "no GPU here: --version ran with the driver's stub")
                        answer = instead
        taken.log.write_text(answer.out + answer.err)
        taken.code = answer.code
    if answer.code and DRIVER in answer.err:
        job.run.fact("driver", "not run: no GPU here and no stub of the driver")
        job.ctx.progress.say("no GPU here: the server of the image was not run")
        return ()
    caught = Captured(step.argv, answer.code, answer.out, answer.err)
    where = f"{' '.join(step.argv)} in {job.plan.image}"
    return builder.check_version(caught, lock.stamp, lock.build_number, where)


def _question(image: str, *argv: str) -> ContainerSpec:
    return ContainerSpec(
        image=image, entrypoint=argv[:1], argv=argv[1:], network="none", drop_capabilities=True,
        labels={OURS: "question"},
    )  # fmt: skip
