"""Plan a build of llama.cpp from recipe, lock, tools, host and places. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bakehouse.engines.configured import Compiler, Expected
from bakehouse.engines.llamacpp import cmake as engine
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra
from bakehouse.errors import Fault, HostError, RecipeError
from bakehouse.host import HostFacts
from bakehouse.lock import Lock
from bakehouse.places import Places
from bakehouse.plan.types import BuildInputs, BuildPlan, Step
from bakehouse.recipe.model import Build, Recipe
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
"""Steps finished, steps in total, seconds so far; `build.ninja` parses it."""

Where = Callable[[tuple[str, ...]], tuple[str, int, int]]
"""Gives file, line and column of a key of the recipe, such as ("build", "cmake", "GGML_X")."""


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
    own = engine.asked(build.cmake)
    merged = engine.definitions(own, lock, extra, host.arch)
    work = _work_folder(places)
    inputs = _inputs(recipe, build, lock, tools, host, merged, extra)
    seen = Path(extra.place) if extra.place else work
    passed = _passed(merged, tools, seen, extra)
    artifact = places.builds / inputs.digest
    env = _environment(lock, tools, seen, extra)
    if tools.launcher:
        # No base_dir: it makes ccache hand relative paths to the compiler, which then appear in
        # `__FILE__`, so that a build with a cache would differ from one without. Every build of a
        # home works at the same path instead, so that the cache hits as it is.
        cache = {"CCACHE_DIR": str(places.compiler_cache), "CCACHE_TEMPDIR": str(seen / "tmp")}
    else:
        cache = {}
    expected = Expected(
        generator=GENERATOR,
        build_type=merged["CMAKE_BUILD_TYPE"],
        compilers={
            "C": Compiler(path=tools.cc.path, version=tools.cc.version),
            "CXX": Compiler(path=tools.cxx.path, version=tools.cxx.version),
            **{n: Compiler(path=p, version=v) for n, (p, v) in extra.compilers.items()},
        },
        forced={n: v for n, v in merged.items() if n not in own and not n.endswith("_FLAGS")},
        asked={name: passed[name] for name in own},
        targets=build.targets,
        cuda=extra.cuda,
    )
    return BuildPlan(
        digest=inputs.digest,
        inputs=inputs,
        expected=expected,
        steps=_steps(
            lock,
            tools,
            artifact,
            passed,
            (env, {**env, **cache}, _environment(lock, tools, work, extra)),
            build.targets,
            jobs_for(build, host, jobs),
            extra,
        ),
        work=str(work),
        artifact=str(artifact),
        server=str(artifact / "bin" / engine.SERVER),
        place=extra.place,
        not_reproducible=_not_reproducible(extra, seen),
    )


def _work_folder(places: Places) -> Path:
    """Give the work folder. Raises HostError for a path that flags cannot contain."""
    work = places.builds / WORK
    if bad := re.search(r"[\"$\\`;=#%:*\r\n]", str(work)):
        raise HostError(
            f"the cache folder's path contains {bad[0]!r}, which CMake does not support",
            where=str(places.cache),
            hint="set BAKEHOUSE_HOME to a folder with a plainer name",
        )
    return work


def refuse(recipe: Recipe, build: Build, extra: Extra, where: Where | None) -> None:
    """Raise RecipeError with every part of `build` that is refused."""
    found: list[tuple[tuple[str, ...], str, str]] = [
        (("build", "cmake", r.name), r.message, r.hint) for r in engine.refusals(build.cmake, extra)
    ]
    if engine.SERVER not in build.targets:
        message = f"{engine.SERVER} is missing from the targets"
        found.append((("build", "targets"), message, f"add {engine.SERVER}"))
    for target in build.targets:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", target):
            message = f"'{target}' is not the name of a target"
            found.append((("build", "targets"), message, f"write {engine.SERVER}"))
    if not found:
        return
    faults = []
    for keys, message, hint in found:
        file, line, column = where(keys) if where else (f"recipe {recipe.name}", 0, 0)
        faults.append(Fault(file, line, column, f"{'.'.join(keys)}: {message}", hint))
    raise RecipeError(f"recipe {recipe.name} cannot be built", faults)


def _inputs(
    recipe: Recipe,
    build: Build,
    lock: Lock,
    tools: Tools,
    host: HostFacts,
    merged: Mapping[str, str],
    extra: Extra,
) -> BuildInputs:
    """Everything that can change the bytes of the artifact."""
    native = engine.for_this_cpu(merged)
    date = lock.source.date if lock.source else 0
    return BuildInputs(
        rules=RULES,
        engine=recipe.engine,
        source_tree=lock.source_tree or "",
        stamp=lock.stamp,
        number=lock.build_number,
        date=date,
        generator=GENERATOR,
        targets=build.targets,
        definitions=dict(merged),
        tools={
            "cmake": tools.cmake.identity,
            "cc": tools.cc.identity,
            "cxx": tools.cxx.identity,
            "strip": tools.strip.identity,
            **extra.tools,
        },
        cpu=f"{host.cpu_model}: {host.cpu_flags}" if native else None,
        environment={
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "SOURCE_DATE_EPOCH": str(date),
            **extra.environment,
        },
    )


def _passed(merged: Mapping[str, str], tools: Tools, work: Path, extra: Extra) -> dict[str, str]:
    """Definitions as they are passed, with the paths of this machine."""
    passed = {
        **merged,
        "CMAKE_C_COMPILER": tools.cc.path,
        "CMAKE_CXX_COMPILER": tools.cxx.path,
        "CMAKE_MAKE_PROGRAM": tools.ninja.path,
        "GIT_EXE": str(work / "tools" / "git"),
        "GIT_EXECUTABLE": str(work / "tools" / "git"),
        **extra.paths,
    }
    if tools.launcher:
        passed["CMAKE_C_COMPILER_LAUNCHER"] = tools.launcher
        passed["CMAKE_CXX_COMPILER_LAUNCHER"] = tools.launcher
    prefix_map = _quoted(f"-ffile-prefix-map={work}=/build")
    for name in engine.COMPILE_FLAGS:
        passed[name] = " ".join(filter(None, (merged.get(name, ""), prefix_map)))
    for name, flags in extra.flags.items():
        texts = [flag.replace("{work}", str(work)) for flag in flags]
        texts = [_quoted(flag) for flag in texts if not _nvcc_cannot(flag)]
        passed[name] = " ".join(filter(None, (passed.get(name, ""), *texts)))
    return dict(sorted(passed.items()))


def _nvcc_cannot(flag: str) -> bool:
    """Whether nvcc would split a flag that it passes on."""
    return flag.startswith("-Xcompiler=") and bool(re.search(r"[\s,]", flag))


def _not_reproducible(extra: Extra, work: Path) -> str:
    flags = [flag.replace("{work}", str(work)) for some in extra.flags.values() for flag in some]
    if extra.not_reproducible or not any(map(_nvcc_cannot, flags)):
        return extra.not_reproducible
    return "nvcc splits flags at blanks and commas, so the toolkit's path is not mapped"


def _quoted(flag: str) -> str:
    return f'"{flag}"' if re.search(r"[^\w./=+,-]", flag) else flag


def jobs_for(build: Build, host: HostFacts, jobs: int | None) -> int:
    """Number of compilers at once: as given, else limited by cores and by free memory."""
    if jobs or build.jobs:
        return jobs or build.jobs or 1
    return max(1, min(host.cpus, host.memory_available // BYTES_A_JOB))


def _environment(lock: Lock, tools: Tools, work: Path, extra: Extra) -> dict[str, str]:
    """Variables of the tools beside the allowlist, which also fixes locale and time zone."""
    env = {
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "PATH": tools.search_path,
        "SOURCE_DATE_EPOCH": str(lock.source.date if lock.source else 0),
        **extra.environment,
        **extra.path_environment,
    }
    return dict(sorted(env.items()))


def _steps(
    lock: Lock,
    tools: Tools,
    artifact: Path,
    passed: Mapping[str, str],
    environments: tuple[dict[str, str], dict[str, str], dict[str, str]],
    targets: tuple[str, ...],
    jobs: int,
    extra: Extra,
) -> tuple[Step, ...]:
    """Source, configure, accept, compile, install, verify.

    `environments` are those of configure, of compile (both may see the work folder at another
    path) and of the last steps.
    """
    work = artifact.parent / WORK
    seen = Path(extra.place) if extra.place else work
    mount = tuple(part.replace("{work}", str(work)) for part in extra.mount)
    source, folder, stage = seen / "src", seen / "build", work / "stage"
    env, compile_env, last = environments
    configure = (*mount, tools.cmake.path, "-S", str(source), "-B", str(folder), "-G", GENERATOR)
    return (
        Step(
            id="source",
            title="write the pinned source tree",
            cwd=str(work),
            expects=(f"git tree {lock.source_tree}",),
        ),
        Step(
            id="configure",
            title="configure with CMake",
            argv=(*configure, *(f"-D{name}={value}" for name, value in passed.items())),
            env=env,
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
            argv=(*mount, tools.ninja.path, "-C", str(folder), "-j", str(jobs), *targets),
            env={**compile_env, "NINJA_STATUS": NINJA_STATUS},
            cwd=str(work),
            expects=("exit code 0",),
        ),
        *_last_steps(lock, tools, artifact, stage, last),
    )


def _last_steps(
    lock: Lock, tools: Tools, artifact: Path, stage: Path, env: dict[str, str]
) -> tuple[Step, ...]:
    """Install and verify what was compiled."""
    return (
        Step(
            id="install",
            title="strip the targets and the libraries that they load, fix modes",
            argv=(tools.strip.path, "--strip-all", "-o", str(stage / "bin" / "{name}"), "{file}"),
            env=env,
            cwd=str(stage.parent),
            expects=("run path $ORIGIN", "every library there or the system's"),
        ),
        Step(
            id="verify",
            title="run the server for its stamp, then rename into place",
            argv=(str(stage / "bin" / engine.SERVER), "--version"),
            env=env,
            cwd=str(stage),
            expects=(f"build {lock.build_number}", f"commit {lock.stamp}", str(artifact)),
        ),
    )
