"""Plan a build of llama.cpp from recipe, lock, tools, host and places. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from bakehouse.cuda.configure import Conflict
from bakehouse.engines.base import Compiler, Expected
from bakehouse.engines.llamacpp import cmake
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra
from bakehouse.errors import HostError, RecipeError
from bakehouse.host import HostFacts
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.plan.types import BuildInputs, BuildPlan, Step
from bakehouse.recipe.models import Build, Recipe
from bakehouse.recipe.types import Origin
from bakehouse.toolchain import Tools

RULES = 1
"""Incremented when the same inputs would give other bytes."""
GENERATOR = "Ninja"
WORK = ".work/0"
"""Work folder inside the builds folder: the same path each time, so that a compiler cache hits, and
tools that write absolute paths into their output (nvcc) write the same ones."""
BYTES_A_JOB = 3 * 2**29
"""1.5 GiB: more than the largest of llama.cpp's C++ files takes to compile."""
NINJA_STATUS = "[%f/%t %e] "
"""Steps finished, steps in total, seconds so far; `build/error_parser.py` parses it."""

Where = Callable[[tuple[str, ...]], Origin]
"""Gives the place of a key of the recipe, such as ("build", "cmake", "GGML_X")."""


def plan_build(
    recipe: Recipe,
    lock: Lock,
    tools: Tools,
    host: HostFacts,
    places: Places,
    *,
    extra: Extra = NOTHING,
    jobs: int | None = None,
    where: Where | None = None,
) -> BuildPlan:
    """Plan a llama.cpp build.

    `jobs` overrides the number from cores and memory. Raises RecipeError for definitions that are
    refused, HostError if the cache folder's path cannot be part of compiler flags.
    """
    build = recipe.build or Build()
    refuse(recipe, build, extra, where)
    work = places.builds / WORK
    if bad := re.search(r"[\"$\\`;=#%:*\r\n]", str(work)):
        raise HostError(
            f"the cache folder's path contains {bad[0]!r}, which CMake does not support",
            where=str(places.cache),
            hint="set BAKEHOUSE_HOME to a folder with a plainer name",
        )
    # The work folder as configure and compile see it.
    inside = Path(extra.place) if extra.place else work
    date = lock.source.date if lock.source else 0
    own = cmake.recipe_definitions(build.cmake)
    merged = cmake.definitions(own, lock, extra, host.arch)
    cpu = f"{host.cpu_model}: {host.cpu_flags}" if cmake.for_this_cpu(merged) else None
    identities = {n: getattr(tools, n).identity for n in ("cmake", "cc", "cxx", "strip")}
    inputs = BuildInputs(
        rules=RULES,
        engine=recipe.engine,
        source_tree=lock.source_tree or "",
        stamp=lock.stamp,
        number=lock.build_number,
        date=date,
        generator=GENERATOR,
        targets=build.targets,
        definitions=merged,
        tools={**identities, **extra.tools},
        cpu=cpu,
        environment={"LC_ALL": "C.UTF-8", "TZ": "UTC", "SOURCE_DATE_EPOCH": str(date)},
    )
    flags = {
        name: [flag.replace("{work}", str(inside)) for flag in added]
        for name, added in extra.flags.items()
    }
    passed = _passed({**merged, **extra.paths}, tools, inside, flags)
    artifact = places.builds / inputs.digest
    compilers = {"C": tools.cc, "CXX": tools.cxx}
    expected = Expected(
        generator=GENERATOR,
        build_type=merged["CMAKE_BUILD_TYPE"],
        compilers={n: Compiler(path=t.path, version=t.version) for n, t in compilers.items()},
        forced={n: v for n, v in merged.items() if n not in own and not n.endswith("_FLAGS")},
        asked={name: passed[name] for name in own},
        targets=build.targets,
        cuda=extra.cuda,
    )
    not_reproducible = extra.not_reproducible
    if not not_reproducible and any(map(_nvcc_cannot, chain.from_iterable(flags.values()))):
        not_reproducible = (
            "nvcc splits flags at blanks and commas, so the toolkit's path is not mapped"
        )

    def environment(folder: Path) -> dict[str, str]:
        """Variables of the tools beside the allowlist, which also fixes locale and time zone."""
        env = {
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PATH": tools.search_path,
            "SOURCE_DATE_EPOCH": str(date),
            **extra.path_environment,
        }
        return dict(sorted(env.items()))

    # The compiler cache gets no base_dir: with it, ccache hands relative paths to the compiler,
    # which then appear in `__FILE__`, so that a build with a cache would differ from one without.
    # Every build of a home works at the same path instead, so that the cache hits as it is.
    compile_env = environment(inside)
    if tools.launcher:
        compile_env["CCACHE_DIR"] = str(places.compiler_cache)
        compile_env["CCACHE_TEMPDIR"] = str(inside / "tmp")
    compile_env["NINJA_STATUS"] = NINJA_STATUS
    mount = tuple(part.replace("{work}", str(work)) for part in extra.mount)
    folder, stage, targets = str(inside / "build"), work / "stage", build.targets
    configure = (tools.cmake.path, "-S", str(inside / "src"), "-B", folder, "-G", GENERATOR)
    parallel = str(jobs_for(build, host, jobs))
    steps = (
        Step(
            id="source",
            title="write the pinned source tree",
            cwd=str(work),
            expects=(f"git tree {lock.source_tree}",),
        ),
        Step(
            id="configure",
            title="configure with CMake",
            argv=(*mount, *configure, *(f"-D{n}={v}" for n, v in passed.items())),
            env=environment(inside),
            cwd=str(work),
            expects=("exit code 0",),
        ),
        Step(
            id="accept",
            title="judge what CMake says before anything is compiled",
            expects=(
                "planned compilers in their planned versions",
                "every definition held and used",
                "nothing fetched",
            ),
        ),
        Step(
            id="compile",
            title=f"compile {', '.join(targets)}",
            argv=(*mount, tools.ninja.path, "-C", folder, "-j", parallel, *targets),
            env=compile_env,
            cwd=str(work),
            expects=("exit code 0",),
        ),
        Step(
            id="install",
            title="strip the targets and the libraries that they load, fix modes",
            argv=(tools.strip.path, "--strip-all", "-o", f"{stage}/bin/{{name}}", "{file}"),
            env=environment(work),
            cwd=str(work),
            expects=("run path $ORIGIN", "every library there or the system's"),
        ),
        Step(
            id="verify",
            title="run the server for its stamp, then rename into place",
            argv=(str(stage / "bin" / cmake.SERVER), "--version"),
            env=environment(work),
            cwd=str(stage),
            expects=(f"build {lock.build_number}", f"commit {lock.stamp}", str(artifact)),
        ),
    )
    return BuildPlan(
        digest=inputs.digest,
        inputs=inputs,
        expected=expected,
        steps=steps,
        work=str(work),
        artifact=str(artifact),
        server=str(artifact / "bin" / cmake.SERVER),
        place=extra.place,
        not_reproducible=not_reproducible,
    )


def refuse(recipe: Recipe, build: Build, extra: Extra, where: Where | None) -> None:
    """Raise RecipeError with every part of `build` that is refused."""
    found = [*cmake.refusals(build.cmake, extra)]
    keys = ("build", "targets")
    if cmake.SERVER not in build.targets:
        message = f"{cmake.SERVER} is missing from the targets"
        found.append(Conflict(keys, message, f"add {cmake.SERVER}"))
    for target in build.targets:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", target):
            message = f"'{target}' is not the name of a target"
            found.append(Conflict(keys, message, f"write {cmake.SERVER}"))
    nowhere = Origin(f"recipe {recipe.name}", 0, 0)
    faults = [
        (where(one.keys) if where else nowhere).fault(
            f"{'.'.join(one.keys)}: {one.message}", one.hint
        )
        for one in found
    ]
    if faults:
        raise RecipeError(f"recipe {recipe.name} cannot be built", faults)


def _passed(
    merged: Mapping[str, str], tools: Tools, inside: Path, added: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Definitions as they are passed, with the paths of this machine."""
    git = str(inside / "tools" / "git")
    passed = {
        **merged,
        "CMAKE_C_COMPILER": tools.cc.path,
        "CMAKE_CXX_COMPILER": tools.cxx.path,
        "CMAKE_MAKE_PROGRAM": tools.ninja.path,
        "GIT_EXE": git,
        "GIT_EXECUTABLE": git,
    }
    if tools.launcher:
        passed["CMAKE_C_COMPILER_LAUNCHER"] = tools.launcher
        passed["CMAKE_CXX_COMPILER_LAUNCHER"] = tools.launcher
    prefix_map = _quoted(f"-ffile-prefix-map={inside}=/build")
    for name in cmake.COMPILE_FLAGS:
        passed[name] = " ".join(filter(None, (merged.get(name, ""), prefix_map)))
    for name, flags in added.items():
        texts = [_quoted(flag) for flag in flags if not _nvcc_cannot(flag)]
        passed[name] = " ".join(filter(None, (passed.get(name, ""), *texts)))
    return dict(sorted(passed.items()))


def _nvcc_cannot(flag: str) -> bool:
    """Whether nvcc would split a flag that it passes on."""
    return flag.startswith("-Xcompiler=") and bool(re.search(r"[\s,]", flag))


def _quoted(flag: str) -> str:
    return f'"{flag}"' if re.search(r"[^\w./=+,-]", flag) else flag


def jobs_for(build: Build, host: HostFacts, jobs: int | None) -> int:
    """Number of compilers at once: as given, else limited by cores and by free memory."""
    if jobs or build.jobs:
        return jobs or build.jobs or 1
    return max(1, min(host.cpus, host.memory_available // BYTES_A_JOB))
