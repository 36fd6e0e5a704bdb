"""Finding toolkits: links, wrappers, broken ones, versions and bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.cuda.toolkit import (
    Found,
    choose,
    compiled_for,
    find_toolkits,
    header_version,
    parse_architecture,
    satisfies,
)
from bakehouse.errors import HostError
from bakehouse.host import parse_gpus

CONFIG = """#if __GNUC__ > 15
#error -- unsupported GNU version!
#endif
#if (__clang_major__ >= 21) || (__clang_major__ < 3)
"""


def install(
    root: Path, version: str = "13.0.88", *, headers: str = "13000", target: str = ""
) -> Path:
    """A toolkit folder with an nvcc that answers as the real one does."""
    base = root / "targets" / target if target else root
    for folder in (root / "bin", base / "include" / "crt", base / "lib" / "stubs"):
        folder.mkdir(parents=True)
    (base / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {headers}\n")
    (base / "include" / "crt" / "host_config.h").write_text(CONFIG)
    for name in ("libcudart.so", "libcublas.so", "libcublasLt.so", "stubs/libcuda.so"):
        (base / "lib" / name).write_text(name)
    nvcc = root / "bin" / "nvcc"
    inner = f"targets/{target}" if target else ""
    nvcc.write_text(
        f"""#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
case "$1" in
--version) echo "Cuda compilation tools, release 0, V{version}"; echo "Build cuda_x/compiler.1";;
--help) echo "Allowed values: 'sm_90','sm_90a','sm_121a','compute_75','lto_90'";;
--dryrun) echo '#$ _TARGET_DIR_=' >&2; echo "#$ _TARGET_DIR_={inner}" >&2
  echo "#$ TOP=$here/.." >&2;;
esac
"""
    )
    nvcc.chmod(0o755)
    return root


@pytest.fixture
def bare(context: Context) -> Context:
    return replace(context, environment={"PATH": "/usr/bin:/bin"})


def find(ctx: Context, tmp_path: Path, *extra: str, **env: str) -> Found:
    system = tmp_path / "local"
    system.mkdir(exist_ok=True)
    return find_toolkits(replace(ctx, environment={**ctx.environment, **env}), extra, system=system)


def test_toolkit_with_many_names_is_found_once(bare: Context, tmp_path: Path) -> None:
    root = install(tmp_path / "local" / "cuda-13.0")
    (tmp_path / "local" / "cuda").symlink_to("cuda-13.0")
    found = find(
        bare, tmp_path, str(root / "bin"), CUDA_HOME=str(root), CUDACXX=str(root / "bin" / "nvcc"),
        PATH=f"{tmp_path / 'local' / 'cuda' / 'bin'}:/usr/bin:/bin",
    )  # fmt: skip
    assert len(found.toolkits) == 1
    only = found.toolkits[0]
    assert only.root == str(root)
    assert len(only.origins) == 6
    assert found.broken == ()
    assert (only.version, only.headers, only.gcc_max, only.clang_max) == ("13.0.88", "13.0", 15, 20)
    assert only.architectures == ("90", "90a", "121a")
    assert only.faults == ()
    assert "13.0.88 cuda_x/compiler.1" in only.identity


def test_toolkit_wrapper_is_followed_to_the_real_root(bare: Context, tmp_path: Path) -> None:
    target = "sbsa-linux"
    root = install(tmp_path / "real", target=target)
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = find(bare, tmp_path, PATH=f"{wrapper.parent}:/usr/bin:/bin")
    only = found.toolkits[0]
    assert (only.root, only.nvcc) == (str(root), str(root / "bin" / "nvcc"))
    assert only.target == target
    assert only.library == str(root / "targets" / target / "lib")
    assert only.faults == ()


def test_toolkit_that_does_not_work_is_listed_with_the_reason(
    bare: Context, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    (local / "cuda-12.8" / "bin").mkdir(parents=True)
    (local / "cuda").symlink_to("cuda-gone")
    dead = install(local / "cuda-13.1")
    (dead / "bin" / "nvcc").write_text("#!/bin/sh\necho 'cannot execute' >&2; exit 3\n")
    mute = install(local / "cuda-13.3")
    (mute / "bin" / "nvcc").write_text("#!/bin/sh\necho hello\n")
    (local / "cuda-13.4" / "bin").mkdir(parents=True)
    (local / "cuda-13.4" / "bin" / "nvcc").symlink_to("nowhere")
    found = find(bare, tmp_path, CUDA_HOME=str(tmp_path / "missing"))
    assert found.toolkits == ()
    why = {Path(b.path).parents[1].name: b.why for b in found.broken}
    assert why["cuda-12.8"] == why["cuda"] == why["missing"] == "nvcc not found"
    assert "cannot execute" in why["cuda-13.1"]
    assert "prints no version" in why["cuda-13.3"]
    assert why["cuda-13.4"] == "a dangling link"


def test_toolkit_is_chosen_by_version_and_path(bare: Context, tmp_path: Path) -> None:
    local = tmp_path / "local"
    install(local / "cuda-13.0")
    other = install(tmp_path / "opt", "13.0.48")
    install(local / "cuda-13.2", "13.2.86", headers="13020")
    half = install(local / "cuda-13.1", "13.1.80", headers="13020")
    found = find(bare, tmp_path, str(other))
    assert choose(found, "13.0").version == "13.0.88"
    assert choose(found, "13.0", str(other)).version == "13.0.48"
    assert choose(found, "13.2.86").root == str(local / "cuda-13.2")
    with pytest.raises(HostError) as error:
        choose(found, "13.1")
    assert "nvcc is 13.1.80, but the headers are 13.2" in (error.value.where or "")
    assert str(half) in (error.value.where or "")
    with pytest.raises(HostError, match=r"12\.8") as error:
        choose(found, "12.8")
    assert error.value.exit_code == 9
    assert "provide: pypi" in (error.value.hint or "")
    assert "13.2.86" in (error.value.where or "")


def test_toolkit_without_a_library_is_not_chosen(
    bare: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bakehouse.cuda.toolkit.SYSTEM_LIBRARIES", ())
    library = install(tmp_path / "local" / "cuda-13.0") / "lib"
    for lacking in ("libcublas.so", "stubs/libcuda.so", "libcudart.so"):
        (library / lacking).rename(tmp_path / "aside")
        found = find(bare, tmp_path)
        assert len(found.toolkits[0].faults) == 1, lacking
        with pytest.raises(HostError):
            choose(found, "13.0")
        (tmp_path / "aside").rename(library / lacking)


def test_toolkit_versions_are_compared_number_by_number() -> None:
    rows = {
        ("13.0.88", "13.0"): True, ("13.0.88", "13.0.88"): True, ("13.0.88", "13.0.8"): False,
        ("13.10.1", "13.1"): False, ("13.1.80", "13.10"): False, ("13.0.88", ""): False,
    }  # fmt: skip
    assert {pair: satisfies(*pair) for pair in rows} == rows
    assert header_version("", "#define CUDART_VERSION  12080\n") == "12.8"
    assert header_version("#define CUDA_VERSION 13020") == "13.2"
    assert header_version("nothing") is None


def test_toolkit_architectures_are_parsed() -> None:
    bad = ("native", "all", "sm_90", "90x", "9", "90-fake", "90-real;80")
    assert [text for text in bad if parse_architecture(text)] == []
    embeds = {
        "90": {"sm_90", "compute_90"}, "121a-real": {"sm_121a"}, "120f-virtual": {"compute_120f"},
    }  # fmt: skip
    found = {text: parse_architecture(text) for text in embeds}
    assert {text: set(made.embeds) for text, made in found.items() if made} == embeds
    assert [str(made) for made in found.values()] == list(embeds)
    assert compiled_for("'sm_90','sm_100f','sm_9' 'compute_75'") == ("9", "90", "100f")


def test_gpu_list_of_the_driver_is_parsed() -> None:
    text = (
        "0, NVIDIA GB10, 12.1, 580.159.03, [N/A], [Not Supported]\n"
        "1, NVIDIA H200, 9.0, 580.159.04, 143771 MiB, 143000 MiB\n"
        "2, NVIDIA X, [N/A], 580, 1 MiB, 1 MiB\n"
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
        "Failed, a, b, c, d, e\n\n"
    )
    gpus = parse_gpus(text)
    assert [(g.memory_total, g.memory_free) for g in gpus] == [
        (None, None),
        (143771 * 2**20, 143000 * 2**20),
    ]
    assert "memory_total" not in gpus[0].to_data()
    assert [(g.index, g.name, g.compute_capability) for g in gpus] == [
        (0, "NVIDIA GB10", "12.1"),
        (1, "NVIDIA H200", "9.0"),
    ]
