"""llama.cpp built in a container: its Dockerfile, what goes in, what it is called. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bakehouse.base import digest
from bakehouse.engines.configured import Expected
from bakehouse.engines.llamacpp import cmake as engine
from bakehouse.engines.llamacpp.cmake import Extra
from bakehouse.errors import HostError
from bakehouse.host import HostFacts
from bakehouse.lock import ImagePin, Lock
from bakehouse.plan.build import GENERATOR, jobs_for, refuse
from bakehouse.plan.built import base_name, build_argv, labels_of, tag_of
from bakehouse.plan.dockerfile import render, script_hashes
from bakehouse.plan.image import pull_step
from bakehouse.plan.types import ImagePlan, Step
from bakehouse.recipe.model import Build, Recipe
from bakehouse.toolkit.force import COMPILER, ROOT, WITHOUT_DRIVER, wants_cuda

RULES = 2
"""Raised when the same inputs would give another image."""
TEMPLATE = "llama.cpp.Dockerfile.j2"
SCRIPTS = ("logged.sh", "toolkit.sh", "compile.sh", "collect.sh")
PREFIX = "/opt/llama.cpp"
CUDA_ROOT = "/usr/local/cuda"
"""Where NVIDIA's development images have their one toolkit."""


def definitions_of(build: Build, lock: Lock, arch: str) -> dict[str, str]:
    """CMake definitions as they are passed inside the builder."""
    merged = engine.definitions(engine.asked(build.cmake), lock, _extra(build), arch)
    if engine.for_this_cpu(merged):
        raise HostError(
            "an image is not built for one CPU: GGML_NATIVE is on",
            where="build.cmake.GGML_NATIVE", id="image-native",
            hint="leave it out, or build on the host: build.where: host",
        )  # fmt: skip
    passed = {**merged, "GIT_EXE": "/build/tools/git", "GIT_EXECUTABLE": "/build/tools/git"}
    for name in engine.COMPILE_FLAGS:
        passed[name] = f"{merged.get(name, '')} -ffile-prefix-map=/build=/build".strip()
    for name, flags in _extra(build).flags.items():
        passed[name] = " ".join(filter(None, (passed.get(name, ""), *flags)))
    return dict(sorted(passed.items()))


def _extra(build: Build) -> Extra:
    if build.cuda is None:
        return engine.NOTHING
    # Both halves of the toolkit are named: CMake looks each of them up on its own.
    pair = {COMPILER: f"{CUDA_ROOT}/bin/nvcc", ROOT: CUDA_ROOT}
    return Extra(definitions=pair, flags=WITHOUT_DRIVER)


def expected_of(build: Build, lock: Lock, arch: str) -> Expected:
    """What acceptance holds the configured build against; the builder's digest pins compilers."""
    passed = definitions_of(build, lock, arch)
    own = engine.asked(build.cmake)
    return Expected(
        generator=GENERATOR,
        build_type=passed["CMAKE_BUILD_TYPE"],
        compilers={},
        forced={n: v for n, v in passed.items() if n not in own and not n.endswith("_FLAGS")},
        asked={name: passed[name] for name in own},
        targets=build.targets,
    )


def plan_image_build(
    recipe: Recipe, lock: Lock, host: HostFacts, *, jobs: int | None = None
) -> ImagePlan:
    """Plan an image of llama.cpp. Raises RecipeError, HostError as `plan_build` does."""
    build = recipe.build or Build()
    refuse(recipe, build, _extra(build), None)
    pins = {role: lock.image(host.arch, role) for role in ("builder", "runtime")}
    date = lock.source.date if lock.source else 0
    server = f"{PREFIX}/bin/{engine.SERVER}"
    text = render(
        TEMPLATE, builder=base_name(pins["builder"]), runtime=base_name(pins["runtime"]),
        date=date, prefix=PREFIX, server=server,
        configure=_configure(definitions_of(build, lock, host.arch)),
        compile=["sh", "/build/tools/compile.sh", *build.targets],
        collect=["sh", "/build/tools/collect.sh", *build.targets],
        cuda=CUDA_ROOT if wants_cuda(build) else None,
    )  # fmt: skip
    key = digest(
        {
            "rules": RULES, "dockerfile": text, "scripts": script_hashes(*SCRIPTS),
            "git": engine.git_stand_in(lock), "source": lock.source_tree, "arch": host.arch,
            "bases": {role: pin.ref for role, pin in pins.items()},
        }
    )  # fmt: skip
    args = {"JOBS": str(jobs_for(build, host, jobs))}
    labels = labels_of(recipe, lock, key)
    image = tag_of(recipe.name, key)
    return ImagePlan(
        digest=key, image=image, arch=host.arch, pins=pins, server=server, dockerfile=text,
        args=args, labels=labels,
        steps=_steps(pins, host.arch, image, args, labels, lock, cuda=wants_cuda(build)),
    )  # fmt: skip


def _configure(passed: Mapping[str, str]) -> list[str]:
    log = ["sh", "/build/tools/logged.sh", "/build/evidence/configure.log"]
    command = ["cmake", "-S", "/build/src", "-B", "/build/build", "-G", GENERATOR]
    return [*log, *command, *(f"-D{name}={value}" for name, value in passed.items())]


def _steps(
    pins: Mapping[str, ImagePin],
    arch: str,
    image: str,
    args: Mapping[str, str],
    labels: Mapping[str, str],
    lock: Lock,
    *,
    cuda: bool,
) -> tuple[Step, ...]:
    return (
        *(pull_step(role, pin, arch) for role, pin in pins.items()),
        Step(
            id="source",
            title="write the pinned source tree and nothing else into the build's context",
            expects=(f"git tree {lock.source_tree}",),
        ),
        Step(
            id="configure",
            title="configure in the builder",
            argv=build_argv(f"{image}-evidence", args, labels, "evidence"),
            expects=("exit code 0",),
        ),
        Step(
            id="accept",
            title="judge what CMake says before anything is compiled",
            expects=(
                "every definition held and used",
                "nothing fetched",
                *(("one CUDA toolkit, of the release wanted",) if cuda else ()),
            ),
        ),
        Step(
            id="compile",
            title="compile, and copy what runs to the runtime image",
            argv=build_argv(image, args, labels),
            expects=(
                "exit code 0",
                "our labels",
                "not root",
                "every library that it loads",
                *(("GPU code for the architectures wanted",) if cuda else ()),
            ),
        ),
        Step(
            id="verify",
            title="run the server in the image for its stamp",
            argv=(f"{PREFIX}/bin/{engine.SERVER}", "--version"),
            expects=(f"build {lock.build_number}", f"commit {lock.stamp}"),
        ),
    )
