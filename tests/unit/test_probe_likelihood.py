"""Likelihood and reference: held against golden values, two-sided, or only provisional."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.errors import HostError, LockError, NotHealthy
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.models import Verdict
from bakehouse.probe.golden import (
    backend_of,
    golden_path,
    known_of,
    read_golden,
    weights16,
    write_golden,
)
from bakehouse.probe.logprobs import Scored
from bakehouse.probe.models import (
    Golden,
    GoldenPlace,
    GoldenText,
    ServedModel,
    SuiteInput,
    SuiteProof,
)
from bakehouse.probe.runner import change, run_probe, take_golden
from bakehouse.probe.suites import likelihood, reference
from bakehouse.recipe.models import Likelihood, Probe
from tests.support.scripted import Llama, Scripted, endpoint
from tests.support.serving import recipe

ROOT = Path(__file__).parents[2]
KNOWN = ServedModel("a" * 16, "f16", "cpu", "same", Path("/golden"))
OTHER_BUILD = replace(KNOWN, identity="other")
OTHER_BACKEND = replace(KNOWN, backend="cuda", identity="other")
TOKENS = tuple(range(60))


def scores(shift: float = 0.0, spread: float = 0.0, seed: int = 1) -> dict[str, Scored]:
    """Scores of all texts, moved by a shift, and each by up to twice the spread either way."""
    noise = random.Random(seed)
    return {
        name: Scored(
            TOKENS,
            tuple(
                -2.5 + (n % 7) / 10 - shift + noise.choice([-spread, spread])
                for n in range(len(TOKENS) - 1)
            ),
            how="grammar",
        )
        for name in likelihood.texts()
    }


def golden(of: Mapping[str, Scored] | None = None) -> Golden:
    return Golden(
        weights16=KNOWN.weights16, kv_cache="f16", backend="cpu", identity="same",
        data=likelihood.data_digest(),
        texts={n: GoldenText(tokens=s.tokens, logprobs=s.logprobs)
               for n, s in (of or scores()).items()},
    )  # fmt: skip


def judged(
    scored: Mapping[str, Scored],
    known: ServedModel = KNOWN,
    told: Golden | None = None,
    **wanted: float,
) -> SuiteProof:
    probe = Probe(likelihood=Likelihood.model_validate(wanted))
    return likelihood.judge(scored, SuiteInput(endpoint(), probe, known, told or golden()))


def failed(proof: SuiteProof) -> set[str]:
    return {c.id.removeprefix("probe.likelihood") for c in proof.checks if not c.passed}


class TestLikelihood:
    def test_without_a_golden_value_only_the_ceiling_is_asked(self) -> None:
        proof = likelihood.judge(scores(), SuiteInput(endpoint(), Probe(), KNOWN, None))
        assert (proof.verdict, proof.good) == ("true (provisional)", True)
        wrong = likelihood.judge(scores(3.0), SuiteInput(endpoint(), Probe(), KNOWN, None))
        assert (wrong.verdict, failed(wrong)) == ("wrong", {""})

    def test_golden_values_of_other_texts_say_nothing(self) -> None:
        old = golden().model_copy(update={"data": "0" * 16})
        assert judged(scores(0.5), told=old).verdict == "true (provisional)"

    def test_likelihood_of_the_same_server_is_true(self) -> None:
        for shift in (0.0, 0.003, -0.003):
            proof = judged(scores(shift))
            assert (proof.verdict, failed(proof)) == ("true", set())
            assert proof.figures["golden"]["difference"] == pytest.approx(shift, abs=1e-9)

    @pytest.mark.parametrize(
        ("known", "bound"),
        [
            (KNOWN, likelihood.SAME_SERVER),
            (OTHER_BUILD, likelihood.SAME_BACKEND),
            (OTHER_BACKEND, likelihood.OTHER_BACKEND),
        ],
    )
    def test_likelihood_bound_is_two_sided_and_depends_on_the_cause_of_noise(
        self, known: ServedModel, bound: likelihood.Bound
    ) -> None:
        for sign in (1, -1):
            assert judged(scores(sign * 0.9 * bound.mean), known).good
            beyond = judged(scores(sign * 1.1 * bound.mean), known)
            assert beyond.verdict == "wrong"
            assert failed(beyond) == {".golden"}

    def test_likelihood_bound_is_wider_for_a_coarse_cache(self) -> None:
        rows = [
            ("q5_1", "other", likelihood.FIVE_BIT),
            ("q4_0", "other", likelihood.FOUR_BIT),
            ("iq4_nl", "other", likelihood.FOUR_BIT),
            ("q4_0", "same", likelihood.SAME_SERVER),
            ("q8_0", "other", likelihood.SAME_BACKEND),
        ]
        got = []
        for kind, identity, bound in rows:
            known = replace(KNOWN, kv_cache=kind, identity=identity)
            told = golden().model_copy(update={"kv_cache": kind})
            within = judged(scores(0.9 * bound.mean), known, told)
            beyond = judged(scores(1.1 * bound.mean), known, told)
            got.append((kind, identity, within.good, beyond.verdict))
        assert got == [(kind, identity, True, "wrong") for kind, identity, _ in rows]

    def test_a_coarse_cache_never_makes_a_bound_tighter(self) -> None:
        known = replace(OTHER_BACKEND, kv_cache="q5_1")
        told = golden().model_copy(update={"kv_cache": "q5_1"})
        bound = likelihood.bound_for(told, SuiteInput(endpoint(), Probe(), known, told))
        assert bound.spread == likelihood.OTHER_BACKEND.spread > likelihood.FIVE_BIT.spread

    def test_single_tokens_tell_what_the_mean_hides(self) -> None:
        proof = judged(scores(spread=0.1), tolerance=10)
        assert failed(proof) == {".spread"}

    def test_a_recipe_may_say_otherwise(self) -> None:
        assert judged(scores(0.05), tolerance=0.06, spread=0.06).good
        assert not judged(scores(0.001), tolerance=0.0005).good
        assert not judged(scores(), ceiling=1.0).good

    @pytest.mark.parametrize(
        ("number", "verdict", "named"),
        [
            (0.0, "unable", "behind the sampler"),
            (-1e-6, "unable", "behind the sampler"),
            (-2.0, "wrong", "equally likely"),
            (-10.8, "wrong", "equally likely"),
        ],
    )
    def test_numbers_that_no_model_gives(self, number: float, verdict: str, named: str) -> None:
        made_up = {n: replace(s, logprobs=(number,) * len(s.logprobs)) for n, s in scores().items()}
        proof = likelihood.judge(made_up, SuiteInput(endpoint(), Probe(), KNOWN, None))
        assert (proof.verdict, proof.good) == (verdict, False)
        assert named in proof.summary

    def test_texts_that_nobody_knows_are_not_known_by_heart(self) -> None:
        proof = likelihood.judge(scores(-1.95), SuiteInput(endpoint(), Probe(), KNOWN, None))
        assert (proof.verdict, failed(proof)) == ("wrong", {""})

    def test_other_tokens_are_another_tokenizer(self) -> None:
        other = {n: replace(s, tokens=(*TOKENS[:-1], 999)) for n, s in scores().items()}
        proof = judged(other)
        assert failed(proof) == {".tokens"}
        assert proof.verdict == "wrong"

    @pytest.mark.parametrize(
        ("trouble", "verdict", "seen"),
        [
            ("numbers", "wrong", Verdict.FAILED),
            ("unable", "unable", Verdict.UNKNOWN),
            ("lost", "unstable", Verdict.UNKNOWN),
            ("reply", "unstable", Verdict.UNKNOWN),
        ],
    )
    def test_no_numbers(self, trouble: str, verdict: str, seen: Verdict) -> None:
        bad = {**scores(), "code": Scored(problem="why", trouble=trouble)}  # type: ignore[arg-type]
        proof = judged(bad)
        assert (proof.verdict, proof.checks[0].verdict) == (verdict, seen)
        assert "why" in proof.summary
        assert proof.lost == (trouble == "lost")


class TestReference:
    GOLDEN = golden().model_copy(
        update={
            "prompt": (1, 2),
            "places": tuple(
                GoldenPlace(tokens=(n, n + 100), logprobs=(-0.2, -1.8)) for n in range(10)
            ),
        }
    )

    def compare(self, tops: Sequence[tuple[tuple[int, float], ...]]) -> SuiteProof:
        run = Scored((1, 2, *range(10)), (-0.2,) * 11, (((5, -1.0),), *tops), "grammar")
        return reference.judge(run, SuiteInput(endpoint(), Probe(), KNOWN, self.GOLDEN))

    def test_the_same_run_is_true(self) -> None:
        proof = self.compare([((n, -0.2), (n + 100, -1.8)) for n in range(10)])
        assert (proof.verdict, proof.figures["agreement"]) == ("true", 1)
        assert proof.figures["divergence_nats"] == pytest.approx(0, abs=1e-6)

    def test_one_near_tie_may_fall_the_other_way(self) -> None:
        tops = [((n, -0.2), (n + 100, -1.8)) for n in range(10)]
        tops[4] = ((104, -0.69), (4, -0.7))
        proof = self.compare(tops)
        assert proof.figures["agreement"] == pytest.approx(0.9)
        assert "place 4" in proof.checks[0].observed

    def test_other_tokens_or_other_probabilities_are_wrong(self) -> None:
        other = self.compare([((n + 100, -0.2), (n, -1.8)) for n in range(10)])
        assert (other.verdict, other.checks[0].passed) == ("wrong", False)
        flat = self.compare([((n, -1.0), (n + 100, -1.5)) for n in range(10)])
        assert [c.passed for c in flat.checks] == [True, False]

    @pytest.mark.parametrize(
        ("kind", "identity", "good"),
        [("q5_1", "other", True), ("q5_1", "same", False), ("f16", "other", False)],
    )
    def test_a_coarse_cache_makes_more_of_another_rounding(
        self, kind: str, identity: str, good: bool
    ) -> None:
        told = self.GOLDEN.model_copy(update={"kv_cache": kind})
        known = replace(KNOWN, kv_cache=kind, identity=identity)
        tops = tuple(((n, -0.26), (n + 100, -1.55)) for n in range(10))
        scored = Scored((1, 2, *range(10)), (-0.3,) * 11, (tops[0], *tops), "grammar")
        proof = reference.judge(scored, SuiteInput(endpoint(), Probe(), known, told))
        assert 0.006 < proof.figures["divergence_nats"] < 0.012
        assert proof.good is good

    def test_a_token_that_is_not_named_is_as_likely_as_the_last_one_that_is(self) -> None:
        was = GoldenPlace(tokens=(1, 2), logprobs=(-0.1, -3.0))
        assert reference.divergence(was, {1: -0.1, 3: -3.0}) == pytest.approx(0, abs=1e-9)
        assert reference.divergence(was, {}) > 10

    def test_no_reference_no_proof(self) -> None:
        proof = reference.judge(None, SuiteInput(endpoint(), Probe()))
        assert (proof.verdict, proof.good) == ("unable", False)
        assert "--accept-golden" in (proof.hint or "")


def lock(*files: FilePin) -> Lock:
    pin = WeightPin(origin="path", files=files)
    return Lock(recipe="x", engine="llama.cpp", wants="", weights={"model": pin, "drafter": pin})


class TestGolden:
    FILE = FilePin(path="a/model.gguf", size=5, sha256="1" * 64)

    def test_taken_from_one_server_and_found_again_by_the_next(self, tmp_path: Path) -> None:
        known = replace(KNOWN, goldens=tmp_path / "golden")
        server = Scripted(Llama(lambda place: -1.5 - (place % 7) / 10))
        path = write_golden(known, take_golden(server, endpoint(), known, version="b1"))
        assert path == tmp_path / "golden" / f"{'a' * 16}-f16.json"
        assert len(path.read_text().splitlines()) < 600
        probe = Probe(suites=("likelihood", "reference"))
        proof = run_probe(server, endpoint(), probe, known=known)
        assert (proof.word, proof.verdict) == ("true", Verdict.PASSED)
        moved = Scripted(Llama(lambda place: -1.6 - (place % 3) / 10))
        assert run_probe(moved, endpoint(), probe, known=known).word == "wrong"

    def test_a_server_that_cannot_gives_none(self) -> None:
        server = Scripted(lambda *_: (404, {"error": "no"}))
        with pytest.raises(NotHealthy, match="golden values cannot be taken"):
            take_golden(server, endpoint(), KNOWN)

    def test_golden_refuses_a_damaged_file(self, tmp_path: Path) -> None:
        known = replace(KNOWN, goldens=tmp_path)
        for text in ("", "{}", "[]", "{", '{"schema": 0}', "\x00"):
            golden_path(known).write_text(text)
            with pytest.raises(LockError, match="no golden values"):
                read_golden(known)

    def test_golden_refuses_an_edited_file(self, tmp_path: Path) -> None:
        edits: list[Callable[[dict[str, Any]], Any]] = [
            lambda t: t["texts"]["prose"]["logprobs"].pop(),
            lambda t: t["texts"]["prose"]["logprobs"].append(-1.0),
            lambda t: t["texts"]["prose"]["tokens"].append(7),
            lambda t: t["texts"]["prose"]["logprobs"].__setitem__(0, float("nan")),
            lambda t: t["texts"]["prose"]["logprobs"].__setitem__(0, float("-inf")),
            lambda t: t["texts"]["prose"]["logprobs"].__setitem__(0, 0.5),
            lambda t: t["texts"]["prose"]["tokens"].__setitem__(0, -3),
            lambda t: t["texts"].clear(),
            lambda t: t["places"][0]["tokens"].clear(),
            lambda t: t["places"][0]["logprobs"].pop(),
            lambda t: t.update(mean=2.5),
        ]
        known = replace(KNOWN, goldens=tmp_path)
        write_golden(known, TestReference.GOLDEN)
        whole = golden_path(known).read_text()
        for edit in edits:
            told = json.loads(whole)
            edit(told)
            golden_path(known).write_text(json.dumps(told))
            with pytest.raises(LockError, match="no golden values"):
                read_golden(known)

    def test_a_newer_schema_says_so(self, tmp_path: Path) -> None:
        known = replace(KNOWN, goldens=tmp_path)
        golden_path(known).write_text('{"schema": 2}')
        with pytest.raises(LockError, match="schema 2; this one reads 1") as caught:
            read_golden(known)
        assert "newer Bakehouse" in str(caught.value.hint)

    def test_a_write_that_fails_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = replace(KNOWN, goldens=tmp_path)
        write_golden(known, golden())

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(HostError, match="No space"):
            write_golden(known, golden(scores(0.5)))
        assert read_golden(known) == golden()
        assert len(list(tmp_path.iterdir())) == 1

    def test_what_replaces_other_values_says_so(self) -> None:
        assert change(golden(), golden(scores(0.01))) is None
        assert "+0.5000 nats" in str(change(golden(), golden(scores(0.5))))
        other = {n: replace(s, tokens=(*TOKENS[:-1], 999)) for n, s in scores().items()}
        assert "other texts or tokens" in str(change(golden(), golden(other)))

    def test_a_file_of_other_weights_is_refused(self, tmp_path: Path) -> None:
        known = replace(KNOWN, goldens=tmp_path)
        write_golden(known, golden())
        with pytest.raises(LockError, match="belong to"):
            golden_path(known).rename(golden_path(replace(known, kv_cache="q8_0")))
            read_golden(replace(known, kv_cache="q8_0"))

    def test_none_is_none(self, tmp_path: Path) -> None:
        assert read_golden(None) is None
        assert read_golden(replace(KNOWN, goldens=tmp_path)) is None

    def test_a_folder_in_its_place_is_no_traceback(self, tmp_path: Path) -> None:
        known = replace(KNOWN, goldens=tmp_path)
        golden_path(known).mkdir()
        with pytest.raises(HostError):
            read_golden(known)
        with pytest.raises(HostError):
            write_golden(known, golden())

    def test_weights_are_known_by_their_content(self) -> None:
        one = weights16(lock(self.FILE))
        assert len(one) == 16
        assert weights16(lock(self.FILE.model_copy(update={"path": "b.gguf"}))) == one
        assert weights16(lock(self.FILE.model_copy(update={"sha256": "2" * 64}))) != one

    def test_known_of_a_recipe(self, tmp_path: Path) -> None:
        wanted = recipe(serve={"kv_cache": "q8_0"})
        known = known_of(wanted, lock(self.FILE), tmp_path, "id")
        assert (known.kv_cache, known.backend, known.identity) == ("q8_0", "cpu", "id")
        assert known.goldens == tmp_path / "golden"
        hip = recipe(build={"cmake": {"GGML_HIP": True}})
        assert backend_of(hip) == "hip"
        assert known_of(recipe(), lock(self.FILE), tmp_path).kv_cache == "f16"

    def test_the_golden_values_that_come_along_are_of_the_texts_that_come_along(self) -> None:
        files = list((ROOT / "recipes" / "golden").glob("*.json"))
        assert files
        for file in files:
            one = Golden.model_validate(json.loads(file.read_text()))
            assert one.data == likelihood.data_digest()
            assert file.name == f"{one.weights16}-{one.kv_cache}.json"
            assert one.texts.keys() == likelihood.texts().keys()
            assert len(one.places) == reference.PLACES
