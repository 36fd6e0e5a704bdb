"""Fixtures of the container tests: the real vLLM with a real model, and a quick stand-in."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import safetensors_bytes
from tests.support.docker_engine import Engine
from tests.support.vllm_image import SITE, debian, import_root, real_image, real_model
from tests.support.vllm_stand_in import files

FAKE = Path(__file__).with_name("fake_vllm.py")
QUESTIONS = [
    {"ask": "What is 2+2?", "answers": ["4"]},
    {"ask": "How many days are in a week?", "answers": ["seven"]},
    {"ask": "What is the capital of France?", "answers": ["Paris"]},
]


@pytest.fixture(scope="session")
def fake_vllm(
    docker_engine: Engine, test_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """An image with Debian's Python, a stand-in as its `vllm`, and a package that can be asked."""
    code = b"#!/usr/bin/python3\n" + FAKE.read_bytes()
    over = tmp_path_factory.mktemp("fake-vllm")
    package = files("0.32.0")
    wanted = {"usr/local/bin/vllm": code, **{f"{SITE}/{p}": t.encode() for p, t in package.items()}}
    for path, content in wanted.items():
        (over / path).parent.mkdir(parents=True, exist_ok=True)
        (over / path).write_bytes(content)
    (over / "usr/local/bin/vllm").chmod(0o755)
    code = b"".join(wanted.values())
    name = f"bakehouse-test/fake-vllm:{hashlib.sha256(code).hexdigest()[:12]}"
    return import_root(
        docker_engine, debian(test_cache), name, 'ENTRYPOINT ["vllm","serve"]', more=over
    )


@pytest.fixture(scope="session")
def vllm_image(docker_engine: Engine, test_cache: Path) -> str:
    """The real vLLM on the CPU."""
    return real_image(docker_engine, test_cache)


@pytest.fixture(scope="session")
def vllm_model(docker_engine: Engine, test_cache: Path, vllm_image: str, smollm2: Path) -> Path:
    """SmolLM2 as safetensors, in float32."""
    return real_model(docker_engine, test_cache, smollm2, vllm_image)


def fake_model(folder: Path) -> Path:
    """A checkpoint that is whole and small; nothing ever computes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = safetensors_bytes({"model.embed_tokens.weight": ("F32", (4, 8), bytes(128))})
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, '
        '"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, '
        '"vocab_size": 4, "intermediate_size": 8, "max_position_embeddings": 4096}'
    )
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


def recipe_data(name: str, image: str, model: Path, **over: Any) -> dict[str, Any]:
    """A vLLM recipe as plain data; `serve` and `container` are laid over those that are here."""
    serve = {
        "port": 0, "context": 2048, "stop_timeout": "5s", "ready_timeout": "30s",
        "command": "{{ server }} serve {{ weights.model.path }} --max-model-len 2048",
        **over.pop("serve", {}),
    }  # fmt: skip
    container, more = over.pop("container", {}), over.pop("image_more", {})
    data = {
        "schema": 1, "name": name, "engine": "vllm",
        "image": {"ref": {"x86_64": image}, **more}, "container": container,
        "weights": {"model": {"path": str(model)}},
        "serve": serve,
        "probe": {"suites": ["facts"], "facts": {"questions": QUESTIONS}},
    }  # fmt: skip
    return {**data, **over}
