"""The verdict on a patch, with reasons, from what was measured with it and without it.

Every comparison is a check; a check that did not pass has a weight. *harmful* outweighs
*experimental*, and an unknown result is experimental at best: missing evidence is never clean. If
nothing is wrong, *clean* means that the patch shows in what was measured, and *no effect* that it
does not, or not as its manifest expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from bakehouse.lock import Lock, PatchPin
from bakehouse.logscan.findings import Severity
from bakehouse.models import Check, Frozen, Verdict, check
from bakehouse.patch_review.log_diff import Change, Kind, contrast
from bakehouse.patches.manifest import Expect, LogPattern, Word
from bakehouse.redact import clean
from bakehouse.runs.store import SuiteRecord, SuiteVerdict

SLOWEST = 0.9
"""Default share of the unpatched server's speed below which a patch is harmful."""
ACCEPTANCE = 0.9
"""Share of the unpatched server's acceptance below which it is lost."""
DEVIATIONS = 3.0
"""Smallest difference in acceptance, in standard deviations."""
SHOWN = 3
"""Most kinds of errors in a reason."""
PASSED: frozenset[SuiteVerdict] = frozenset({"true", "true (provisional)"})


class GeneratedAnswer(Frozen):
    """One answer of the benchmark. Counts are in tokens."""

    item: str
    text: str = ""
    tokens: int | None = None
    seconds: float | None = None
    """Of decoding if the engine reports it, else of the whole request."""
    drafted: int | None = None
    accepted: int | None = None
    problem: str | None = None


class SevereFinding(Frozen):
    """A known signature in the log that is fatal, silent or a lost feature."""

    id: str
    severity: str
    count: int
    line_number: int
    line: str


class LogReport(Frozen):
    """What a server's log contains."""

    lines: int = 0
    kinds: tuple[Kind, ...] = ()
    beyond: int = 0
    """Lines of kinds after the first MOST_KINDS."""
    graves: tuple[SevereFinding, ...] = ()
    matches: dict[str, int] = {}
    """Number of log lines by expected pattern."""


class Side(LogReport):
    """What was measured of one of the two servers."""

    name: str
    """`with` or `without`."""
    build: str
    """Digest of the artifact; empty without one."""
    problem: str | None = None
    """Why it could not be measured, or how it ended; None if it was measured completely."""
    asked: bool = False
    """Whether it got as far as the first request."""
    suites: tuple[SuiteRecord, ...] = ()
    rounds: tuple[tuple[GeneratedAnswer, ...], ...] = ()
    """The benchmark's answers: the same items in each round."""
    counted: tuple[int, int] | None = None
    """Draft tokens made and accepted in all rounds, by the engine's counters."""
    log: str = "server.log"
    """Path of its log."""
    requests: int = 0

    def suite(self, name: str) -> SuiteRecord | None:
        """Return the result of a suite; None if it did not run."""
        return next((s for s in self.suites if s.suite == name), None)

    def good(self, name: str) -> bool | None:
        """Whether a suite passed; None if it did not run."""
        found = self.suite(name)
        return found.verdict in PASSED if found else None

    def answers(self, item: str) -> tuple[GeneratedAnswer, ...]:
        """Return the answers to one item, one a round."""
        return tuple(s for each in self.rounds for s in each if s.item == item)

    @property
    def items(self) -> tuple[str, ...]:
        """Names of the benchmark's items."""
        return tuple(dict.fromkeys(s.item for each in self.rounds for s in each))

    def drafts(self, items: frozenset[str]) -> tuple[int, int] | None:
        """Draft tokens made and accepted in these items; None if unknown.

        For an engine that does not report them by answer, those of all items by its counters.
        """
        given = [s for each in self.rounds for s in each if not s.problem]
        counted = [s for s in given if s.item in items and s.drafted is not None]
        if not counted:
            return self.counted if all(s.drafted is None for s in given) else None
        return sum(s.drafted or 0 for s in counted), sum(s.accepted or 0 for s in counted)

    def rates(self, items: frozenset[str]) -> tuple[float, ...]:
        """Return the speed of each round over these items, in tokens a second."""
        found = []
        for each in self.rounds:
            timed = [
                s for s in each if s.item in items and not s.problem and s.tokens and s.seconds
            ]
            tokens, seconds = sum(s.tokens or 0 for s in timed), sum(s.seconds or 0 for s in timed)
            if seconds > 0:
                found.append(tokens / seconds)
        return tuple(found)


class Speed(Frozen):
    """Decode speed of two servers in tokens a second: median, slowest and fastest round."""

    without: float
    without_spread: tuple[float, float]
    patched: float
    patched_spread: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The patched server's speed as a share of the other's."""
        return self.patched / self.without

    @property
    def apart(self) -> bool:
        """Whether the ranges do not overlap; else the difference is noise."""
        low, high = self.patched_spread, self.without_spread
        return low[1] < high[0] or low[0] > high[1]

    @property
    def faster(self) -> bool:
        """Whether the slowest patched round is that much faster than the fastest unpatched one."""
        return self.patched_spread[0] / self.without_spread[1] > 1 / SLOWEST

    def slower(self, expect: Expect) -> bool:
        """Whether the fastest patched round is below the bound on the slowest unpatched one."""
        return self.patched_spread[1] / self.without_spread[0] < _least_speed(expect)

    def __str__(self) -> str:
        """Describe it in one line."""
        (low, high), (a, b) = self.patched_spread, self.without_spread
        noise = "" if self.apart else ", within noise"
        return (
            f"x{self.ratio:.2f}{noise}: {self.patched:.1f} ({low:.1f} to {high:.1f}) tok/s, "
            f"{self.without:.1f} ({a:.1f} to {b:.1f}) without"
        )


def answered(*sides: Side) -> frozenset[str]:
    """Return the items that all of these servers answered in every round."""
    return frozenset(
        item for item in sides[0].items
        if all(answers and not any(s.problem for s in answers)
               for answers in (side.answers(item) for side in sides))
    )  # fmt: skip


def speed_of(without: Side, patched: Side) -> Speed | None:
    """Compare decode speed over what both servers answered; None if unknown."""
    both = answered(without, patched)
    old, new = without.rates(both), patched.rates(both)
    if not old or not new:
        return None
    return Speed(
        without=median(old), without_spread=(min(old), max(old)),
        patched=median(new), patched_spread=(min(new), max(new)),
    )  # fmt: skip


Weight = Literal["harmful", "experimental", "unmet"]
"""Effect of a failed check on the verdict; `unmet`: an expected effect is missing."""


@dataclass(frozen=True)
class Conclusion:
    """The verdict; `word` is None if neither server could be measured."""

    word: Word | None
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]
    changes: tuple[Change, ...]
    """Kinds of log lines that differ."""
    speed: Speed | None


def conclude_verdict(
    without: Side, patched: Side, expect: Expect, *, speculates: bool = False
) -> Conclusion:
    """Compare two servers and return the verdict. `speculates`: the recipe asks for drafts."""
    both = without.requests + patched.requests
    share = patched.requests / both if without.requests and patched.requests else 0.5
    changes = contrast(without.kinds, patched.kinds, share=share)
    speed = speed_of(without, patched)
    found = _Comparison(without, patched, expect)
    found.add_runs()
    if not patched.asked and not without.asked:
        problems = (f"with: {patched.problem}", f"without: {without.problem}")
        return Conclusion(None, problems, tuple(found.checks), changes, speed)
    if patched.asked:
        found.add_base()
        found.add_suites()
        found.add_answers()
        found.add_acceptance(speculates=speculates)
        found.add_speed(speed)
        found.add_log(changes)
        for number, one in enumerate(expect.must_appear, start=1):
            found.add_pattern(f"patch.expect.appears.{number}", one, must=True)
        for number, one in enumerate(expect.must_not_appear, start=1):
            found.add_pattern(f"patch.expect.absent.{number}", one, must=False)
    against, effects = found.against, found.effects
    word: Word = "clean" if effects else "no effect"
    if against["harmful"]:
        word = "harmful"
    elif against["experimental"] or (against["unmet"] and effects):
        word = "experimental"
    reasons = [reason for each in against.values() for reason in each] or effects
    reasons = reasons or ["nothing that was measured differs from the unpatched server"]
    return Conclusion(word, tuple(reasons), tuple(found.checks), changes, speed)


class _Comparison:
    """Collects checks, what speaks against the patch, and its visible effects."""

    def __init__(self, without: Side, patched: Side, expect: Expect) -> None:
        self.without, self.patched, self.expect = without, patched, expect
        self.checks: list[Check] = []
        self.against: dict[Weight, list[str]] = {"harmful": [], "experimental": [], "unmet": []}
        self.effects: list[str] = []

    def add(self, one: Check, weight: Weight = "experimental", reason: str = "") -> None:
        """Add a check; `reason` is for one that did not pass."""
        self.checks.append(one)
        if one.verdict is Verdict.FAILED:
            self.against[weight].append(reason or f"{one.expected}: {one.observed}")
        elif one.verdict is Verdict.UNKNOWN:
            self.against["experimental"].append(reason or f"unknown: {one.expected}")

    def add_runs(self) -> None:
        patched, without = self.patched, self.without
        observed = patched.problem or "it served, and stopped when asked to"
        if patched.problem and not without.asked:
            observed = (
                f"{observed}; the unpatched server could not be measured either: {without.problem}"
            )
        ok = False if patched.problem else True if patched.asked else None
        expected = "the patched server starts, answers and keeps running"
        reason = f"the server does not work with the patch: {patched.problem}"
        self.add(check("patch.serves", expected, observed, patched.log, ok=ok), "harmful", reason)

    def add_base(self) -> None:
        """Without a complete unpatched server to compare with, nothing is clean."""
        without = self.without
        complete = without.asked and without.problem is None
        observed = "it served the same" if complete else without.problem
        what = "only in part" if without.asked else "not"
        reason = (
            f"the unpatched server could {what} be measured ({without.problem}); the patched one "
            "is judged by its own suites, its log and its manifest's expectations"
        )
        ok = True if complete else None
        expected = "an unpatched server to compare with"
        self.add(check("patch.base", expected, observed, without.log, ok=ok), reason=reason)

    def add_suites(self) -> None:
        wanted, both = self.expect.suites, (*self.patched.suites, *self.without.suites)
        for name in dict.fromkeys((*wanted, *(s.suite for s in both))):
            before, now = self.without.good(name), self.patched.good(name)
            observed, old = self.patched.suite(name), self.without.suite(name)
            result = f"{observed.verdict}: {observed.summary}" if observed else None
            expected = f"passes ({f'{old.verdict} without' if old else 'not run without'})"
            where = f"suite {name}, with the patch"
            one = check(f"patch.suite.{name}", expected, result, where, ok=now)
            if now is False and before is False:
                weight: Weight = "unmet" if name in wanted else "experimental"
                self.add(one, weight, f"suite {name} passes neither with the patch nor without")
            else:
                reason = f"suite {name} passes without the patch only: {result}"
                self.add(one, "harmful", reason)
            if now and before is False:
                self.effects.append(f"suite {name} passes with the patch only")

    def add_answers(self) -> None:
        """Compare the answers to each item over all rounds."""
        improved = any(
            self.patched.good(s.suite) and self.without.good(s.suite) is False
            for s in self.patched.suites
        )
        for item in self.patched.items:
            now, before = self.patched.answers(item), self.without.answers(item)
            bad = next((s.problem for s in now if s.problem), None)
            old = next((s.problem for s in before if s.problem), None)
            texts, old_texts = {s.text for s in now}, {s.text for s in before}
            same = bool(texts & old_texts)
            weight: Weight = "experimental"
            observed: str | None
            ok: bool | None
            reason = ""
            if bad:
                observed, ok, weight = bad, None if old else False, "harmful"
                reason = f"{item} fails with the patch: {bad}"
            elif old:
                observed, ok = f"answered; without the patch: {old}", True if improved else None
                observed += "; judged by the suites that only it passes instead" if improved else ""
                reason = f"{item} is answered with the patch only, and no suite judges it"
                self.effects.append(f"{item} is answered with the patch only")
            elif not before:
                observed, ok = None, None
            elif same:
                observed, ok = "the same", True
            elif len(texts) > 1 or len(old_texts) > 1:
                observed, ok = "answers of one server differ between rounds", None
                reason = f"{item}: {observed}, so the servers cannot be compared"
            else:
                observed, ok = parting(before[0].text, now[0].text), self.expect.answers_may_differ
                reason = f"{item}: {observed}"
                self.effects += [f"{item} has another answer"] if ok else []
            expected = f"{item}: word for word the unpatched server's answer"
            where = "greedy decoding, the same request to both"
            self.add(
                check(f"patch.answers.{item}", expected, observed, where, ok=ok), weight, reason
            )
        if not self.patched.items:
            unknown = check("patch.answers", "the same answers", None, self.patched.log, ok=None)
            self.add(unknown, reason="there are no answers to compare")

    def add_acceptance(self, *, speculates: bool) -> None:
        both, wanted = answered(self.without, self.patched), self.expect.acceptance
        old, new = self.without.drafts(both), self.patched.drafts(both)
        if not (speculates or wanted or (old and old[0]) or (new and new[0])):
            return
        where = "drafts of the benchmark, as the engine counts them"
        expected, observed = f"drafts accepted as without: {_share(old) or 'unknown'}", _share(new)
        reason = f"acceptance is lost: {observed}, {_share(old)} without"
        one = check("patch.acceptance", expected, observed, where, ok=_acceptance_kept(old, new))
        self.add(one, "harmful", reason)
        if not wanted:
            return
        whole = self.patched.drafts(answered(self.patched))
        share = whole[1] / whole[0] if whole and whole[0] else None
        low, high = wanted.least or 0, 1 if wanted.most is None else wanted.most
        ok = None if share is None else low <= share <= high
        expected = f"{low:.0%} to {high:.0%} of the drafts accepted"
        one = check("patch.expect.acceptance", expected, _share(whole), where, ok=ok)
        self.add(one, "harmful" if share is not None and share < low else "experimental")

    def add_speed(self, speed: Speed | None) -> None:
        observed, gain = str(speed) if speed else None, self.expect.speed
        where = f"benchmark, {len(self.without.rounds)} rounds"
        bound = f"at least x{_least_speed(self.expect):g} of the unpatched server's decode speed"
        ok = None if speed is None else not speed.slower(self.expect)
        reason = f"slower: {speed}" if speed else "the decode speed is unknown"
        self.add(check("patch.speed", bound, observed, where, ok=ok), "harmful", reason)
        if gain and gain > 1:
            ok = None if speed is None else speed.apart and speed.ratio >= gain
            expected = f"at least x{gain:g} of it, and beyond noise"
            self.add(check("patch.expect.speed", expected, observed, where, ok=ok), "unmet")
            self.effects += [f"faster, as expected: {speed}"] if ok else []
        elif speed and speed.faster:
            self.effects.append(f"faster: {speed}")

    def add_log(self, changes: Sequence[Change]) -> None:
        log, lines = self.patched.log, self.patched.lines
        enough = True if lines and not (self.patched.beyond or self.without.beyond) else None
        for how, why, expected in (
            ("new", "new", "no new kind of error in the log"),
            ("raised", "more often", "no kind of error significantly more often"),
        ):
            found = [c for c in changes if c.level == "error" and c.how == how]
            listed = "; ".join(str(c) for c in found[:SHOWN])
            observed, where, ok = "none", log, enough
            reason = "the log has too many kinds of lines, or none, to be compared"
            if found:
                observed = f"{len(found)} kind{'s' * (len(found) != 1)} of error: {listed}"
                where, ok = f"{log}:{found[0].line_number}: {found[0].line}", False
                reason = f"errors in the log, {why}: {listed}"
            self.add(check(f"patch.log.{how}", expected, observed, where, ok=ok), reason=reason)
        known = {g.id for g in self.without.graves}
        fresh = [g for g in self.patched.graves if g.id not in known]
        bad = [g for g in fresh if g.severity in ("fatal", "silent")]
        first = next(iter(bad or fresh), None)
        observed = f"{first.severity}: {first.id}, {first.count:,} times" if first else "none"
        where = f"{log}:{first.line_number}: {first.line}" if first else log
        ok, expected = first is None if lines else None, "no new known fault in the log"
        reason = f"a known fault in the log, for which serve stops a server: {observed}"
        one = check("patch.log.signatures", expected, observed, where, ok=ok)
        self.add(one, "harmful" if bad else "experimental", reason)
        harmless = [c for c in changes if not (c.level == "error" and c.worse)]
        self.effects += [f"log, {c.how}: {c}" for c in harmless]

    def add_pattern(self, id_: str, wanted: LogPattern, *, must: bool) -> None:
        """Check the number of log lines like a pattern that the manifest expects."""
        now = self.patched.matches.get(wanted.pattern)
        before = self.without.matches.get(wanted.pattern)
        low, high = wanted.least, wanted.most
        if low is None and high is None:
            low, high = (1, None) if must else (None, 0)

        def within(count: int) -> bool:
            return (low is None or count >= low) and (high is None or count <= high)

        old = "unknown" if before is None else f"{before:,}"
        expected = f"lines like /{wanted.pattern}/: {_bounds(low, high)}"
        ok = None if now is None else within(now)
        observed = None if now is None else f"{now:,} ({old} without)"
        # If it was as bad without the patch, an effect is missing; the patch did not cause it.
        missing = ok is False and before is not None and not within(before)
        more = now is not None and before is not None and now > before and not must
        weight: Weight = "unmet" if missing and not more else "experimental"
        self.add(check(id_, expected, observed, self.patched.log, ok=ok), weight)
        if ok and before is not None and not within(before):
            self.effects.append(f"as expected, {expected}; {old} without")


def parting(before: str, now: str) -> str:
    """Describe where two texts differ first."""
    same = next((n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
    place = min(len(before), len(now)) if same is None else same
    return (
        f"differs after {place} of {max(len(before), len(now))} characters: {now[place:][:24]!r}, "
        f"without the patch {before[place:][:24]!r}"
    )


def _share(drafts: tuple[int, int] | None) -> str | None:
    if drafts is None:
        return None
    made, kept = drafts
    return f"{kept} of {made} ({kept / made:.1%})" if made else "no drafts"


def _acceptance_kept(old: tuple[int, int] | None, new: tuple[int, int] | None) -> bool | None:
    """Whether acceptance did not drop; None if either is unknown, or nothing is drafted."""
    if old is None or new is None or not old[0]:
        return None
    if not new[0]:
        return False
    before, now = old[1] / old[0], new[1] / new[0]
    pooled = (old[1] + new[1]) / (old[0] + new[0])
    deviation = (pooled * (1 - pooled) * (1 / old[0] + 1 / new[0])) ** 0.5
    return not (now < ACCEPTANCE * before and before - now > DEVIATIONS * deviation)


def _least_speed(expect: Expect) -> float:
    return expect.speed if expect.speed and expect.speed <= 1 else SLOWEST


def _bounds(low: int | None, high: int | None) -> str:
    if low is None:
        return "none" if not high else f"at most {high:,}"
    return f"at least {low:,}" if high is None else f"{low:,} to {high:,}"


KEPT = 20
"""Most kinds of errors in the manifest; the record has all."""
SHOWN_KINDS = 12
"""Most kinds of log lines to print."""


def evidence_of(judged: Conclusion, without: Side, patched: Side) -> dict[str, Any]:
    """Return the figures behind a verdict, short enough for a manifest."""
    errors = [c for c in judged.changes if c.level == "error" and c.worse]
    results = {s.suite: s.verdict for s in without.suites}
    checks = {c.id: c.observed for c in judged.checks}
    answers = "patch.answers."
    found: dict[str, Any] = {
        "builds": {"without": without.build[:16], "with": patched.build[:16]},
        "suites": {s.suite: f"{s.verdict}, without {results.get(s.suite, 'not run')}"
                   for s in patched.suites},
        "answers": {id_.removeprefix(answers): text for id_, text in checks.items()
                    if id_.startswith(answers)},
        "acceptance": checks.get("patch.acceptance", ""),
        "speed": str(judged.speed) if judged.speed else "unknown",
        "losses": sorted(losses(without, patched)),
        "errors": [{"line": c.text, "with": c.patched, "without": c.without}
                   for c in errors[:KEPT]],
    }  # fmt: skip
    return {key: value for key, value in found.items() if value}


def losses(without: Side, patched: Side) -> set[str]:
    """Return the ids of lost features that only the patched log shows."""
    lost = {g.id for g in patched.graves if g.severity == Severity.LOST}
    return lost - {g.id for g in without.graves}


def report_lines(
    name: str, pin: PatchPin, lock: Lock, judged: Conclusion, sides: tuple[Side, Side]
) -> list[str]:
    """Return the lines printed beside the checks. Untrusted text is cleaned."""
    base = lock.stamp.partition("-")[0] or str(lock.base)[:19]
    rows = [f"patch       {name}, sha256 {pin.file.sha256[:16]}, on {base}"]
    for title, side in zip(("without", "with"), sides, strict=True):
        measured = f"{side.requests} requests, {side.lines:,} lines of log"
        rows.append(f"{title:12}build {side.build[:16]}, {side.problem or measured}")
    if not (changes := judged.changes):
        rows.append("log         no kind of line differs significantly")
    else:
        some = f"{len(changes)} kinds of lines differ"
        differ = "1 kind of line differs" if len(changes) == 1 else some
        rows.append(f"log         {differ}; count with the patch, and without:")
    for one in changes[:SHOWN_KINDS]:
        rows.append(f"  {one.level:8} {one.patched:>9,} {one.without:>9,}  {one.text}"[:200])
    if len(changes) > SHOWN_KINDS:
        rows.append(f"  and {len(changes) - SHOWN_KINDS} more in the record")
    first, *more = judged.reasons
    rows += ["", f"{(judged.word or 'not judged').upper()}: {first}"]
    rows += [f"    {reason}" for reason in more]
    return [clean(line, one_line=True) for line in rows]
