"""Problems of the corpus that a header shows; test names hold their ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bakehouse.models import Check
from bakehouse.preflight.weights import (
    architectures_in,
    inspect,
    template_check,
)
from tests.support.checkpoints import (
    Entry,
    f32,
    gguf_bytes,
    llama_metadata,
    safetensors_bytes,
    write,
)

KNOWN = frozenset({"llama", "clip", "gemma3"})


def model(folder: Path, name: str = "m.gguf", **changes: Any) -> Path:
    return write(folder / name, gguf_bytes(llama_metadata(**changes), [f32("a", 64)]))


def projector(folder: Path, metadata: dict[str, Any], *tensors: Entry) -> Path:
    data = gguf_bytes({"general.architecture": "clip", **metadata}, tensors)
    return write(folder / "mmproj-F16.gguf", data)


def failed(checks: Sequence[Check]) -> dict[str, str]:
    return {c.id: c.observed for c in checks if c.verdict == "failed"}


def test_weights_sound_model_passes(tmp_path: Path) -> None:
    seen = inspect({"model": [model(tmp_path)]}, architectures=KNOWN)
    assert all(c.passed for c in seen.checks)
    assert [c.id for c in seen.checks] == [
        "model-files", "model-architecture", "model-pre-tokenizer", "model-chat-template"
    ]  # fmt: skip
    assert seen.checkpoints["model"].parameters == 64


@pytest.mark.engine
def test_weights_real_model_passes(smollm2: Path) -> None:
    assert all(c.passed for c in inspect({"model": [smollm2]}, architectures=KNOWN).checks)


def test_weights_b05_a_projector_of_another_size(tmp_path: Path) -> None:
    files = {
        "model": [model(tmp_path, llama__embedding_length=2560)],
        "projector": [
            projector(tmp_path, {"clip.vision.projection_dim": 2048}, f32("mm.2.weight", 16, 2048))
        ],
    }
    assert "2048" in failed(inspect(files).checks)["projector-matches"]


def test_weights_b05_a_projector_of_the_right_size(tmp_path: Path) -> None:
    files = {
        "model": [model(tmp_path)],
        "projector": [
            projector(tmp_path, {"clip.vision.projection_dim": 512}, f32("mm.2.weight", 16, 64))
        ],
    }
    assert not failed(inspect(files).checks)


def test_weights_projector_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    files = {"model": [model(tmp_path)], "projector": [projector(tmp_path, {}, f32("v.x", 3))]}
    (found,) = (c for c in inspect(files).checks if c.id == "projector-matches")
    assert found.verdict == "unknown"


def test_weights_model_in_the_place_of_a_projector_and_the_other_way_round(tmp_path: Path) -> None:
    files = {"model": [model(tmp_path)], "projector": [model(tmp_path, "p.gguf")]}
    assert "not a projector" in failed(inspect(files).checks)["projector-matches"]
    swapped = {"model": [projector(tmp_path, {}, f32("v.x", 3))]}
    assert "weights.projector" in failed(inspect(swapped, chat=False).checks)["model-architecture"]


def test_weights_b08_splits_merged_by_cat(tmp_path: Path) -> None:
    split = {"split.count": 3, "split.no": 0, "split.tensors.count": 1}
    data = gguf_bytes({**llama_metadata(), **split}, [f32("a", 64)])
    path = write(tmp_path / "model.gguf", data + bytes(70_000))
    assert "cat" in failed(inspect({"model": [path]}).checks)["model-files"]


def test_weights_b09_other_files_are_named(tmp_path: Path) -> None:
    rows = [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs"),
        (b"<!doctype html>", "HTML"),
        (b"<html>", "HTML"),
        (b"Entry not found", "HTTP error"),
        (b"Invalid credentials", "HTTP error"),
    ]
    for data, word in rows:
        path = write(tmp_path / "m.gguf", data)
        assert word in failed(inspect({"model": [path]}).checks)["model-files"]


def test_weights_b11_a_truncated_model(tmp_path: Path) -> None:
    path = model(tmp_path)
    write(path, path.read_bytes()[:-64])
    assert "truncated: the tensor 'a'" in failed(inspect({"model": [path]}).checks)["model-files"]


def test_weights_b17_an_architecture_newer_than_the_pin(tmp_path: Path) -> None:
    path = model(tmp_path, general__architecture="llama4")
    found = failed(inspect({"model": [path]}, architectures=KNOWN).checks)
    assert "newer pin or a patch" in found["model-architecture"]


def test_weights_b17_without_the_source_nothing_is_claimed(tmp_path: Path) -> None:
    (found,) = (
        c for c in inspect({"model": [model(tmp_path)]}).checks if c.id == "model-architecture"
    )
    assert found.verdict == "unknown"


def test_weights_b18_no_architecture(tmp_path: Path) -> None:
    for name in (None, ""):
        path = model(tmp_path, general__architecture=name)
        found = failed(inspect({"model": [path]}, architectures=KNOWN).checks)
        assert "no general.architecture" in found["model-architecture"]


def test_weights_b32_no_pre_tokenizer(tmp_path: Path) -> None:
    path = model(tmp_path, tokenizer__ggml__pre=None)
    assert "old converter" in failed(inspect({"model": [path]}).checks)["model-pre-tokenizer"]
    unigram = model(tmp_path, tokenizer__ggml__pre=None, tokenizer__ggml__model="llama")
    assert not failed(inspect({"model": [unigram]}).checks)


def test_weights_chat_template_matters_only_for_chat(tmp_path: Path) -> None:
    files = {"model": [model(tmp_path, tokenizer__chat_template=None)]}
    assert "model-chat-template" in failed(inspect(files).checks)
    assert not failed(inspect(files, chat=False).checks)
    assert not failed(inspect(files, argv=["llama-server", "--chat-template", "chatml"]).checks)
    assert not failed(inspect(files, argv=["--chat-template-file=x.jinja"]).checks)


def test_weights_c28_a_tensor_in_two_shards(tmp_path: Path) -> None:
    key = "model.layers.0.mlp.experts.0.down_proj.qweight"
    paths = [
        write(tmp_path / f"s-{i}.safetensors", safetensors_bytes({key: ("U8", [1], b"x")}))
        for i in (1, 2)
    ]
    checks = inspect({"model": paths}).checks
    assert key in failed(checks)["model-files"]
    assert all(f"s-{i}.safetensors" in checks[0].where for i in (1, 2))


TABLE = """
static const std::map<llm_arch, const char *> LLM_ARCH_NAMES = {
    { LLM_ARCH_CLIP,             "clip"             }, // dummy, only used by llama-quantize
    { LLM_ARCH_LLAMA,            "llama"            },
    {LLM_ARCH_GLM5_NEXT,"glm5-next"},
    { LLM_ARCH_UNKNOWN,          "(unknown)"        },
};
static const std::map<llm_kv, const char *> LLM_KV_NAMES = {
    { LLM_KV_GENERAL_TYPE, "general.type" },
};
"""


def test_weights_architectures_of_a_source() -> None:
    assert architectures_in(TABLE) == {"clip", "llama", "glm5-next"}
    assert architectures_in("int main() {}") == frozenset()


TEMPLATES: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"tokenizer_config.json": '{"chat_template": "x"}'}, (), "passed"),
    ({"tokenizer_config.json": "{}"}, (), "failed"),
    ({"tokenizer_config.json": "{}", "chat_template.jinja": "x"}, (), "passed"),
    ({"tokenizer_config.json": "{}"}, ("--chat-template", "/weights/model/x"), "passed"),
    ({"tokenizer_config.json": "{"}, (), "unknown"),
    ({"tokenizer_config.json": "[]"}, (), "unknown"),
    ({"tekken.json": "{}"}, (), "unknown"),
]


def test_weights_chat_template_of_a_checkpoint(tmp_path: Path) -> None:
    found = []
    for number, (files, argv, _) in enumerate(TEMPLATES):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        found.append(template_check([folder / name for name in files], argv).verdict)
    assert found == [verdict for _, _, verdict in TEMPLATES]
