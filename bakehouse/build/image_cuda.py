"""An image with a CUDA build in it, judged by the rules of a build on this machine.

The toolkit is the builder's and its files are not here: `docker/toolkit.sh` tells of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from bakehouse.build import steps
from bakehouse.build.image_files import ImageFile
from bakehouse.build.install import judge_files
from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.engines.configured import CudaExpected, Expected
from bakehouse.engines.llamacpp.cmake import asked
from bakehouse.errors import BakehouseError, BuildFailed
from bakehouse.host import read_gpus
from bakehouse.ports.docker import OURS, Answered, ContainerSpec, Mount
from bakehouse.recipe.model import Build
from bakehouse.records.store import Run
from bakehouse.redact import clean
from bakehouse.toolkit.artifact import accept_artifact, accept_devices, covers, find_cuda_file
from bakehouse.toolkit.embedded import read_cuda_file
from bakehouse.toolkit.find import NotAToolkit, inspect
from bakehouse.toolkit.force import ARCHITECTURES, wants_cuda
from bakehouse.toolkit.types import Requested, split_list
from bakehouse.toolkit.views import Told

DRIVER = "libcuda.so.1"
"""The driver's library: the engine puts the machine's own into a container that is given a GPU."""
STUB_AT = "/run/bakehouse-driver-stub"


def with_toolkit(
    expected: Expected, build: Build, root: str, evidence: Path, log: str
) -> tuple[Expected, Told | None]:
    """Give what a CUDA build is held against, by what the builder told of the toolkit at `root`.

    Raises BuildFailed where there is none that works.
    """
    if build.cuda is None or not wants_cuda(build):
        return expected, None
    try:
        told = Told(evidence / "toolkit")
        toolkit = inspect(told, Path(root, "bin", "nvcc"))
        if toolkit.faults:
            raise NotAToolkit("; ".join(toolkit.faults))
    except (OSError, ValueError, NotAToolkit) as error:
        raise BuildFailed(
            f"the builder image has no complete CUDA toolkit at {root}: {error}", where=log,
            hint="take a development image with CUDA, such as nvidia/cuda:13.0.2-devel-ubuntu24.04",
            id="no-toolkit",
        ) from error  # fmt: skip
    requested = Requested(
        version=build.cuda.version, definitions=asked(build.cmake),
        architectures=split_list(str(build.cmake.get(ARCHITECTURES, ""))),
    )  # fmt: skip
    cuda = CudaExpected(toolkit=toolkit, requested=requested, links=dict(told.links))
    return expected.model_copy(update={"cuda": cuda}), told


def accept_image_files(
    folder: Path,
    files: Iterable[ImageFile],
    expected: Expected,
    told: Told | None,
    *,
    image: str,
    server_folder: str,
) -> tuple[Check, ...]:
    """Judge what an image holds; `folder` has copies of what was built, `files` is all of it."""
    where = f"{server_folder} in {image}"
    names = sorted(file.name for file in folder.iterdir())
    installed = judge_files(folder, names, where)
    there = {PurePosixPath(file.path).name for file in files if file.kind != "folder"}
    missing = sorted(set(installed.system) - there - {DRIVER})
    libraries = check(
        "image.libraries", "every library that the built files load",
        f"the runtime image lacks {', '.join(missing)}" if missing else "all of them", where,
        ok=not missing,
    )  # fmt: skip
    checks = (*installed.checks, libraries)
    if expected.cuda and told:
        cuda = expected.cuda
        checks += accept_artifact(folder, cuda.toolkit, cuda.requested, told.same)
    # The copies are gone when somebody reads this; the image's own files are not.
    return tuple(_inside(one, str(folder), server_folder) for one in checks)


def _inside(one: Check, copies: str, server_folder: str) -> Check:
    """Name the image's files in place of our copies of them."""
    observed = one.observed and one.observed.replace(copies, server_folder)
    return one.model_copy(
        update={"observed": observed, "where": one.where.replace(copies, server_folder)}
    )


def ask_server(ctx: Context, spec: ContainerSpec, run: Run, stub: Path | None) -> Answered:
    """Run the server of an image for a moment; give its answer.

    A CUDA server does not start without a driver: it gets a GPU where the engine has one, and where
    it has none the toolkit's stub of the driver, which is enough to tell a version.
    """
    said = ctx.docker.ask(spec, timeout=steps.VERSION_S)
    if not said.code or DRIVER not in said.err:
        return said
    if ctx.docker.facts().nvidia:
        given = spec.model_copy(update={"gpus": "all"})
        return ctx.docker.ask(given, timeout=steps.VERSION_S)
    if stub is None:
        return said
    mount = Mount(source=str(stub.absolute()), target=f"{STUB_AT}/{DRIVER}")
    stood_in = spec.model_copy(
        update={"mounts": (mount,), "env": {**spec.env, "LD_LIBRARY_PATH": STUB_AT}}
    )
    try:
        instead = ctx.docker.ask(stood_in, timeout=steps.VERSION_S)
    except BakehouseError:  # an engine elsewhere, which does not see our files
        return said
    if not instead.code:
        run.fact("driver", "this engine has no GPU: the driver's stub stood in to run --version")
    return instead


def accept_image_devices(
    ctx: Context, image: str, server: str, folder: Path, run: Run
) -> tuple[Check, ...]:
    """Have the image's server list its devices, where this machine's GPU is one it has code for."""
    gpus = read_gpus(ctx.processes)
    file = find_cuda_file(folder)
    embedded = read_cuda_file(file).embedded if file else frozenset()
    if not any(covers(embedded, gpu.compute_capability) for gpu in gpus):
        run.fact("devices", "built for another GPU than this machine's")
        return ()
    spec = ContainerSpec(
        image=image, entrypoint=(server,), argv=("--list-devices",), network="none", gpus="all",
        drop_capabilities=True, labels={OURS: "question"},
    )  # fmt: skip
    said = ctx.docker.ask(spec, timeout=steps.VERSION_S)
    run.fact("devices", {"listed": clean(said.out), "driver": [gpu.to_data() for gpu in gpus]})
    return accept_devices(said.out, gpus, embedded)
