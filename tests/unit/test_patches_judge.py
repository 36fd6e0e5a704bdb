"""The verdict on a patch for each kind of evidence; missing evidence is never clean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.lock import ArchivePin, FilePin, Lock, PatchPin
from bakehouse.models import Verdict, not_passed
from bakehouse.patch_review.log_diff import kinds_of
from bakehouse.patch_review.verdict import (
    Conclusion,
    GeneratedAnswer,
    SevereFinding,
    Side,
    conclude_verdict,
    evidence_of,
    parting,
    report_lines,
    speed_of,
)
from bakehouse.patches.manifest import Expect
from bakehouse.runs.store import SuiteRecord

QUIET = ["0.00.000.001 I srv  start", *["0.00.000.002 I slot 1 | done"] * 12]
PLAIN = Expect()
IMAGE_FAILS = GeneratedAnswer(item="image", problem="HTTP 500")


def suites(**verdicts: str) -> tuple[SuiteRecord, ...]:
    return tuple(
        SuiteRecord.model_validate({"suite": name, "verdict": verdict, "summary": "as told"})
        for name, verdict in verdicts.items()
    )


def rounds(
    rate: float = 20.0, spread: float = 0.5, text: str = "a harbour", **more: Any
) -> tuple[tuple[GeneratedAnswer, ...], ...]:
    """Three rounds of two items, `rate` tokens a second give or take `spread`."""
    speeds = (rate - spread, rate, rate + spread)
    return tuple(
        tuple(
            GeneratedAnswer(item=name, text=f"{text} {name}", tokens=60, seconds=60 / speed,
                   drafted=0, accepted=0).model_copy(update=more)
            for name in ("prose", "code")
        )
        for speed in speeds
    )  # fmt: skip


def side(name: str = "with", log: list[str] | None = None, **over: Any) -> Side:
    written = QUIET if log is None else log
    fields: dict[str, Any] = {
        "name": name, "build": "b" * 64, "asked": True, "requests": 30,
        "suites": suites(facts="true", fluency="true"), "rounds": rounds(),
        "kinds": kinds_of(written), "lines": len(written), "log": f"{name}/server.log", **over,
    }  # fmt: skip
    return Side(**fields)


BASE = side("without")


def verdict(patched: Side, without: Side = BASE, expect: Expect = PLAIN, **more: Any) -> Conclusion:
    found = conclude_verdict(without, patched, expect, **more)
    assert found.reasons
    if found.word in ("clean", "no effect"):
        assert not [c for c in not_passed(found.checks) if c.verdict is Verdict.UNKNOWN]
    return found


def errors(count: int, text: str = "llama_decode[1] returned -1") -> list[str]:
    return [f"0.07.{n % 1000:03d}.118 E {text}" for n in range(count)]


def test_verdict_no_effect_if_nothing_differs() -> None:
    found = verdict(side())
    assert found.word == "no effect"
    assert all(c.passed for c in found.checks)
    assert found.speed
    assert found.speed.ratio == 1.0


def test_verdict_clean_if_a_difference_is_no_worse() -> None:
    found = verdict(side(log=[*QUIET, "0.00.000.003 I srv  the patch is in"]))
    assert found.word == "clean"
    assert "the patch is in" in found.reasons[0]


def test_verdict_experimental_by_a_new_kind_of_error() -> None:
    found = verdict(side(log=[*QUIET, *errors(2661)]))
    assert found.word == "experimental"
    assert "2,661 times, never without: llama_decode[1] returned <n>" in found.reasons[0]
    (bad,) = not_passed(found.checks)
    assert bad.id == "patch.log.new"
    assert bad.where.startswith("with/server.log:14: llama_decode[1]")


def test_verdict_ignores_errors_of_the_unpatched_log() -> None:
    before = side("without", log=[*QUIET, *errors(100)])
    assert verdict(side(log=[*QUIET, *errors(103)]), before).word == "no effect"
    found = verdict(side(log=[*QUIET, *errors(400)]), before)
    assert found.word == "experimental"
    assert "more often" in found.reasons[0]


def test_verdict_tells_failing_parts_apart() -> None:
    before = side("without", log=[*QUIET, *errors(50, "llama_decode[0] returned -1")])
    found = verdict(side(log=[*QUIET, *errors(50, "llama_decode[1] returned -1")]), before)
    assert found.word == "experimental"


EVIDENCE: list[tuple[Mapping[str, Any], str, str]] = [
    ({"suites": suites(facts="wrong", fluency="true")}, "harmful", "suite facts passes"),
    ({"suites": suites(facts="true", fluency="unstable")}, "harmful", "suite fluency"),
    ({"suites": suites(facts="true")}, "experimental", "fluency"),
    ({"suites": suites(facts="true (provisional)", fluency="true")}, "no effect", "nothing"),
    ({"problem": "it died: SIGSEGV"}, "harmful", "it died: SIGSEGV"),
    ({"problem": "it does not build: x.cpp:1", "asked": False}, "harmful", "does not build"),
    ({"rounds": rounds(rate=15.0)}, "harmful", "slower: x0.75"),
    ({"rounds": rounds(rate=19.0)}, "no effect", "nothing"),
    ({"rounds": rounds(rate=25.0)}, "clean", "faster: x1.25"),
    ({"rounds": rounds(text="another harbour")}, "experimental", "prose: differs after"),
    ({"rounds": rounds(problem="HTTP 500: it broke")}, "harmful", "HTTP 500: it broke"),
    ({"rounds": ()}, "experimental", "there are no answers"),
    ({"rounds": rounds(seconds=None)}, "experimental", "decode speed is unknown"),
    ({"beyond": 1}, "experimental", "too many kinds"),
    ({"kinds": (), "lines": 0}, "experimental", "too many kinds"),
    ({"graves": (SevereFinding(id="x", severity="silent", count=2, line_number=3, line="l"),)},
     "harmful", "silent: x, 2 times"),
    ({"graves": (SevereFinding(id="x", severity="lost", count=2, line_number=3, line="l"),)},
     "experimental", "lost: x, 2 times"),
]  # fmt: skip


def test_verdict_by_evidence() -> None:
    found = [verdict(side(**over)) for over, _, _ in EVIDENCE]
    assert [one.word for one in found] == [word for _, word, _ in EVIDENCE]
    reasons = [" | ".join(one.reasons) for one in found]
    rows = zip(EVIDENCE, reasons, strict=True)
    assert not [(says, given) for (_, _, says), given in rows if says not in given]


def test_verdict_ignores_noise_in_speed() -> None:
    found = verdict(
        side(rounds=rounds(rate=15.0, spread=4.0)), side("without", rounds=rounds(20.0, 2.0))
    )
    assert found.word == "no effect"
    assert found.speed
    assert "within noise" in str(found.speed)


def test_verdict_clean_if_answers_may_differ() -> None:
    expect = Expect.model_validate({"answers_may_differ": True})
    found = verdict(side(rounds=rounds(text="another")), expect=expect)
    assert found.word == "clean"
    assert found.reasons == ("prose has another answer", "code has another answer")


def test_verdict_experimental_if_answers_vary_between_rounds() -> None:
    mixed = (*rounds(text="one")[:1], *rounds(text="two")[:1], *rounds(text="three")[:1])
    found = verdict(side(rounds=mixed))
    assert found.word == "experimental"
    assert "cannot be compared" in found.reasons[0]


def test_verdict_on_a_fix_by_the_suites_that_only_it_passes() -> None:
    """Image requests fail without the patch: the suite judges the answers with it."""
    before = side(
        "without", log=[*QUIET, *errors(6, "decode: failed to initialize batch")],
        suites=suites(facts="true", vision="wrong"),
        rounds=tuple((*each, IMAGE_FAILS) for each in rounds()),
    )  # fmt: skip
    seen = GeneratedAnswer(item="image", text="maps", tokens=60, seconds=3.0, drafted=0, accepted=0)
    after = side(
        suites=suites(facts="true", vision="true"),
        rounds=tuple((*each, seen) for each in rounds()),
    )
    found = verdict(after, before)
    assert found.word == "clean"
    assert "suite vision passes with the patch only" in found.reasons
    image = next(c for c in found.checks if c.id == "patch.answers.image")
    assert "HTTP 500" in image.observed
    assert "instead" in image.observed
    blind = after.model_copy(update={"suites": suites(facts="true")})
    assert verdict(blind, before.model_copy(update={"suites": suites(facts="true")})).word == (
        "experimental"
    )


def test_verdict_on_the_patch_measured_in_the_field() -> None:
    """Images work, acceptance holds, and 2,661 errors that no unpatched log has: experimental."""

    def run(*items: tuple[str, int, int]) -> tuple[tuple[GeneratedAnswer, ...], ...]:
        one = GeneratedAnswer(item="", text="x", tokens=90, seconds=5.0)
        changes = [{"item": n, "drafted": made, "accepted": kept} for n, made, kept in items]
        return (tuple(one.model_copy(update=change) for change in changes),)

    lost = [
        "E decode: failed to initialize batch",
        "E spec  process: llama_decode(ctx_dft) head=0 failed rc=-1 (pos=36)",
        "E srv   decode: failed to process speculative batch",
    ]
    before = side(
        "without", log=[*QUIET, *lost * 3], suites=suites(facts="true", vision="wrong"),
        rounds=((*run(("prose", 1008, 364))[0], IMAGE_FAILS),),
    )  # fmt: skip
    after = side(
        log=[*QUIET, *errors(2661)],
        suites=suites(facts="true", vision="true"),
        rounds=run(("prose", 1585, 581), ("image", 1106, 724)),
    )
    found = verdict(after, before, speculates=True)
    assert found.word == "experimental"
    assert found.reasons == (
        "errors in the log, new: 2,661 times, never without: llama_decode[1] returned <n>",
    )
    seen = {c.id: c.observed for c in found.checks}
    assert seen["patch.acceptance"] == "581 of 1585 (36.7%)"
    gone = [c for c in found.changes if c.how == "gone"]
    assert any("head=0 failed rc=<n> (pos=<n>)" in c.text for c in gone)


def test_verdict_is_never_clean_without_an_unpatched_server() -> None:
    dead = side("without", asked=False, problem="it ended", suites=(), rounds=(), kinds=(), lines=0)
    found = verdict(side(), dead)
    assert found.word == "experimental"
    assert "could not be measured (it ended); the patched one" in found.reasons[0]
    lame = side("without", problem="it died in the middle")
    assert verdict(side(), lame).word == "experimental"
    nothing = conclude_verdict(dead, side(asked=False, problem="it ended too"), PLAIN)
    assert nothing.word is None
    assert nothing.reasons == ("with: it ended too", "without: it ended")


ACCEPTANCE: list[tuple[tuple[int, int], tuple[int, int], str]] = [
    ((1000, 360), (1000, 365), "no effect"),
    ((1000, 360), (1000, 250), "harmful"),
    ((1000, 360), (0, 0), "harmful"),
    ((1000, 360), (1000, 340), "no effect"),
    ((10, 5), (10, 4), "no effect"),
    ((0, 0), (1000, 300), "experimental"),
    ((0, 0), (0, 0), "experimental"),
]
"""Drafts made and accepted without the patch, and with it; the verdict."""


def test_verdict_by_acceptance() -> None:
    def drafts(made: int, kept: int) -> tuple[tuple[GeneratedAnswer, ...], ...]:
        first, *rest = rounds()
        one = first[0].model_copy(update={"drafted": made, "accepted": kept})
        return ((one, *first[1:]), *rest)

    bounds = Expect.model_validate({"acceptance": {"least": 0.3, "most": 0.99}})
    found, bounded = [], []
    for old, new, word in ACCEPTANCE:
        before, after = side("without", rounds=drafts(*old)), side(rounds=drafts(*new))
        found.append(verdict(after, before, speculates=True).word)
        low = new[0] > 0 and new[1] / new[0] < 0.3
        got = verdict(after, before, bounds, speculates=True).word
        bounded.append((got, "harmful" if low else word))
    assert found == [word for *_, word in ACCEPTANCE]
    assert [got for got, _ in bounded] == [want for _, want in bounded]


EXPECTED_LINES: list[tuple[Mapping[str, Any], int, int, str]] = [
    ({"must_appear": [{"pattern": "p"}]}, 3, 0, "clean"),
    ({"must_appear": [{"pattern": "p"}]}, 0, 0, "no effect"),
    ({"must_appear": [{"pattern": "p"}]}, 3, 3, "no effect"),
    ({"must_appear": [{"pattern": "p", "least": 5}]}, 3, 0, "no effect"),
    ({"must_appear": [{"pattern": "p", "least": 2, "most": 4}]}, 3, 0, "clean"),
    ({"must_appear": [{"pattern": "p"}]}, 0, 4, "experimental"),
    ({"must_not_appear": [{"pattern": "p"}]}, 0, 6, "clean"),
    ({"must_not_appear": [{"pattern": "p"}]}, 6, 6, "no effect"),
    ({"must_not_appear": [{"pattern": "p"}]}, 0, 0, "no effect"),
    ({"must_not_appear": [{"pattern": "p"}]}, 1, 0, "experimental"),
    ({"must_not_appear": [{"pattern": "p"}]}, 9, 6, "experimental"),
    ({"must_not_appear": [{"pattern": "p", "most": 10}]}, 9, 6, "no effect"),
]


def test_verdict_by_expected_log_lines() -> None:
    expects = [Expect.model_validate(expect) for expect, *_ in EXPECTED_LINES]
    found = [
        verdict(side(matches={"p": now}), side("without", matches={"p": before}), expect).word
        for expect, (_, now, before, _) in zip(expects, EXPECTED_LINES, strict=True)
    ]
    assert found == [word for *_, word in EXPECTED_LINES]
    unseen = {verdict(side(), side("without"), expect).word for expect in expects}
    assert unseen == {"experimental"}


def test_verdict_experimental_if_an_expected_suite_did_not_run() -> None:
    expect = Expect.model_validate({"suites": ["vision"]})
    assert verdict(side(), expect=expect).word == "experimental"
    both = suites(facts="true", fluency="true", vision="wrong")
    found = verdict(side(suites=both), side("without", suites=both), expect)
    assert found.word == "no effect"
    assert found.reasons == ("suite vision passes neither with the patch nor without",)
    assert verdict(side(suites=both), side("without", suites=both)).word == "experimental"


@given(
    st.fixed_dictionaries(
        {
            "suites": st.sampled_from([suites(), suites(facts="true"), suites(facts="wrong")]),
            "rounds": st.sampled_from([(), rounds(), rounds(9.0), rounds(problem="x")]),
            "problem": st.sampled_from([None, "it died"]),
            "asked": st.booleans(),
            "beyond": st.integers(0, 1),
            "log": st.sampled_from([[], QUIET, [*QUIET, *errors(3)]]),
        }
    ),
    st.fixed_dictionaries(
        {
            "suites": st.sampled_from([suites(), suites(facts="true"), suites(facts="wrong")]),
            "rounds": st.sampled_from([(), rounds(), rounds(problem="x")]),
            "problem": st.sampled_from([None, "it died"]),
            "asked": st.booleans(),
            "log": st.sampled_from([[], QUIET, [*QUIET, *errors(3)]]),
        }
    ),
)
def test_verdict_is_never_clean_without_evidence(
    now: dict[str, Any], before: dict[str, Any]
) -> None:
    found = conclude_verdict(side("without", **before), side(**now), PLAIN)
    assert found.reasons
    if found.word in ("clean", "no effect"):
        assert all(c.passed for c in found.checks)
        assert now["asked"]
        assert not now["problem"]
        assert not before["problem"]
        assert now["log"]
        assert now["rounds"]
    if found.word == "harmful":
        assert any(c.verdict is Verdict.FAILED for c in found.checks)


def test_verdict_speed_is_of_what_both_answered() -> None:
    broken = tuple((a, b.model_copy(update={"problem": "x"})) for a, b in rounds(10.0, 0.0))
    found = speed_of(side("without"), side(rounds=broken))
    assert found
    assert found.patched == pytest.approx(10.0)
    assert found.slower(PLAIN)
    assert not found.slower(Expect.model_validate({"speed": 0.4}))
    assert not found.faster
    back = speed_of(side(rounds=broken), side("without"))
    assert back
    assert back.faster
    near = speed_of(side("without", rounds=rounds(20.0, 2.0)), side(rounds=rounds(24.0, 2.0)))
    assert near
    assert not near.faster


def test_verdict_by_an_expected_gain_in_speed() -> None:
    expect = Expect.model_validate({"speed": 1.5})
    got = {r: verdict(side(rounds=rounds(r)), expect=expect).word for r in (31.0, 22.0, 20.0, 10.0)}
    assert got == {31.0: "clean", 22.0: "no effect", 20.0: "no effect", 10.0: "harmful"}


def test_verdict_shows_where_two_texts_differ() -> None:
    assert parting("abcd", "abXd").startswith(
        "differs after 2 of 4 characters: 'Xd', without the patch 'cd'"
    )
    assert parting("ab", "abc").startswith(
        "differs after 2 of 3 characters: 'c', without the patch ''"
    )


def test_verdict_report_is_printable_and_complete() -> None:
    hostile = side(log=[*QUIET, "0.00.000.001 E \x1b]0;x\x07 \u202e broke"])
    found = verdict(hostile)
    pin = PatchPin(id="7", file=FilePin(path="p", size=1, sha256="c" * 64))
    source = ArchivePin(
        origin="a",
        file=FilePin(path="a", size=1, sha256="a" * 64),
        folder=".",
        tree="5" * 40,
        date=1,
    )
    lock = Lock(recipe="r", engine="llama.cpp", wants="0", source=source, source_tree="6" * 40,
                patches=(pin,), weights={})  # fmt: skip
    told = report_lines("o/n#7", pin, lock, found, (BASE, hostile))
    assert all(line.isprintable() for line in told)
    assert told[-1].startswith("EXPERIMENTAL: ")
    kept = evidence_of(found, BASE, hostile)
    assert kept["errors"][0]["with"] == 1
    assert kept["speed"].startswith("x1.00")
    assert kept["suites"] == {"facts": "true, without true", "fluency": "true, without true"}


def test_expected_log_pattern_must_be_a_regular_expression() -> None:
    for pattern in ("(", "[", "a{2,1}", "(?P<x"):
        with pytest.raises(ValueError, match="not a regular expression"):
            Expect.model_validate({"must_appear": [{"pattern": pattern}]})
