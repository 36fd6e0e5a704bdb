"""Plan a build of llama.cpp from recipe, lock, tools, host and places. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bakehouse.engines.base import Compiler, Expected
from bakehouse.engines.llamacpp import cmake
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra
from bakehouse.errors import Fault, HostError, RecipeError
from bakehouse.host import HostFacts
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.plan.types import BuildInputs, BuildPlan, Step
from bakehouse.recipe.models import Build, Recipe
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
    work = places.builds / WORK
    if bad := re.search(r"[\"$\\`;=#%:*\r\n]", str(work)):
        raise HostError(
            f"the cache folder's path contains {bad[0]!r}, which CMake does not support",
            where=str(places.cache),
            hint="set BAKEHOUSE_HOME to a folder with a plainer name",
        )
    seen = Path(extra.place) if extra.place else work
    return _Planner(recipe, build, lock, tools, host, places, extra, work, seen).plan(jobs)


def refuse(recipe: Recipe, build: Build, extra: Extra, where: Where | None) -> None:
    """Raise RecipeError with every part of `build` that is refused."""
    found: list[tuple[tuple[str, ...], str, str]] = [
        (("build", "cmake", r.name), r.message, r.hint) for r in cmake.refusals(build.cmake, extra)
    ]
    if cmake.SERVER not in build.targets:
        message = f"{cmake.SERVER} is missing from the targets"
        found.append((("build", "targets"), message, f"add {cmake.SERVER}"))
    for target in build.targets:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", target):
            message = f"'{target}' is not the name of a target"
            found.append((("build", "targets"), message, f"write {cmake.SERVER}"))
    if not found:
        return
    faults = []
    for keys, message, hint in found:
        file, line, column = where(keys) if where else (f"recipe {recipe.name}", 0, 0)
        faults.append(Fault(file, line, column, f"{'.'.join(keys)}: {message}", hint))
    raise RecipeError(f"recipe {recipe.name} cannot be built", faults)


@dataclass(frozen=True)
class _Planner:
    """What a plan is made from, and one method for each part of it."""

    recipe: Recipe
    build: Build
    lock: Lock
    tools: Tools
    host: HostFacts
    places: Places
    extra: Extra
    work: Path
    seen: Path
    """The work folder as configure and compile see it."""

    def plan(self, jobs: int | None) -> BuildPlan:
        tools, extra = self.tools, self.extra
        own = cmake.asked(self.build.cmake)
        merged = cmake.definitions(own, self.lock, extra, self.host.arch)
        inputs = self.inputs(merged)
        passed = self.passed(merged)
        artifact = self.places.builds / inputs.digest
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
            targets=self.build.targets,
            cuda=extra.cuda,
        )
        return BuildPlan(
            digest=inputs.digest,
            inputs=inputs,
            expected=expected,
            steps=self.steps(artifact, passed, jobs_for(self.build, self.host, jobs)),
            work=str(self.work),
            artifact=str(artifact),
            server=str(artifact / "bin" / cmake.SERVER),
            place=extra.place,
            not_reproducible=self.not_reproducible(),
        )

    @property
    def date(self) -> int:
        return self.lock.source.date if self.lock.source else 0

    def inputs(self, merged: Mapping[str, str]) -> BuildInputs:
        """Everything that can change the bytes of the artifact."""
        names = ("cmake", "cc", "cxx", "strip")
        native = cmake.for_this_cpu(merged)
        return BuildInputs(
            rules=RULES,
            engine=self.recipe.engine,
            source_tree=self.lock.source_tree or "",
            stamp=self.lock.stamp,
            number=self.lock.build_number,
            date=self.date,
            generator=GENERATOR,
            targets=self.build.targets,
            definitions=dict(merged),
            tools={**{n: getattr(self.tools, n).identity for n in names}, **self.extra.tools},
            cpu=f"{self.host.cpu_model}: {self.host.cpu_flags}" if native else None,
            environment={
                "LC_ALL": "C.UTF-8",
                "TZ": "UTC",
                "SOURCE_DATE_EPOCH": str(self.date),
                **self.extra.environment,
            },
        )

    def passed(self, merged: Mapping[str, str]) -> dict[str, str]:
        """Definitions as they are passed, with the paths of this machine."""
        git = str(self.seen / "tools" / "git")
        passed = {
            **merged,
            "CMAKE_C_COMPILER": self.tools.cc.path,
            "CMAKE_CXX_COMPILER": self.tools.cxx.path,
            "CMAKE_MAKE_PROGRAM": self.tools.ninja.path,
            "GIT_EXE": git,
            "GIT_EXECUTABLE": git,
            **self.extra.paths,
        }
        if self.tools.launcher:
            passed["CMAKE_C_COMPILER_LAUNCHER"] = self.tools.launcher
            passed["CMAKE_CXX_COMPILER_LAUNCHER"] = self.tools.launcher
        prefix_map = _quoted(f"-ffile-prefix-map={self.seen}=/build")
        for name in cmake.COMPILE_FLAGS:
            passed[name] = " ".join(filter(None, (merged.get(name, ""), prefix_map)))
        for name, flags in self.flags().items():
            texts = [_quoted(flag) for flag in flags if not _nvcc_cannot(flag)]
            passed[name] = " ".join(filter(None, (passed.get(name, ""), *texts)))
        return dict(sorted(passed.items()))

    def flags(self) -> dict[str, list[str]]:
        """Flags that the toolkit adds to a definition."""
        return {
            name: [flag.replace("{work}", str(self.seen)) for flag in flags]
            for name, flags in self.extra.flags.items()
        }

    def not_reproducible(self) -> str:
        flags = [flag for some in self.flags().values() for flag in some]
        if self.extra.not_reproducible or not any(map(_nvcc_cannot, flags)):
            return self.extra.not_reproducible
        return "nvcc splits flags at blanks and commas, so the toolkit's path is not mapped"

    def environment(self, work: Path) -> dict[str, str]:
        """Variables of the tools beside the allowlist, which also fixes locale and time zone."""
        env = {
            "HOME": str(work / "home"),
            "TMPDIR": str(work / "tmp"),
            "PATH": self.tools.search_path,
            "SOURCE_DATE_EPOCH": str(self.date),
            **self.extra.environment,
            **self.extra.path_environment,
        }
        return dict(sorted(env.items()))

    def compile_environment(self) -> dict[str, str]:
        """The same with the compiler cache.

        No base_dir: it makes ccache hand relative paths to the compiler, which then appear in
        `__FILE__`, so that a build with a cache would differ from one without. Every build of a
        home works at the same path instead, so that the cache hits as it is.
        """
        env = self.environment(self.seen)
        if self.tools.launcher:
            env["CCACHE_DIR"] = str(self.places.compiler_cache)
            env["CCACHE_TEMPDIR"] = str(self.seen / "tmp")
        return {**env, "NINJA_STATUS": NINJA_STATUS}

    def steps(self, artifact: Path, passed: Mapping[str, str], jobs: int) -> tuple[Step, ...]:
        """Source, configure, accept, compile, install, verify."""
        lock, tools, targets, work = self.lock, self.tools, self.build.targets, str(self.work)
        mount = tuple(part.replace("{work}", work) for part in self.extra.mount)
        source, folder, stage = self.seen / "src", str(self.seen / "build"), self.work / "stage"
        configure = (tools.cmake.path, "-S", str(source), "-B", folder, "-G", GENERATOR)
        definitions = (f"-D{name}={value}" for name, value in passed.items())
        last = self.environment(self.work)
        return (
            Step(
                id="source",
                title="write the pinned source tree",
                cwd=work,
                expects=(f"git tree {lock.source_tree}",),
            ),
            Step(
                id="configure",
                title="configure with CMake",
                argv=(*mount, *configure, *definitions),
                env=self.environment(self.seen),
                cwd=work,
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
                argv=(*mount, tools.ninja.path, "-C", folder, "-j", str(jobs), *targets),
                env=self.compile_environment(),
                cwd=work,
                expects=("exit code 0",),
            ),
            Step(
                id="install",
                title="strip the targets and the libraries that they load, fix modes",
                argv=(tools.strip.path, "--strip-all", "-o", f"{stage}/bin/{{name}}", "{file}"),
                env=last,
                cwd=work,
                expects=("run path $ORIGIN", "every library there or the system's"),
            ),
            Step(
                id="verify",
                title="run the server for its stamp, then rename into place",
                argv=(str(stage / "bin" / cmake.SERVER), "--version"),
                env=last,
                cwd=str(stage),
                expects=(f"build {lock.build_number}", f"commit {lock.stamp}", str(artifact)),
            ),
        )


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
