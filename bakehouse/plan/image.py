"""Plan an image: pulled by digest or built from a Dockerfile, and what it must support. Pure.

The architecture is the engine's, which on a plain machine is the host's. Dockerfiles are rendered
from the templates in `docker/`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse import __version__
from bakehouse.cuda.configure import COMPILER, ROOT, WITHOUT_DRIVER, wants_cuda
from bakehouse.engines.base import Expected, RequiredCapabilities
from bakehouse.engines.llamacpp import cmake
from bakehouse.engines.llamacpp.cmake import Extra
from bakehouse.errors import BuildFailed, HostError
from bakehouse.host import HostFacts
from bakehouse.lock import GitPin, ImagePin, Lock
from bakehouse.models import digest
from bakehouse.paths import shipped
from bakehouse.plan.build import GENERATOR, jobs_for, refuse
from bakehouse.plan.types import ImagePlan, Step
from bakehouse.recipe.models import Build, Recipe
from bakehouse.redact import clean
from bakehouse.system.docker.models import OURS

IMAGE_RULES = 1
"""Raised when the same inputs would give another vLLM image."""
BUILD_RULES = 2
"""Raised when the same inputs would give another image of llama.cpp."""
DOCKER_FOLDER = shipped("docker")
"""Beside the package, not in it: a package named docker would shadow the Docker SDK."""
SCRIPTS = ("logged.sh", "toolkit.sh", "compile.sh", "collect.sh")
PREFIX = "/opt/llama.cpp"
CUDA_ROOT = "/usr/local/cuda"
"""Where NVIDIA's development images have their one toolkit."""


def uses_image(recipe: Recipe) -> bool:
    """Whether a recipe is served from a container image."""
    return recipe.image is not None or bool(recipe.build and recipe.build.where == "docker")


# Names, labels and Dockerfiles.


def tag_of(name: str, key: str) -> str:
    """Return a built image's name: the recipe's, for people, and the plan's digest."""
    plain = re.sub(r"[._-]+", "-", name).strip("-")
    return f"{OURS}/{plain}:{key[:16]}"


def base_name(pin: ImagePin) -> str:
    """Return a base image's name in a Dockerfile: its digest, or our own name for a local one."""
    return pin.ref if pin.digest else f"{OURS}/base:{pin.id.removeprefix('sha256:')[:24]}"


def labels_of(recipe: Recipe, lock: Lock, key: str) -> dict[str, str]:
    """Return a built image's labels, which show its inputs."""
    source = lock.source.commit if isinstance(lock.source, GitPin) else lock.source_tree
    return {
        OURS: __version__,
        f"{OURS}.recipe": recipe.name,
        f"{OURS}.plan": key,
        f"{OURS}.lock": digest(lock),
        f"{OURS}.source": source or "none",
        f"{OURS}.mods": " ".join(f"{m.folder}:{digest(m)}" for m in lock.mods) or "none",
        f"{OURS}.patches": " ".join(f"{p.id}:{p.file.sha256}" for p in lock.patches) or "none",
    }


def build_argv(
    image: str, args: Mapping[str, str], labels: Mapping[str, str], target: str | None = None
) -> tuple[str, ...]:
    """Return the command that builds an image; it runs in the folder of the context."""
    argv = ["docker", "build", "--force-rm", "--network", "none", "--tag", image]
    if target:
        argv += ["--target", target]
    else:
        argv += [part for n, v in args.items() for part in ("--build-arg", f"{n}={v}")]
        argv += [part for n, v in labels.items() for part in ("--label", f"{n}={v}")]
    return (*argv, ".")


def render(template: str, **values: Any) -> str:
    """Render a Dockerfile; commands go through `tojson`, so that no shell reads them.

    Raises BuildFailed for a text value with a space or a line break, such as a user in the
    configuration of a foreign image: it could add an instruction of its own.
    """
    for name, value in values.items():
        if isinstance(value, str) and not re.fullmatch(r"[!-~]+", value):
            raise BuildFailed(
                f"the image's {name} is not valid in a Dockerfile",
                where=f"{template}: '{clean(value, one_line=True)}'", id="image-odd",
                hint="use another base image, or report it to its publisher",
            )  # fmt: skip
    import jinja2  # slow to import, and few plans need it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DOCKER_FOLDER), undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True, trim_blocks=True, autoescape=False,  # noqa: S701 - no HTML
    )  # fmt: skip
    environment.filters["tojson"] = json.dumps
    return environment.get_template(template).render(values)


def script(name: str) -> bytes:
    """Return a file of `docker/` that goes into a build unchanged."""
    return (DOCKER_FOLDER / name).read_bytes()


def _script_hashes(*names: str) -> dict[str, str]:
    return {name: hashlib.sha256(script(name)).hexdigest() for name in names}


def _pull_step(role: str, pin: ImagePin, arch: str) -> Step:
    if pin.local:
        title = f"check that the engine has the local image {pin.reference}"
    else:
        title = f"pull {pin.reference} by digest, unless it is here: {pin.size:,} bytes compressed"
    return Step(
        id="pull" if role == "image" else f"pull-{role}",
        title=title,
        expects=(pin.ref, f"linux on {arch}"),
    )


# vLLM images.


def plan_image(recipe: Recipe, lock: Lock, arch: str, command: Sequence[str]) -> ImagePlan:
    """Plan the image of a vLLM recipe for `arch`; `command` is the server's, with example paths.

    Raises HostError if the lock has no image for that architecture.
    """
    from bakehouse.engines.vllm.image_probe import required_capabilities

    pin = lock.image(arch)
    needs = required_capabilities(recipe, command)
    if recipe.image and recipe.image.built:
        return _plan_overlay(recipe, lock, arch, pin, needs)
    return ImagePlan(
        digest=digest({"rules": IMAGE_RULES, "image": pin.ref, "arch": arch}),
        image=pin.ref,
        arch=arch,
        pins={"image": pin},
        server="vllm",
        asks=needs,
        steps=(_pull_step("image", pin, arch), _query_step(pin.ref, needs)),
    )


def _plan_overlay(
    recipe: Recipe, lock: Lock, arch: str, pin: ImagePin, needs: RequiredCapabilities
) -> ImagePlan:
    """Plan an image that pinned patches, a branch or mods change, over the pinned base."""
    overlay = bool(lock.source or lock.patches)
    text = render(
        "vllm.Dockerfile.j2", base=base_name(pin), user=pin.user or "root", overlay=overlay,
        mods=lock.mods,
    )  # fmt: skip
    key = digest(
        {
            "rules": IMAGE_RULES, "dockerfile": text, "scripts": _script_hashes("lay.py"),
            "image": pin.ref, "arch": arch, "source": lock.source_tree,
            "patches": [[patch.file.sha256, patch.allow] for patch in lock.patches],
            "mods": [[file.to_data() for file in mod.files] for mod in lock.mods],
        }
    )  # fmt: skip
    image, labels = tag_of(recipe.name, key), labels_of(recipe, lock, key)
    changes = "the branch's Python files" if lock.source else "the patched Python files"
    made = Step(
        id="overlay",
        title=f"make {changes}, from those in the base image",
        expects=("no compiled code changes", "every hunk applies"),
    )
    mods = "".join(f", run the mod {mod.folder}" for mod in lock.mods)
    steps = (
        _pull_step("image", pin, arch),
        *([made] if overlay else []),
        Step(
            id="build",
            title=f"change the base image: {'lay them over' if overlay else 'no new files'}{mods}",
            argv=build_argv(image, {}, labels),
            expects=("exit code 0", "our labels", "exactly those files in the image"),
        ),
        _query_step(image, needs),
    )
    return ImagePlan(
        digest=key, image=image, arch=arch, pins={"image": pin}, server="vllm", dockerfile=text,
        labels=labels, asks=needs, steps=steps,
    )  # fmt: skip


def _query_step(image: str, needs: RequiredCapabilities) -> Step:
    expects = [f"the architectures of the {role}, by its config.json" for role in needs.roles]
    named = {
        "reasoning parser": needs.reasoning_parser,
        "tool parser": needs.tool_parser,
        "speculative method": needs.speculation,
    }
    expects += [f"{what} {name}" for what, name in named.items() if name]
    return Step(
        id="able",
        title=f"query the Python of {image} for what it supports; no GPU, no network",
        expects=tuple(expects),
    )


# llama.cpp in a container.


def definitions_of(build: Build, lock: Lock, arch: str) -> dict[str, str]:
    """Return the CMake definitions for the builder. Raises HostError for GGML_NATIVE."""
    extra = _extra(build)
    merged = cmake.definitions(cmake.recipe_definitions(build.cmake), lock, extra, arch)
    if cmake.for_this_cpu(merged):
        raise HostError(
            "an image cannot be built for one CPU: GGML_NATIVE is on",
            where="build.cmake.GGML_NATIVE", id="image-native",
            hint="remove it, or build on the host: build.where: host",
        )  # fmt: skip
    passed = {**merged, "GIT_EXE": "/build/tools/git", "GIT_EXECUTABLE": "/build/tools/git"}
    for name in cmake.COMPILE_FLAGS:
        passed[name] = f"{merged.get(name, '')} -ffile-prefix-map=/build=/build".strip()
    for name, flags in extra.flags.items():
        passed[name] = " ".join(filter(None, (passed.get(name, ""), *flags)))
    return dict(sorted(passed.items()))


def _extra(build: Build) -> Extra:
    # Both halves of the toolkit are named: CMake looks for each of them separately.
    pair = {COMPILER: f"{CUDA_ROOT}/bin/nvcc", ROOT: CUDA_ROOT}
    return Extra(definitions=pair, flags=WITHOUT_DRIVER) if build.cuda else cmake.NOTHING


def expected_of(build: Build, lock: Lock, arch: str) -> Expected:
    """Return what CMake must configure; the builder's digest pins the compilers."""
    passed = definitions_of(build, lock, arch)
    own = cmake.recipe_definitions(build.cmake)
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
    server = f"{PREFIX}/bin/{cmake.SERVER}"
    cuda = wants_cuda(build)
    text = render(
        "llama.cpp.Dockerfile.j2", builder=base_name(pins["builder"]),
        runtime=base_name(pins["runtime"]), date=date, prefix=PREFIX, server=server,
        configure=[
            "sh", "/build/tools/logged.sh", "/build/evidence/configure.log",
            "cmake", "-S", "/build/src", "-B", "/build/build", "-G", GENERATOR,
            *(f"-D{n}={v}" for n, v in definitions_of(build, lock, host.arch).items()),
        ],
        compile=["sh", "/build/tools/compile.sh", *build.targets],
        collect=["sh", "/build/tools/collect.sh", *build.targets],
        cuda=CUDA_ROOT if cuda else None,
    )  # fmt: skip
    key = digest(
        {
            "rules": BUILD_RULES, "dockerfile": text, "scripts": _script_hashes(*SCRIPTS),
            "git": cmake.git_stand_in(lock), "source": lock.source_tree, "arch": host.arch,
            "bases": {role: pin.ref for role, pin in pins.items()},
        }
    )  # fmt: skip
    args = {"JOBS": str(jobs_for(build, host, jobs))}
    image, labels = tag_of(recipe.name, key), labels_of(recipe, lock, key)
    steps = (
        *(_pull_step(role, pin, host.arch) for role, pin in pins.items()),
        Step(
            id="source",
            title="write the pinned source tree into an empty build context",
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
            title="check CMake's configuration before anything is compiled",
            expects=(
                "every definition set and used",
                "nothing fetched",
                *(("one CUDA toolkit, of the wanted release",) if cuda else ()),
            ),
        ),
        Step(
            id="compile",
            title="compile, and copy the server and its libraries to the runtime image",
            argv=build_argv(image, args, labels),
            expects=(
                "exit code 0",
                "our labels",
                "not root",
                "every library that it loads",
                *(("GPU code for the wanted architectures",) if cuda else ()),
            ),
        ),
        Step(
            id="verify",
            title="run the server in the image for its stamp",
            argv=(f"{PREFIX}/bin/{cmake.SERVER}", "--version"),
            expects=(f"build {lock.build_number}", f"commit {lock.stamp}"),
        ),
    )
    return ImagePlan(
        digest=key, image=image, arch=host.arch, pins=pins, server=server, dockerfile=text,
        args=args, labels=labels, steps=steps,
    )  # fmt: skip
