"""`fit` with a Hub on loopback that holds real headers: nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.cli import main
from bakehouse.commands import fit
from bakehouse.context import Context
from bakehouse.errors import HostError, NotFound, UsageError
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.memory.machines import PROFILES
from bakehouse.preflight.weights import admit, refuse_by_size
from bakehouse.recipe.models import Recipe
from tests.support.checkpoints import gguf_bytes, llama_metadata, safetensors_bytes
from tests.support.clocks import ImpatientClock
from tests.support.filehost import FileHost, Handler, serve_files
from tests.support.recipes import make_loaded

pytestmark = pytest.mark.integration
COMMIT = "5" * 40
LISTED = {  # sizes as published; GB
    "UD-IQ1_S": [46.5, 46.59], "UD-IQ1_M": [48.5, 49.08], "UD-Q2_K_XL": [27.18] * 4,
    "UD-IQ3_XXS": [40.0, 40.0, 40.37], "UD-Q3_K_XL": [49.0, 49.0, 49.54],
}  # fmt: skip
GLM = {
    "general.architecture": "glm5-next", "glm5-next.block_count": 46,
    "glm5-next.nextn_predict_layers": 1, "glm5-next.embedding_length": 4096,
    "glm5-next.context_length": 1_048_576, "glm5-next.attention.head_count": 32,
    "glm5-next.attention.head_count_kv": [int((i + 1) % 4 == 0 or i == 45) for i in range(46)],
    "glm5-next.attention.key_length": 512, "glm5-next.attention.value_length": 512,
    "glm5-next.attention.key_length_mla": 192, "glm5-next.attention.value_length_mla": 128,
    "glm5-next.kda.head_dim": 128, "glm5-next.ssm.conv_kernel": 4, "glm5-next.expert_count": 288,
    "glm5-next.expert_used_count": 8, "glm5-next.expert_feed_forward_length": 1536,
}  # fmt: skip
PARTS = {"blk.1.ffn_up_exps.weight": 0.9, "blk.1.attn_q.weight": 0.1}
"""Share of a file's bytes, by tensor."""


class FakeHub:
    """Files of a declared size, of which only the head is there."""

    def __init__(self, host: FileHost) -> None:
        self.host, self.heads, self.sizes = host, {}, {}  # type: ignore[var-annotated]
        self.sent = 0
        host.pages[f"/api/models/o/m/revision/{'main'}"] = self.listing

    def put(self, path: str, head: bytes, size: int) -> None:
        self.heads[path], self.sizes[path] = head, size
        self.host.pages[f"/o/m/resolve/{COMMIT}/{path}"] = self.part

    def listing(self, handler: Handler) -> None:
        siblings = [{"rfilename": p, "size": s} for p, s in self.sizes.items()]
        handler.answer(200, json.dumps({"id": "m", "sha": COMMIT, "siblings": siblings}).encode())

    def part(self, handler: Handler) -> None:
        path = handler.path.removeprefix(f"/o/m/resolve/{COMMIT}/")
        size = self.sizes[path]
        asked = handler.headers["Range"]
        begin, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        first, last = int(begin), min(int(end or size), size - 1)
        body = self.heads[path][first : last + 1].ljust(last + 1 - first, b"\0")
        self.sent += len(body)
        if asked:
            handler.answer(206, body, {"Content-Range": f"bytes {first}-{last}/{size}"})
        else:
            handler.answer(200, body)


def split_head(number: int, count: int, size: int) -> bytes:
    """The header of a split, whose tensors fill a file of `size` bytes."""
    kv: dict[str, Any] = {"split.no": number, "split.count": count}
    kv |= {"split.tensors.count": 2 * count}
    kv = {**(GLM | {"tokenizer.ggml.tokens": ["x" * 20] * 50_000} if not number else {}), **kv}
    rows = [(f"{name}{number}", (int((size - 2**22) * part) // 32 * 32 // 34 * 32,))
            for name, part in PARTS.items()]  # fmt: skip
    offsets, at = [], 0
    for _, (length,) in rows:
        offsets.append(at)
        at += -(-length // 32 * 34 // 32) * 32
    return gguf_bytes(kv, [(n, shape, 8, b"") for n, shape in rows], offsets=offsets)


@pytest.fixture
def hub(context: Context) -> Iterator[tuple[FakeHub, Context]]:
    with serve_files() as host:
        made = FakeHub(host)
        environment = {"HF_ENDPOINT": host.url}
        yield made, replace(context, environment=environment)


def glm(hub: FakeHub) -> None:
    for quant, sizes in LISTED.items():
        for i, size in enumerate(sizes):
            name = f"{quant}/GLM-5.3-Flash-{quant}-{i + 1:05d}-of-{len(sizes):05d}.gguf"
            hub.put(name, split_head(i, len(sizes), int(size * 1e9)), int(size * 1e9))
    hub.put("mmproj-F16.gguf", b"", 1_130_000_000)
    hub.put("README.md", b"", 5000)


def test_fit_glm_quantisations_on_a_gb10(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    glm(fake)
    outcome = fit.run(ctx, fit.Options(hub="o/m", host="gb10", context="262144", kv_cache="q8_0"))
    rungs = {rung["name"]: rung for rung in outcome.result["rungs"]}
    assert list(rungs) == list(LISTED)
    assert rungs["UD-Q2_K_XL"]["size"] == 108_720_000_000
    assert rungs["UD-Q2_K_XL"]["files"] == 4
    assert outcome.result["recommended"] == "UD-Q2_K_XL"
    assert [name for name, rung in rungs.items() if rung["fits"]] == list(LISTED)[:3]
    assert rungs["UD-Q2_K_XL"]["context"] >= 262_144
    assert rungs["UD-Q3_K_XL"]["context"] is None
    reserve = 121.7 * 2**30 / 20
    assert 12 <= (rungs["UD-Q2_K_XL"]["left"] + reserve) / 2**30 <= 15
    # 273 GB/s over a tenth of the bytes, and 8 of 288 of the other nine tenths
    read = 108.72e9 * (0.1 + 0.9 * 8 / 288)
    assert rungs["UD-Q2_K_XL"]["speed"] == pytest.approx(273e9 / read, rel=0.02)
    assert "use UD-Q2_K_XL" in outcome.text
    assert "UD-IQ3_XXS" in outcome.result["why"]
    assert fake.sent < 20 * 2**20


def glm_recipe(folder: Path, quant: str, **serve: Any) -> Recipe:
    weights = {"model": {"hub": "o/m", "files": f"{quant}/*.gguf"}}
    command = "{{ server }} -m {{ weights.model.first }} --no-mmap"
    given = {"command": command, "context": 262_144, "kv_cache": "q8_0", **serve}
    return make_loaded(folder, weights=weights, serve=given).recipe


def sparse(folder: Path, quant: str) -> tuple[Lock, dict[str, tuple[str, ...]]]:
    """Files of the declared size of which only the heads take room, and a lock without hashes."""
    sizes, pins, paths = LISTED[quant], [], []
    for i, size in enumerate(sizes):
        path = folder / f"m-{i + 1:05d}-of-{len(sizes):05d}.gguf"
        path.write_bytes(split_head(i, len(sizes), int(size * 1e9)))
        os.truncate(path, int(size * 1e9))
        pins.append(FilePin(path=path.name, size=int(size * 1e9), sha256="0" * 64))
        paths.append(str(path))
    pin = WeightPin(origin="hub:o/m", revision=COMMIT, files=tuple(pins))
    lock = Lock(recipe="r", engine="llama.cpp", wants="w", weights={"model": pin})
    return lock, {"model": tuple(paths)}


def test_admit_refusal_names_the_best_quantisation_that_fits(
    hub: tuple[FakeHub, Context], tmp_path: Path
) -> None:
    fake, ctx = hub
    glm(fake)
    recipe = glm_recipe(tmp_path, "UD-IQ3_XXS")
    lock, files = sparse(tmp_path, "UD-IQ3_XXS")
    argv = ("llama-server", "--no-mmap", "-c", "262144", "-ctk", "q8_0", "-ctv", "q8_0", "--jinja",
            "--chat-template", "chatml")  # fmt: skip
    with pytest.raises(HostError) as caught:
        admit(ctx, recipe, lock, files, argv, machine=PROFILES["gb10"])
    assert caught.value.exit_code == 9
    assert "use UD-Q2_K_XL" in str(caught.value.hint)
    lock, files = sparse(tmp_path, "UD-Q2_K_XL")
    assert admit(ctx, recipe, lock, files, argv, machine=PROFILES["gb10"]).budget.fits


def test_admit_refuses_too_large_weights_before_fetching(
    hub: tuple[FakeHub, Context], tmp_path: Path
) -> None:
    fake, ctx = hub
    glm(fake)
    recipe = glm_recipe(tmp_path, "UD-Q3_K_XL")
    lock, _ = sparse(tmp_path, "UD-Q3_K_XL")
    argv = ("llama-server", "--no-mmap")
    with pytest.raises(HostError) as caught:
        refuse_by_size(ctx, recipe, lock, argv, PROFILES["gb10"])
    assert caught.value.id == "memory"
    assert "UD-Q2_K_XL" in str(caught.value.hint)
    away = replace(ctx, environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(HostError, match="does not fit") as alone:  # advice is not waited for
        refuse_by_size(away, recipe, lock, argv, PROFILES["gb10"])
    assert "UD-" not in str(alone.value.hint)
    lock, _ = sparse(tmp_path, "UD-Q2_K_XL")
    refuse_by_size(ctx, recipe, lock, argv, PROFILES["gb10"])


def test_fit_speculation_multiplies_speed(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    glm(fake)
    plain = fit.run(ctx, fit.Options(hub="o/m", host="gb10"))
    twice = fit.run(ctx, fit.Options(hub="o/m", host="gb10", speculation="2"))
    for one, other in zip(plain.result["rungs"], twice.result["rungs"], strict=True):
        assert other["speed"] == pytest.approx(2 * one["speed"])


def test_fit_unreadable_header_leaves_sizes(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    fake.put("m-Q4_K_M.gguf", b"Entry not found", 9_000_000_000)
    outcome = fit.run(ctx, fit.Options(hub="o/m", host="gb10"))
    (rung,) = outcome.result["rungs"]
    assert (rung["context"], rung["speed"]) == (None, None)
    assert any("HTTP error message" in note for note in outcome.result["notes"])


def test_fit_does_not_recommend_missing_splits(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    fake.put("m-Q4_K_M-00001-of-00002.gguf", split_head(0, 2, 10**9), 10**9)
    outcome = fit.run(ctx, fit.Options(hub="o/m", host="gb10"))
    assert outcome.result["recommended"] is None
    assert "missing" in outcome.result["rungs"][0]["note"]
    assert outcome.error
    assert "files are missing from the listing" in outcome.error.what


def test_fit_exit_code_says_whether_anything_fits(
    hub: tuple[FakeHub, Context],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake, ctx = hub
    glm(fake)
    monkeypatch.setenv("HF_ENDPOINT", ctx.environment["HF_ENDPOINT"])
    rows: list[tuple[dict[str, str], int, str]] = [
        ({"host": "gb10"}, 0, "passed"),
        ({"host": "unified:64GiB"}, 9, "failed"),
        ({"host": "cpu:8GiB"}, 9, "failed"),
        ({"host": "gb10", "context": "1048576"}, 0, "passed"),
        ({"host": "unified:100GiB", "context": "262144"}, 0, "passed"),
        ({"host": "unified:100GiB", "context": "1048576"}, 9, "failed"),
    ]
    found = []
    for options, _, _ in rows:
        code = main("fit", {"hub": "o/m", **options}, json=True)
        document = json.loads(capsys.readouterr().out)
        assert document["exit"] == code
        (verdict,) = (c["verdict"] for c in document["checks"] if c["id"] == "fit")
        found.append((options, code, verdict))
        assert len(document["result"]["rungs"]) == len(LISTED)  # shown in any case
        if code:
            assert document["error"]["id"] == "memory"
            assert "the smallest lacks" in document["error"]["what"]
            assert "lacks -" not in document["error"]["what"]
    assert found == rows


def test_fit_unknown_cache_is_unknown(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    fake.put("m-Q4_K_M.gguf", b"Entry not found", 9_000_000_000)
    outcome = fit.run(ctx, fit.Options(hub="o/m", host="gb10"))
    assert outcome.checks[0].verdict == "unknown"
    assert "is not known" in outcome.result["why"]
    assert outcome.error is None


def local(folder: Path, quant: str, size: float, *, name: str = "GLM-5.3-Flash") -> Path:
    path = folder / f"{name}-{quant}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(split_head(0, 1, int(size * 1e9)))
    os.truncate(path, int(size * 1e9))
    return path


@pytest.mark.parametrize("layout", ["one folder", "a folder each"])
def test_admit_refusal_names_files_beside_a_local_model(
    context: Context, tmp_path: Path, layout: str
) -> None:
    paths = {
        quant: local(tmp_path / (quant if layout == "a folder each" else "all"), quant, sum(sizes))
        for quant, sizes in LISTED.items()
    }
    folder = paths["UD-IQ3_XXS"].parent
    local(folder, "Q8_0", 110.0, name="Some-Other-Model")
    local(folder, "UD-Q2_K_L-00001-of-00002", 60)  # an unfinished download
    (folder / "GLM-5.3-Flash-UD-Q2_K_M.gguf").symlink_to("nowhere")
    (folder / "GLM-5.3-Flash-Q2_K_S.gguf").write_bytes(b"")
    own = paths["UD-IQ3_XXS"]
    command = "{{ server }} -m {{ weights.model.first }} --no-mmap"
    recipe = make_loaded(
        tmp_path, weights={"model": {"path": str(own)}},
        serve={"command": command, "context": 262_144, "kv_cache": "q8_0"},
    ).recipe  # fmt: skip
    pin = FilePin(path=own.name, size=own.stat().st_size, sha256="0" * 64)
    lock = Lock(recipe="r", engine="llama.cpp", wants="w",
                weights={"model": WeightPin(origin=str(own), files=(pin,))})  # fmt: skip
    argv = ("llama-server", "--no-mmap", "-c", "262144", "-ctk", "q8_0", "-ctv", "q8_0", "--jinja",
            "--chat-template", "chatml")  # fmt: skip
    gb10 = PROFILES["gb10"]
    for refuse in (
        lambda: admit(context, recipe, lock, {"model": (str(own),)}, argv, machine=gb10),
        lambda: refuse_by_size(context, recipe, lock, argv, gb10, files=(str(own),)),
    ):
        with pytest.raises(HostError, match="does not fit") as caught:
            refuse()
        assert "use UD-Q2_K_XL, the largest" in str(caught.value.hint)


def test_fit_lists_files_beside_a_local_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for quant, sizes in LISTED.items():
        local(tmp_path, quant, sum(sizes))
    local(tmp_path, "Q8_0", 1.0, name="Some-Other-Model")
    recipe = tmp_path / "local.yaml"
    text = RECIPE.format(commit="a" * 40).replace("m.gguf", "GLM-5.3-Flash-UD-IQ3_XXS.gguf")
    recipe.write_text(text)
    assert main("fit", {"recipe": str(recipe), "host": "gb10"}, json=True) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [rung["name"] for rung in result["rungs"]] == list(LISTED)
    assert result["recommended"] == "UD-Q2_K_XL"


def test_fit_safetensors_with_config(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    data = safetensors_bytes({"model.layers.0.w": ("BF16", [8], bytes(16))})
    fake.put("model.safetensors", data, len(data))
    config = {"architectures": ["X"], "num_hidden_layers": 1, "num_attention_heads": 2,
              "hidden_size": 8, "max_position_embeddings": 512}  # fmt: skip
    raw = json.dumps(config).encode()
    fake.put("config.json", raw, len(raw))
    outcome = fit.run(ctx, fit.Options(hub="o/m", host="gb10"))
    assert outcome.result["shape"]["architecture"] == "X"
    assert outcome.result["rungs"][0]["context"] == 512


def test_fit_repository_without_weights(hub: tuple[FakeHub, Context]) -> None:
    fake, ctx = hub
    with pytest.raises(NotFound):
        fit.run(ctx, fit.Options(hub="o/other", host="gb10"))
    fake.put("README.md", b"", 5)
    with pytest.raises(NotFound, match="has no GGUF"):
        fit.run(ctx, fit.Options(hub="o/m", host="gb10"))


def test_fit_refuses_invalid_flags(context: Context) -> None:
    for options in (
        fit.Options(),
        fit.Options(recipe="a", hub="o/m"),
        fit.Options(recipe="a", revision="x"),
        fit.Options(hub="o/m", context="many"),
        fit.Options(hub="o/m", context="-1"),
        fit.Options(hub="o/m", speculation="0.5"),
        fit.Options(hub="o/m", host="nowhere"),
        fit.Options(recipe="smollm2-cpu", kv_cache="q9_9"),
        fit.Options(recipe="smollm2-cpu", kv_cache="Q8_0"),
        fit.Options(hub="../../etc", host="gb10"),
    ):
        with pytest.raises(UsageError):
            fit.run(context, options)


def test_fit_hub_not_reachable(context: Context) -> None:
    ctx = replace(context, environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    ctx = replace(ctx, clock=ImpatientClock())
    with pytest.raises(HostError):
        fit.run(ctx, fit.Options(hub="o/m", host="gb10"))


RECIPE = """
schema: 1
name: local
engine: llama.cpp
source: {{git: https://example.org/x.git, commit: {commit}}}
weights: {{model: {{path: m.gguf}}}}
serve:
  context: 1024
  command: "{{{{ server }}}} -m {{{{ weights.model.first }}}} -c {{{{ serve.context }}}}"
"""


def test_fit_recipe_with_local_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = llama_metadata()
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, [("a", (64,), 0, bytes(256))]))
    recipe = tmp_path / "local.yaml"
    recipe.write_text(RECIPE.format(commit="a" * 40))
    code = main("fit", {"recipe": str(recipe), "host": "cpu:8GiB"}, json=True)
    document = json.loads(capsys.readouterr().out)
    assert code == 0, document
    result = document["result"]
    assert result["rungs"][0]["context"] == 2048
    assert result["shape"]["architecture"] == "llama"
    assert {check["verdict"] for check in document["checks"]} == {"passed"}
    items = {line["item"]: line["bytes"] for line in result["budget"]["lines"]}
    assert items["cache, full attention"] == 1024 * 2 * 2 * 32 * 2
