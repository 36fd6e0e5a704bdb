"""Images that are built: llama.cpp's build on a small project, and Python over a vLLM image."""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse.build.image import image_files
from bakehouse.system.docker.models import ContainerSpec
from tests.support import vllm_stand_in as stand_in
from tests.support.checkpoints import safetensors_bytes
from tests.support.docker_engine import Engine, make_image
from tests.support.file_trees import differences
from tests.support.githost import Repo, serve_git
from tests.support.image_builds import BUILDER, ImageHome, write_small_recipe
from tests.support.recipes import recipe_data, write_recipe
from tests.support.small_engine import FILES
from tests.support.vllm_image import debian, import_root

pytestmark = [pytest.mark.integration, pytest.mark.docker, pytest.mark.timeout(240)]

BASE = "build-test/vllm:1"
PACKAGES = "/usr/lib/python3/dist-packages"
GLIMMER = "MuseGlimmerForCausalLM"


@pytest.fixture
def home(tmp_path: Path, docker_engine: Engine) -> Iterator[ImageHome]:
    yield ImageHome(tmp_path, docker_engine)
    for repository in ("bakehouse/test",):
        for one in set(docker_engine.cli("images", "--quiet", repository).split()):
            docker_engine.cli("rmi", "--force", one)


@pytest.fixture(scope="module")
def builder(docker_engine: Engine, test_cache: Path) -> str:
    """Debian with a compiler, CMake and Ninja."""
    root = debian(test_cache, "gcc,g++,cmake,ninja-build")
    return import_root(docker_engine, root, BUILDER, "ENV PATH=/usr/bin:/bin")


def test_image_build_of_a_server(home: ImageHome, builder: str) -> None:
    write_small_recipe(home, cmake={"SMALL_GREETING": "good morning $HOME"})
    lock = home.run("lock")["result"]["lock"]
    dry = home.run("build", "--dry-run")["result"]
    built = home.run("build")
    result = built["result"]
    assert result["image"] == dry["image"]
    verdicts = {c["id"]: c["verdict"] for c in built["checks"]}
    assert set(verdicts.values()) == {"passed"}
    assert {"configure.asked", "image.user", "image.labels", "artifact.stamp"} <= verdicts.keys()
    port = home.engine.port()
    image = port.image(result["image"])
    assert image is not None
    assert image.entrypoint == ("/opt/llama.cpp/bin/llama-server",)
    assert image.labels["bakehouse.recipe"] == "test"
    assert image.labels["bakehouse.source"] == lock["source_tree"]
    said = port.ask(ContainerSpec(image=result["image"], network="none"), timeout=30)
    assert "good morning $HOME" in said.out
    assert "/build/src/llama.cpp" in said.out
    added = {f.path for f in image_files(port, result["image"])} - {
        f.path for f in image_files(port, BUILDER)
    }
    assert added == {
        "opt/llama.cpp", "opt/llama.cpp/bin", "opt/llama.cpp/bin/llama-server",
        "opt/llama.cpp/bin/libllama.so.0", "opt/llama.cpp/bin/libggml.so.0",
    }  # fmt: skip
    assert not list((home.folder / "home/cache/images/.work").glob("*"))
    again = home.run("build")
    assert again["result"]["reused"]
    assert again["checks"] == built["checks"], "the evidence is shown again"


def test_image_build_is_reproducible(home: ImageHome, builder: str) -> None:
    """By BuildKit, where the command line has it, and by the classic builder."""
    write_small_recipe(home)
    home.run("lock")
    port = home.engine.port()
    first = home.run("build", PATH="/usr/bin:/bin:/usr/sbin:/sbin")["result"]
    files = image_files(port, first["image"])
    home.forget(first["image"])
    # A command line that knows no buildx, so that the classic builder is taken.
    shim = home.folder / "bin"
    shim.mkdir()
    (shim / "docker").write_text(
        '#!/bin/sh\ncase "$1" in --version) echo Docker version 99.0.0;;\n'
        f'buildx) exit 1;; *) exec env PATH={home.engine.environment["PATH"]} docker "$@";; esac\n'
    )
    (shim / "docker").chmod(0o755)
    path = f"{shim}:{home.engine.environment['PATH']}"
    second = home.run("build", PATH=path)["result"]
    assert not second["reused"]
    assert second["content"] == first["content"]
    assert differences(files, image_files(port, second["image"])) == ()


def test_image_build_names_the_first_error(home: ImageHome, builder: str) -> None:
    write_small_recipe(home, {**FILES, "ggml.c": "int broken( { return 1; }\n"})
    error = home.run("build", exits=6)["error"]
    assert error["what"].startswith("compile failed: ")
    assert "expected" in error["what"]
    assert "ggml.c:1:" in error["where"]
    assert home.engine.cli("images", "--quiet", "bakehouse/test") == ""
    assert home.engine.cli("ps", "--all", "--quiet") == "", "the failed step's container is left"


def test_image_build_refuses_unused_definitions_before_compiling(
    home: ImageHome, builder: str
) -> None:
    write_small_recipe(home, cmake={"SMALL_GREETINGS": "typo"})
    failed = home.run("build", exits=6)
    assert failed["error"]["id"] == "not-accepted"
    assert "SMALL_GREETING" in failed["error"]["what"]
    steps = json.loads(Path(failed["result"]["record"], "record.json").read_text())["steps"]
    assert steps[-1]["id"] == "accept"


def test_image_build_names_a_program_missing_in_the_builder(
    home: ImageHome, builder: str, docker_engine: Engine
) -> None:
    """NVIDIA's development images have no CMake: the fault that most people meet first."""
    bare = make_image(docker_engine, "build-test/no-cmake:1", "ENV PATH=/bin")
    assert bare
    bases = {role: {"x86_64": "build-test/no-cmake:1"} for role in ("builder", "runtime")}
    write_small_recipe(home, bases=bases)
    error = home.run("build", exits=6)["error"]
    assert error["id"] == "image-lacks"
    assert error["what"] == "configure failed: the image has no cmake"
    assert "derive one" in error["hint"]


def test_image_build_refuses_ggml_native(home: ImageHome, builder: str) -> None:
    write_small_recipe(home, cmake={"GGML_NATIVE": True})
    assert home.run("build", exits=9)["error"]["id"] == "image-native"


# Python over a vLLM image.


@pytest.fixture(scope="module")
def base(docker_engine: Engine, test_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian's Python with a small package named vllm, released as 0.1.0."""
    more = tmp_path_factory.mktemp("vllm")
    for name, text in stand_in.files("0.1.0").items():
        path = more / PACKAGES.strip("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = debian(test_cache)
    return import_root(docker_engine, root, BASE, "USER 1000:1000", "ENV PATH=/usr/bin:/bin",
                       'ENTRYPOINT ["vllm","serve"]', more=more)  # fmt: skip


def served(home: ImageHome, **image: Any) -> None:
    """Write a recipe that needs an architecture that the base image lacks."""
    model = home.folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"architectures": [GLIMMER]}))
    (model / "model.safetensors").write_bytes(safetensors_bytes({"w": ("F32", (2,), b"\0" * 8)}))
    data = recipe_data(
        engine="vllm", source=None, image={"ref": {"x86_64": BASE}, **image},
        weights={"model": {"path": "model"}},
        serve={"command": "vllm serve {{ weights.model.path }}"},
    )  # fmt: skip
    write_recipe(home.folder, data)


def diff(path: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}"


GOOD = diff(stand_in.PATH, stand_in.REGISTRY, stand_in.MORE)
TEST_FILE = """\
diff --git a/tests/t.py b/tests/t.py
new file mode 100644
--- /dev/null
+++ b/tests/t.py
@@ -0,0 +1 @@
+x = 1
"""


def test_overlay_base_alone_lacks_the_architecture(home: ImageHome, base: str) -> None:
    served(home)
    error = home.run("build", exits=6)["error"]
    assert error["id"] == "image-unable"


def test_overlay_of_a_patch_adds_the_architecture(home: ImageHome, base: str) -> None:
    (home.folder / "fix.patch").write_text(GOOD + TEST_FILE)
    served(home, patches=[{"file": "fix.patch"}])
    home.run("lock")
    built = home.run("build", "--locked")
    verdicts = {c["id"]: c["verdict"] for c in built["checks"]}
    assert verdicts == dict.fromkeys(
        ("image.labels", "image.overlay", "image.user", "image.model"), "passed"
    )
    image = home.engine.port().image(built["result"]["image"])
    assert image is not None
    assert (image.user, image.entrypoint) == ("1000:1000", ("vllm", "serve"))
    sha256 = hashlib.sha256((GOOD + TEST_FILE).encode()).hexdigest()
    assert sha256 in image.labels["bakehouse.patches"]
    was = image_files(home.engine.port(), BASE)
    lines = differences(was, image_files(home.engine.port(), built["result"]["image"]))
    assert [line.partition(": ")[0] for line in lines] == [
        f"usr/lib/python3/dist-packages/{stand_in.PATH}"
    ]
    record = json.loads(Path(built["result"]["record"]).read_text())
    assert record["facts"]["overlay"]["left out"] == ["tests/t.py"]
    assert home.run("build")["result"]["reused"]


@pytest.mark.parametrize(
    ("text", "code", "id_"),
    [
        (GOOD.replace("-NAMES = [", "-NAMES = [1, "), 5, "patch-conflicts"),
        (GOOD + GOOD.replace(stand_in.PATH, "csrc/kernel.cu"), 6, "overlay-compiled"),
        (TEST_FILE, 6, "overlay-empty"),
    ],
)
def test_overlay_refuses_patches(
    home: ImageHome, base: str, text: str, code: int, id_: str
) -> None:
    (home.folder / "fix.patch").write_text(text)
    served(home, patches=[{"file": "fix.patch"}])
    error = home.run("build", exits=code)["error"]
    assert error["id"] == id_, error


def test_overlay_with_a_mod_adds_the_architecture(home: ImageHome, base: str) -> None:
    mod = home.folder / "mods/glimmer"
    mod.mkdir(parents=True)
    (mod / "new.py").write_text(stand_in.MORE)
    target = f"{PACKAGES}/{stand_in.PATH}"
    (mod / "run.sh").write_text(f"#!/bin/sh\nset -eu\ncp new.py {target}\n")
    served(home, mods=[{"folder": "mods/glimmer"}])
    lock = home.run("lock")["result"]["lock"]
    assert [file["path"] for file in lock["mods"][0]["files"]] == ["new.py", "run.sh"]
    built = home.run("build", "--locked")
    assert {c["verdict"] for c in built["checks"]} == {"passed"}
    image = home.engine.port().image(built["result"]["image"])
    assert image is not None
    assert image.user == "1000:1000"
    assert image.labels["bakehouse.mods"].startswith("mods/glimmer:")
    lines = differences(
        image_files(home.engine.port(), BASE), image_files(home.engine.port(), image.id)
    )
    assert [line.partition(": ")[0] for line in lines] == [target[1:]]
    (mod / "new.py").write_text("other")
    home.forget(built["result"]["image"])
    error = home.run("build", exits=4)["error"]
    assert error["id"] == "mod-changed"
    (mod / "run.sh").write_text("#!/bin/sh\nexit 3\n")
    home.run("lock", "--update")
    assert home.run("build", exits=6)["error"]["what"].startswith("build failed: ")
    (mod / "run.sh").unlink()
    assert home.run("lock", "--update", exits=4)["error"]["id"] == "mod-missing"
    shutil.rmtree(mod)
    error = home.run("lock", "--update", exits=3)["error"]
    assert error["what"] == "folder of a mod 'glimmer' not found"


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Repo]:
    """The repository, whose tag v0.1.0 is what the base image was built from."""
    with serve_git(tmp_path / "host") as host:
        repo = host.repo("vllm/vllm.git")
        repo.commit(branch(), ref="refs/tags/v0.1.0")
        yield repo


def branch(registry: str = stand_in.REGISTRY, **more: str) -> dict[str, str]:
    """A commit's files: the package without what the build writes, and more."""
    package = {**stand_in.files("0.1.0", registry), "csrc/kernel.cu": "old", "README.md": "x"}
    del package["vllm/_version.py"]
    return package | more


def test_overlay_of_a_branch_adds_the_architecture(
    home: ImageHome, base: str, upstream: Repo
) -> None:
    files = branch(stand_in.MORE, **{"vllm/new.py": "new = 1\n", "docs/x.md": "x"})
    del files["vllm/old.py"]
    commit = upstream.commit(files, ref="refs/pull/51655/head")
    served(home, source={"git": upstream.url, "commit": commit})
    home.run("lock")
    built = home.run("build", "--locked")
    image = built["result"]["image"]
    assert {c["verdict"] for c in built["checks"]} == {"passed"}
    lines = differences(
        image_files(home.engine.port(), BASE), image_files(home.engine.port(), image)
    )
    folder = "usr/lib/python3/dist-packages"
    assert [line.partition(": ")[0].removeprefix(f"{folder}/") for line in lines] == [
        stand_in.PATH, "vllm/new.py", "vllm/old.py",
    ]  # fmt: skip
    found = home.engine.port().image(image)
    assert found is not None
    assert found.labels["bakehouse.source"] == commit


def test_overlay_refuses_branches(home: ImageHome, base: str, upstream: Repo) -> None:
    commit = upstream.commit(branch(stand_in.MORE, **{"csrc/kernel.cu": "new"}))
    served(home, source={"git": upstream.url, "commit": commit})
    error = home.run("build", exits=6)["error"]
    assert error["id"] == "overlay-compiled"
    assert "csrc/kernel.cu" in error["what"]
    # The image is not what its version says.
    upstream.commit(branch(**{"vllm/old.py": "other = 1\n"}), ref="refs/tags/v0.1.0")
    files = branch(stand_in.MORE)
    del files["vllm/old.py"]
    served(home, source={"git": upstream.url, "commit": upstream.commit(files)})
    home.run("lock", "--update")
    assert home.run("build", exits=6)["error"]["id"] == "overlay-base"
    # The repository does not know the image's release.
    upstream.delete("refs/tags/v0.1.0")
    assert home.run("build", exits=6)["error"]["id"] == "overlay-base"
