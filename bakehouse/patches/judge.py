"""The verdict of a patch, from what was measured with it and without it. Pure.

Every judgement is a check; a check that did not pass has a weight. *harmful* outweighs
*experimental*, and what is unknown is experimental at best: missing evidence is never clean. Where
nothing is wrong, *clean* says that the patch shows in what was measured, and *no effect* that it
does not, or not as its manifest expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bakehouse.checks import Check, Verdict, check
from bakehouse.patches.contrast import Change, contrast
from bakehouse.patches.evidence import Side, Speed, Spoken, answered, speed_of
from bakehouse.patches.manifest import Expect, LogPattern, Word

SLOWEST = 0.9
"""Share of the unpatched server's speed below which a patch harms, where it says nothing itself."""
ACCEPTANCE = 0.9
"""Share of the unpatched server's acceptance below which it is lost."""
DEVIATIONS = 3.0
"""And by so many standard deviations: drafts are few in a short generation."""
SHOWN = 3

Weight = Literal["harmful", "experimental", "unmet"]
"""What a check that failed makes of the verdict; `unmet`: an expected effect is not there."""


@dataclass(frozen=True)
class Judged:
    """The verdict. `word` is None where neither server could be measured: nothing is judged."""

    word: Word | None
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]
    changes: tuple[Change, ...]
    """Kinds of log lines that differ."""
    speed: Speed | None


@dataclass
class _Court:
    """Collects checks, what speaks against the patch, and in what it shows at all."""

    checks: list[Check] = field(default_factory=list)
    against: list[tuple[Weight, str]] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)

    def rule(self, one: Check, weight: Weight, says: str = "") -> None:
        """Take a check in; `says` is the reason, in words, where it did not pass."""
        self.checks.append(one)
        if one.verdict is Verdict.FAILED:
            self.against.append((weight, says or f"{one.expected}: {one.observed}"))
        elif one.verdict is Verdict.UNKNOWN:
            self.against.append(("experimental", says or f"not known: {one.expected}"))

    def weighed(self, weight: Weight) -> list[str]:
        return [says for kind, says in self.against if kind == weight]


def judge(without: Side, patched: Side, expect: Expect, *, speculates: bool = False) -> Judged:
    """Give the verdict on a patch. `speculates` says that the recipe asks for drafts."""
    court = _Court()
    both = without.requests + patched.requests
    share = patched.requests / both if without.requests and patched.requests else 0.5
    changes = contrast(without.kinds, patched.kinds, share=share)
    speed = speed_of(without, patched)
    if not patched.asked and not without.asked:
        says = (f"with: {patched.problem}", f"without: {without.problem}")
        return Judged(None, says, (_runs(without, patched),), changes, speed)
    court.rule(
        _runs(without, patched), "harmful", f"it does not serve with the patch: {patched.problem}"
    )
    if patched.asked:
        _compared(court, without)
        _suites(court, without, patched, expect)
        _answers(court, without, patched, expect)
        _acceptance(court, without, patched, expect, speculates=speculates)
        _speed(court, without, speed, expect)
        _log(court, without, patched, changes)
        _patterns(court, without, patched, expect)
    word = _word(court)
    return Judged(word, _reasons(court, word), tuple(court.checks), changes, speed)


def _word(court: _Court) -> Word:
    if court.weighed("harmful"):
        return "harmful"
    if court.weighed("experimental"):
        return "experimental"
    if court.weighed("unmet"):
        return "experimental" if court.effects else "no effect"
    return "clean" if court.effects else "no effect"


def _reasons(court: _Court, word: Word) -> tuple[str, ...]:
    against = [*court.weighed("harmful"), *court.weighed("experimental"), *court.weighed("unmet")]
    if against:
        return tuple(against)
    if word == "clean":
        return tuple(court.effects)
    return ("nothing that was measured differs from the unpatched server",)


def _runs(without: Side, patched: Side) -> Check:
    seen = patched.problem or "it served, and ended when it was told to"
    if patched.problem and not without.asked:
        seen = f"{seen}; nor could the unpatched one be asked: {without.problem}"
    return check(
        "patch.serves", "the patched server comes up, is asked, and lives on", seen, patched.log,
        ok=False if patched.problem else True if patched.asked else None,
    )  # fmt: skip


def _compared(court: _Court, without: Side) -> None:
    """Say where there is nothing to compare with: then nothing is ever clean."""
    expected = "an unpatched server to compare with"
    if without.asked and without.problem is None:
        seen = "it served the same"
        court.rule(check("patch.base", expected, seen, without.log, ok=True), "experimental")
        return
    what = "in part" if without.asked else "not"
    says = (
        f"the unpatched server could {what} be compared with ({without.problem}); the patched one "
        "is judged by its own suites, its log and what is expected of it"
    )
    court.rule(
        check("patch.base", expected, without.problem, without.log, ok=None), "experimental", says
    )


def _suites(court: _Court, without: Side, patched: Side, expect: Expect) -> None:
    names = dict.fromkeys(
        (*expect.suites, *(s.suite for s in patched.suites), *(s.suite for s in without.suites))
    )
    for name in names:
        before, now = without.good(name), patched.good(name)
        seen, old = patched.suite(name), without.suite(name)
        told = f"{seen.verdict}: {seen.summary}" if seen else None
        was = f"{old.verdict} without" if old else "not asked without"
        one = check(
            f"patch.suite.{name}", f"passes ({was})", told, f"suite {name}, with the patch", ok=now
        )
        if now is False and before is False:
            weight: Weight = "unmet" if name in expect.suites else "experimental"
            court.rule(one, weight, f"suite {name} passes neither with the patch nor without")
            continue
        court.rule(one, "harmful", f"suite {name} passes without the patch only: {told}")
        if now and before is False:
            court.effects.append(f"suite {name} passes with the patch only")


def _answers(court: _Court, without: Side, patched: Side, expect: Expect) -> None:
    improved = any(patched.good(s.suite) and without.good(s.suite) is False
                   for s in patched.suites)  # fmt: skip
    for item in patched.items:
        now, before = patched.said(item), without.said(item)
        one, weight, says = _item(item, now, before, expect, improved=improved)
        court.rule(one, weight, says)
        if not any(s.problem for s in now) and any(s.problem for s in before):
            court.effects.append(f"{item} is answered with the patch only")
        elif expect.answers_may_differ and one.passed and not _common(now, before):
            court.effects.append(f"{item} is answered otherwise")
    if not patched.items:
        unknown = check("patch.answers", "the same generation", None, patched.log, ok=None)
        court.rule(unknown, "experimental", "nothing was generated to compare")


def _item(
    item: str, now: Sequence[Spoken], before: Sequence[Spoken], expect: Expect, *, improved: bool
) -> tuple[Check, Weight, str]:
    """Judge the answers to one item over all rounds."""
    id_, where = f"patch.answers.{item}", "greedy generation, the same request to both"
    expected = f"{item}: word for word what the unpatched server says"
    bad = next((s.problem for s in now if s.problem), None)
    old = next((s.problem for s in before if s.problem), None)
    if bad:
        says = f"{item} is not answered with the patch: {bad}"
        failed = check(id_, expected, bad, where, ok=None if old else False)
        return failed, "harmful", says
    if old:
        seen = f"answered; without the patch: {old}"
        instead = "; the suites that only it passes judge it instead" if improved else ""
        one = check(id_, expected, seen + instead, where, ok=True if improved else None)
        return one, "experimental", f"{item} is answered with the patch only, and nothing judges it"
    if not before:
        return check(id_, expected, None, where, ok=None), "experimental", ""
    if _common(now, before):
        return check(id_, expected, "the same", where, ok=True), "experimental", ""
    if len({s.text for s in now}) > 1 or len({s.text for s in before}) > 1:
        seen = "answers differ from round to round of one server"
        unknown = check(id_, expected, seen, where, ok=None)
        return unknown, "experimental", f"{item}: {seen}, so the two cannot be compared"
    seen = parting(before[0].text, now[0].text)
    ok = expect.answers_may_differ
    return check(id_, expected, seen, where, ok=ok), "experimental", f"{item}: {seen}"


def _common(now: Sequence[Spoken], before: Sequence[Spoken]) -> bool:
    return bool({s.text for s in now} & {s.text for s in before})


def parting(before: str, now: str) -> str:
    """Say where two texts part."""
    same = next((n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
    place = min(len(before), len(now)) if same is None else same
    return (
        f"parts after {place} of {max(len(before), len(now))} characters: {now[place:][:24]!r} "
        f"where {before[place:][:24]!r} is said without"
    )


def _acceptance(
    court: _Court, without: Side, patched: Side, expect: Expect, *, speculates: bool
) -> None:
    both, all_ = answered(without, patched), answered(patched)
    old, new = without.drafts(both), patched.drafts(both)
    wanted = expect.acceptance
    if not (speculates or wanted or (old and old[0]) or (new and new[0])):
        return
    where = "drafts of the generation, as the engine counts them"
    seen = _share(new)
    court.rule(
        check("patch.acceptance", f"drafts accepted as without: {_share(old) or 'not known'}",
              seen, where, ok=_kept(old, new)),
        "harmful", f"acceptance is lost: {seen}, {_share(old)} without",
    )  # fmt: skip
    if wanted:
        whole = patched.drafts(all_)
        share = whole[1] / whole[0] if whole and whole[0] else None
        low, high = wanted.least, wanted.most
        fits = None if share is None else (low is None or share >= low) and (
            high is None or share <= high
        )  # fmt: skip
        bounds = f"{low or 0:.0%} to {1 if high is None else high:.0%} of the drafts accepted"
        weight: Weight = "harmful" if share is not None and share < (low or 0) else "experimental"
        court.rule(check("patch.expect.acceptance", bounds, _share(whole), where, ok=fits), weight)


def _share(drafts: tuple[int, int] | None) -> str | None:
    if drafts is None:
        return None
    made, kept = drafts
    return f"{kept} of {made} ({kept / made:.1%})" if made else "no drafts"


def _kept(old: tuple[int, int] | None, new: tuple[int, int] | None) -> bool | None:
    """Whether acceptance is what it was; None where either is not known, or nothing is drafted."""
    if old is None or new is None or not old[0]:
        return None
    if not new[0]:
        return False
    before, now = old[1] / old[0], new[1] / new[0]
    pooled = (old[1] + new[1]) / (old[0] + new[0])
    deviation = (pooled * (1 - pooled) * (1 / old[0] + 1 / new[0])) ** 0.5
    return not (now < ACCEPTANCE * before and before - now > DEVIATIONS * deviation)


def slower(speed: Speed | None, expect: Expect) -> bool:
    """Whether a server is slower beyond the bound, even if its best round is held to the worst."""
    return speed is not None and speed.at_best < _bound(expect)


def faster(speed: Speed | None) -> bool:
    """Whether a server is faster by as much, even if its worst round is held to the best."""
    return speed is not None and speed.at_worst > 1 / SLOWEST


def _bound(expect: Expect) -> float:
    return expect.speed if expect.speed and expect.speed <= 1 else SLOWEST


def _speed(court: _Court, without: Side, speed: Speed | None, expect: Expect) -> None:
    seen = str(speed) if speed else None
    where = f"generation, {len(without.rounds)} rounds"
    one = check(
        "patch.speed", f"at least x{_bound(expect):g} of the unpatched server's decode speed", seen,
        where, ok=None if speed is None else not slower(speed, expect),
    )  # fmt: skip
    court.rule(one, "harmful", f"slower: {speed}" if speed else "decode speed is not known")
    if expect.speed and expect.speed > 1:
        gain = None if speed is None else speed.apart and speed.ratio >= expect.speed
        expected = f"at least x{expect.speed:g} of it, and beyond the noise"
        court.rule(check("patch.expect.speed", expected, seen, where, ok=gain), "unmet")
        if gain:
            court.effects.append(f"faster, as expected: {speed}")
    elif faster(speed):
        court.effects.append(f"faster: {speed}")


def _log(court: _Court, without: Side, patched: Side, changes: Sequence[Change]) -> None:
    errors = [c for c in changes if c.level == "error"]
    enough: bool | None = True if patched.lines and not (patched.beyond or without.beyond) else None
    for how, words in (("new", "no kind of error that the unpatched log lacks"),
                       ("raised", "no kind of error more often than without")):  # fmt: skip
        found = [c for c in errors if c.how == how]
        says = f"{len(found)} kind{'s' * (len(found) != 1)} of error" if found else "none"
        listed = "; ".join(str(c) for c in found[:SHOWN])
        where = f"{patched.log}:{found[0].line_number}: {found[0].line}" if found else patched.log
        one = check(
            f"patch.log.{how}", words, f"{says}: {listed}" if found else says, where,
            ok=False if found else enough,
        )  # fmt: skip
        why = "new" if how == "new" else "more often"
        unknown = "the log holds too many kinds of lines, or none, to be compared"
        court.rule(one, "experimental",
                   f"errors in the log, {why}: {listed}" if found else unknown)  # fmt: skip
    _signatures(court, without, patched)
    court.effects += [f"log, {c.how}: {c}" for c in changes if not (c.level == "error" and c.worse)]


def _signatures(court: _Court, without: Side, patched: Side) -> None:
    """Known signatures: a fatal or silent one harms, a loss is one error more."""
    known = {g.id for g in without.graves}
    fresh = [g for g in patched.graves if g.id not in known]
    bad = [g for g in fresh if g.severity in ("fatal", "silent")]
    first = next(iter(bad or fresh), None)
    seen = f"{first.severity}: {first.id}, {first.count:,} times" if first else "none"
    where = f"{patched.log}:{first.line_number}: {first.line}" if first else patched.log
    court.rule(
        check("patch.log.signatures", "no known fault that the unpatched log lacks", seen, where,
              ok=first is None if patched.lines else None),
        "harmful" if bad else "experimental",
        f"a known fault in the log, at which serve ends a server: {seen}",
    )  # fmt: skip


def _patterns(court: _Court, without: Side, patched: Side, expect: Expect) -> None:
    """Judge what the manifest expects of the log."""
    for number, one in enumerate(expect.must_appear, start=1):
        _pattern(court, f"patch.expect.appears.{number}", one, without, patched, must=True)
    for number, one in enumerate(expect.must_not_appear, start=1):
        _pattern(court, f"patch.expect.absent.{number}", one, without, patched, must=False)


def _pattern(
    court: _Court, id_: str, wanted: LogPattern, without: Side, patched: Side, *, must: bool
) -> None:
    now, before = patched.matches.get(wanted.pattern), without.matches.get(wanted.pattern)
    low, high = wanted.least, wanted.most
    if low is None and high is None:
        low, high = (1, None) if must else (None, 0)
    old = "not known" if before is None else f"{before:,}"
    expected = f"lines like /{wanted.pattern}/: {_bounds(low, high)}"
    fits = None if now is None else _within(now, low, high)
    one = check(
        id_, expected, None if now is None else f"{now:,} ({old} without)", patched.log, ok=fits
    )
    # What was as bad before is an effect that is missing, not one that the patch brought.
    helps = fits is False and before is not None and not _within(before, low, high)
    more = now is not None and before is not None and now > before and not must
    court.rule(one, "unmet" if helps and not more else "experimental")
    if fits and before is not None and not _within(before, low, high):
        court.effects.append(f"as expected, {expected}; {old} without")


def _within(count: int, low: int | None, high: int | None) -> bool:
    return (low is None or count >= low) and (high is None or count <= high)


def _bounds(low: int | None, high: int | None) -> str:
    if low is None:
        return "none" if not high else f"at most {high:,}"
    return f"at least {low:,}" if high is None else f"{low:,} to {high:,}"
