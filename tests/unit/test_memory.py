"""Memory budgets compared with published figures and the corpus of failures."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from bakehouse.checkpoints.checkpoint import Checkpoint, CheckpointFile, read_path
from bakehouse.checkpoints.gguf import Tensor
from bakehouse.checkpoints.model_shape import ModelShape, gguf_shape
from bakehouse.errors import UsageError
from bakehouse.host import Gpu, HostFacts, read_host
from bakehouse.memory.budget import Weight, make_budget
from bakehouse.memory.fit import largest_context, refusal, table
from bakehouse.memory.machines import PROFILES, Machine, named_machine, this_machine
from bakehouse.memory.requirements import GIB, Basis, Budget, Demand, Pool, cache_lines, demand_of
from bakehouse.recipe.models import Measured, Recipe
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata, write

GB10 = PROFILES["gb10"]
Q2_K_XL, IQ3_XXS = 108_720_071_427, 120_370_000_000


def glm_shape() -> ModelShape:
    """GLM-5.3-Flash as described: 45 layers, three linear to one sparse, one MTP layer.

    Its widths are not given; these are plausible ones.
    """
    heads = [1 if (i + 1) % 4 == 0 or i == 45 else 0 for i in range(46)]
    keys = {
        "block_count": 46, "nextn_predict_layers": 1, "embedding_length": 4096,
        "context_length": 1_048_576, "attention.head_count": 32, "attention.head_count_kv": heads,
        "attention.key_length": 512, "attention.value_length": 512,
        "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "attention.indexer.key_length": 128, "kda.head_dim": 128, "ssm.conv_kernel": 4,
        "expert_count": 288, "expert_used_count": 8, "expert_feed_forward_length": 1536,
    }  # fmt: skip
    metadata = {f"glm5-next.{k}": v for k, v in keys.items()}
    return gguf_shape({"general.architecture": "glm5-next", **metadata}, "glm.gguf")


def glm(size: int) -> Weight:
    tensors = (Tensor("blk.0.x", (1,), "Q2_K", 0, size),)
    return Weight.read(
        Checkpoint("gguf", (CheckpointFile("glm.gguf", size, tensors),), glm_shape())
    )


GLM = Demand("llama.cpp", context=262_144, keys="q8_0", values="q8_0", mmap=False, mtp=True)


def test_budget_glm_q2_fits_a_gb10() -> None:
    budget = make_budget(GB10, GLM, {"model": glm(Q2_K_XL)})
    assert budget.fits
    assert not budget.unknown
    assert 12 * GIB <= budget.purses[0].left <= 14 * GIB
    assert all(line.formula and line.source for line in budget.lines)


def test_budget_glm_iq3_does_not_fit_a_gb10() -> None:
    budget = make_budget(GB10, GLM, {"model": glm(IQ3_XXS)})
    assert not budget.fits
    assert [c.verdict for c in budget.checks()] == ["failed"]
    error = refusal(budget, context=None, quant="UD-Q2_K_XL")
    assert error.exit_code == 9
    assert "UD-Q2_K_XL" in str(error.hint)


def test_budget_cache_grows_with_context() -> None:
    million = Demand("llama.cpp", context=1_048_576, keys="q8_0", values="q8_0", mmap=False)
    small = make_budget(GB10, GLM, {"model": glm(Q2_K_XL)})
    large = make_budget(GB10, million, {"model": glm(Q2_K_XL)})
    row = (512 + 128) * 34 // 32  # q8_0: 34 bytes for 32 elements
    (latent,) = (x for x in large.lines if x.item.startswith("cache"))
    assert latent.bytes == 11 * row * 1_048_576
    assert large.purses[0].left < small.purses[0].left - 5 * GIB


def test_budget_uses_measured_figures() -> None:
    seen = Measured(what="left", size=13 * GIB, of=int(121.7 * GIB), source="seed: free -g")
    sizes = Weight(Q2_K_XL, 30_000_000_000)
    budget = make_budget(GB10, Demand("llama.cpp", context=262_144), {"model": sizes},
                         measured=[seen])  # fmt: skip
    assert budget.fits
    assert not budget.unknown
    assert 12 * GIB <= budget.purses[0].left <= 14 * GIB
    assert [x.basis for x in budget.lines if x.item.startswith("cache")] == [Basis.MEASURED]
    larger = Weight(IQ3_XXS, 30_000_000_000)
    assert not make_budget(GB10, Demand("llama.cpp"), {"model": larger}, measured=[seen]).fits


def muse(shards: list[int], available: float) -> Budget:
    """Muse Glimmer 30B under vLLM at 0.62 of 121.7 GiB, with its 5.1 GB drafter."""
    machine = Machine("spark", int(121.7 * GIB), int(available * GIB), unified=True,
                      gpus=(Gpu(name="GB10"),))  # fmt: skip
    weights = {
        "model": Weight(sum(shards), max(shards)),
        "drafter": Weight(5_100_000_000, 5_100_000_000),
    }
    demand = Demand("vllm", context=32_768, share=0.62)
    measured = [Measured(what="weights", size=int(60.7 * GIB), source="seed: vLLM's log"),
                Measured(what="cache", size=int(10.1 * GIB), source="seed")]  # fmt: skip
    return make_budget(machine, demand, weights, measured=measured)


CHECKPOINT = int(55.46 * GIB)
RESERVED = 0.62 * 121.7
AVAILABLE = RESERVED + 35.88
"""Before the engine took its share; 35.88 GiB is what vLLM then said was available."""


def test_budget_47_gb_shard_does_not_load_beside_the_share() -> None:
    two = muse([47_000_000_000, CHECKPOINT - 47_000_000_000], AVAILABLE)
    assert not two.fits
    purse = two.purses[0]
    assert purse.serving < purse.available - purse.reserve  # only loading fails
    assert purse.loading > purse.available
    error = refusal(two)
    assert "loading" in error.what
    assert "reshard" in str(error.hint)


def test_budget_sixteen_small_shards_load() -> None:
    sixteen = muse([3_980_000_000] * 14 + [CHECKPOINT - 14 * 3_980_000_000], AVAILABLE)
    assert sixteen.fits


def test_budget_vllm_share_and_cache() -> None:
    budget = muse([3_980_000_000] * 15, AVAILABLE)
    lines = {line.item: line.bytes / GIB for line in budget.lines}
    assert lines["weights, all"] == pytest.approx(60.7, abs=0.01)
    assert lines["cache, what the share leaves"] == pytest.approx(10.1, abs=0.1)
    share = sum(
        line.bytes for line in budget.lines
        if line.item.startswith(("weights", "cache", "activations"))
    )  # fmt: skip
    assert share / GIB == pytest.approx(76, abs=1)


def test_budget_d06_vllm_share_above_free_memory() -> None:
    machine = Machine("kit", int(121.69 * GIB), int(101.9 * GIB), unified=True,
                      gpus=(Gpu(name="GB10"),))  # fmt: skip
    weights = {"model": Weight(20 * GIB, 4 * GIB)}
    assert not make_budget(machine, Demand("vllm", share=0.87), weights).fits
    assert make_budget(machine, Demand("vllm", share=0.70), weights).fits


def test_budget_d10_mmap_doubles_on_unified_memory() -> None:
    machine = named_machine("unified:121GiB")
    weights = {"model": Weight(70 * GIB, 70 * GIB)}
    mapped = make_budget(machine, Demand("llama.cpp", context=4096), weights)
    assert not mapped.fits
    assert "without mmap" in str(refusal(mapped, mapped=True).hint)
    assert make_budget(machine, Demand("llama.cpp", context=4096, mmap=False), weights).fits
    cpu = named_machine("cpu:121GiB")
    assert make_budget(cpu, Demand("llama.cpp", context=4096), weights).fits


def facts(total: float, available: float) -> HostFacts:
    memory = {"memory_total": int(total * GIB), "memory_available": int(available * GIB)}
    return HostFacts(
        arch="aarch64", system="Linux", cpus=20, cpu_model="x", cpu_flags="", **memory
    )  # fmt: skip


def test_machine_d01_no_gpu_figures_mean_unified_memory() -> None:
    machine = this_machine(facts(121.7, 110), (Gpu(name="NVIDIA GB10"),))
    assert machine.unified
    assert machine.pool is Pool.SYSTEM
    assert machine.available == 110 * GIB
    assert machine.bandwidth == 273e9


def test_machine_d02_ignores_figures_of_a_gb10() -> None:
    machine = this_machine(
        facts(121.7, 110), (Gpu(name="NVIDIA GB10", memory_total=10 * GIB, memory_free=9 * GIB),)
    )
    assert machine.unified


def test_machine_d03_page_cache_is_available(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", b"MemTotal: 125829120 kB\nMemFree: 7759462 kB\n"
          b"MemAvailable: 118000000 kB\nCached: 110000000 kB\n")  # fmt: skip
    write(tmp_path / "cpuinfo", b"")
    machine = this_machine(read_host(tmp_path), (Gpu(name="NVIDIA GB10"),))
    assert machine.available == 118000000 * 1024
    budget = make_budget(machine, GLM, {"model": glm(80 * GIB)})
    assert budget.fits
    (cached,) = (line for line in budget.lines if line.item == "page cache that can be reclaimed")
    assert cached.bytes == (118000000 - 7759462) * 1024
    assert "drop_caches" in cached.formula
    assert "page cache that can be reclaimed" in table(budget)
    plain = this_machine(read_host(tmp_path))
    assert "drop_caches" not in "".join(line.formula for line in plain.lines())
    assert not any("page cache that" in line.item for line in PROFILES["gb10"].lines())


def test_budget_discrete_gpu_is_another_pool() -> None:
    machine = named_machine("rtx4090")
    weights = {"model": Weight(20 * GIB, 20 * GIB)}
    budget = make_budget(machine, Demand("llama.cpp", context=2048), weights)
    assert {purse.pool for purse in budget.purses} == {Pool.GPU, Pool.SYSTEM}
    assert not make_budget(machine, Demand("llama.cpp"), {"model": Weight(24 * GIB, GIB)}).fits
    half = Demand("llama.cpp", context=2048, gpu_layers=32)
    assert make_budget(machine, half, {"model": Weight(40 * GIB, GIB)}).fits


def test_weight_counts_offloaded_layers_by_tensor(tmp_path: Path) -> None:
    tensors = [f32("token_embd.weight", 100), f32("output.weight", 50),
               f32("output_norm.weight", 1), f32("blk.0.w", 10), f32("blk.1.w", 20)]  # fmt: skip
    path = write(tmp_path / "m.gguf", gguf_bytes(llama_metadata(), tensors))
    weight = Weight.read(read_path(path))
    assert [weight.offloaded(n) // 4 for n in (0, 1, 2, 3, None, 99)] == [0, 51, 71, 81, 81, 81]
    assert weight.kept(None) == 400


def test_budget_notes_types_that_the_cpu_repacks(tmp_path: Path) -> None:
    tensors = (Tensor("a", (32,), "Q4_0", 0, 1000), Tensor("b", (1,), "F32", 0, 24))
    file = CheckpointFile("m.gguf", 1024, tensors)
    weights = {"model": Weight.read(Checkpoint("gguf", (file,), glm_shape()))}
    demand = Demand("llama.cpp", context=512)
    on_cpu = make_budget(named_machine("cpu:8GiB"), demand, weights)
    (line,) = (x for x in on_cpu.lines if x.item == "weights")
    assert line.bytes == 1024  # once: what is repacked need not stay mapped
    assert "1.0 KiB of it in types that the CPU may repack" in line.formula
    on_gpu = make_budget(GB10, demand, weights)
    assert not any("repack" in x.formula for x in on_gpu.lines)


def test_budget_unread_header_is_unknown() -> None:
    budget = make_budget(GB10, Demand("llama.cpp", mmap=False), {"model": Weight(GIB, GIB)})
    assert budget.unknown
    assert [c.verdict for c in budget.checks()] == ["unknown"]


def test_budget_unknown_cache_type_is_unknown(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", gguf_bytes(llama_metadata(), [f32("a", 1)]))
    demand = Demand("llama.cpp", keys="q9_9", values="q9_9")
    assert make_budget(GB10, demand, {"model": Weight.read(read_path(path))}).unknown


def test_largest_context_is_the_last_that_fits() -> None:
    def at(context: int) -> Budget:
        demand = Demand("llama.cpp", context=context, mmap=False)
        return make_budget(named_machine("unified:110GiB"), demand, {"model": glm(95 * GIB)})

    best = largest_context(at, 1_048_576)
    assert best
    assert at(best).fits
    assert not at(best + 256).fits
    assert largest_context(at, 4096) == 4096


def test_largest_context_of_a_too_large_model() -> None:
    def at(context: int) -> Budget:
        return make_budget(GB10, Demand("llama.cpp", context=context), {"model": glm(200 * GIB)})

    assert largest_context(at, 4096) is None


def test_machine_refuses_unknown_names() -> None:
    for name in ("gb11", "gpu:", "cpu:many", "unified:12 parsecs", ""):
        with pytest.raises(UsageError, match="--machine"):
            named_machine(name)


def recipe(command: str, **serve: object) -> Recipe:
    return Recipe.model_validate(
        {
            "schema": 1, "name": "r", "engine": "llama.cpp",
            "source": {"git": "https://x/y", "commit": "0" * 40},
            "weights": {"model": {"path": "m.gguf"}},
            "serve": {"command": command, **serve},
        }
    )  # fmt: skip


def test_the_command_says_what_is_asked_for() -> None:
    seed = (
        "llama-server -m m.gguf -ngl 99 -c 262144 -ctk q8_0 -ctv q4_0 -fa on --jinja "
        "--spec-type draft-mtp --parallel 2 --load-mode none -ub 2048 --swa-full -nkvo"
    )
    assert demand_of(recipe("x"), seed.split()) == Demand(
        "llama.cpp", context=262_144, sequences=2, keys="q8_0", values="q4_0", batch=2048,
        mmap=False, gpu_layers=99, cache_on_gpu=False, full_window=True, mtp=True,
    )  # fmt: skip


def test_without_a_rendered_command_the_fields_speak() -> None:
    made = recipe("{{ server }} -c {{ serve.context }} --no-mmap", context=4096, slots=3,
                  kv_cache="q8_0", gpu_layers=7, speculation="draft-mtp")  # fmt: skip
    assert demand_of(made) == Demand("llama.cpp", context=4096, sequences=3, keys="q8_0",
                                     values="q8_0", mmap=False, gpu_layers=7, mtp=True)  # fmt: skip


def test_vllm_flags() -> None:
    made = Recipe.model_validate(
        {
            "schema": 1, "name": "r", "engine": "vllm", "image": {"ref": {"x86_64": "a/b:1"}},
            "weights": {"model": {"path": "m"}}, "serve": {"command": "vllm serve"},
        }
    )  # fmt: skip
    argv = "vllm serve /model --max-model-len 32k --gpu-memory-utilization=0.62 --max-num-seqs 256"
    demand = demand_of(made, argv.split())
    assert (demand.context, demand.share, demand.sequences) == (32_000, 0.62, 256)
    assert demand_of(made).share == 0.92


@pytest.mark.engine
@pytest.mark.parametrize(
    ("flags", "demand"),
    [
        (["-c", "8192", "-np", "1"], Demand("llama.cpp", context=8192)),
        (["-c", "2048", "-np", "4"], Demand("llama.cpp", context=2048, sequences=4)),
        (["-c", "1000", "-np", "3"], Demand("llama.cpp", context=1000, sequences=3)),
        (
            ["-c", "4096", "-np", "2", "-kvu", "-ctk", "q8_0", "-ctv", "q4_0", "-fa", "on"],
            Demand("llama.cpp", context=4096, sequences=2, unified_cache=True, keys="q8_0",
                   values="q4_0"),
        ),
    ],
)  # fmt: skip
def test_budget_matches_the_real_server(
    llama_server: Path, smollm2: Path, tmp_path: Path, flags: list[str], demand: Demand
) -> None:
    log = tmp_path / "log"
    argv = [str(llama_server), "-m", str(smollm2), "--port", "0", "--no-warmup", "-v", *flags]
    with log.open("wb") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 60
            wanted = rb"llama_kv_cache: size = +([\d.]+) MiB"
            while time.monotonic() < deadline and server.poll() is None:
                last = log.read_bytes().rpartition(b"CPU_Mapped model")[2]
                if re.search(rb"CPU compute buffer size = +[\d.]+ MiB", last):
                    break
                time.sleep(0.1)
        finally:
            server.kill()
            server.wait()
    text = log.read_bytes()
    shape = read_path(smollm2).shape
    lines = cache_lines(shape, demand, demand.context or 0, Pool.SYSTEM)
    assert lines
    real = float(re.findall(wanted, text)[-1])
    assert sum(line.bytes for line in lines) / 2**20 == pytest.approx(real, abs=0.01)
    buffers = float(re.findall(rb"CPU compute buffer size = +([\d.]+) MiB", text)[-1])
    budget = make_budget(named_machine("cpu:8GiB"), demand,
                         {"model": Weight.read(read_path(smollm2))})  # fmt: skip
    (computed,) = (x.bytes / 2**20 for x in budget.lines if x.item == "compute buffers")
    assert buffers <= computed <= 2 * buffers


def test_budget_table_shows_every_line() -> None:
    budget = make_budget(GB10, GLM, {"model": glm(Q2_K_XL)})
    text = table(budget)
    assert all(line.item in text for line in budget.lines)
    assert "fits" in text
