"""Check a command against llama-server's own `--help`. Pure.

Format of build 11434: flags first, text from column 40 on; a removed flag is still listed, with
the words "the argument has been removed", and is fatal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse.checks import Check, check
from bakehouse.engines.llamacpp.server import spelling
from bakehouse.util.text import suggestion

COLUMN = 40
"""Column of an entry's text; on the next line if its flags are too long."""
SECTION = "----- example-specific params -----"
"""The last of the sections."""
LAST = (
    "--spec-default", "--vision-gemma-12b-default", "--vision-gemma-4b-default",
    "--gpt-oss-120b-default", "--gpt-oss-20b-default", "--fim-qwen-30b-default",
)  # fmt: skip
"""The last flag of the text in the known builds, newest first."""
_FLAG = re.compile(r"(-{1,2}[A-Za-z][\w.-]*)(?:,\s+|\s|$)")
_REMOVED = re.compile(r"has been removed\.?\s*(.*)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\(env: \w+\)")
_NUMBER = re.compile(r"-\d|-\.\d")


@dataclass(frozen=True)
class Entry:
    """One entry: all spellings of one flag. `values` is how many arguments follow it."""

    flags: tuple[str, ...]
    values: int
    text: str

    @property
    def removed(self) -> str | None:
        """Advice for a removed flag, perhaps empty; None for any other flag."""
        found = _REMOVED.search(self.text)
        return _ENVIRONMENT.sub("", found[1]).strip() if found else None


@dataclass(frozen=True)
class Help:
    """All entries. An incomplete text does not prove that a flag is missing."""

    entries: dict[str, Entry]
    complete: bool


def parse_help(text: str) -> Help:
    """Parse the text of `--help`."""
    entries: dict[str, Entry] = {}
    last: Entry | None = None
    for line in text.splitlines():
        if line.startswith("-") and not line.startswith("----"):
            last = _entry(line)
        elif last and line.startswith(" "):
            last = Entry(last.flags, last.values, f"{last.text} {line.strip()}".strip())
        else:
            last = None
            continue
        entries.update(dict.fromkeys(last.flags, last))
    ended = text.endswith("\n") and SECTION in text
    return Help(entries, ended and last is not None and any(f in LAST for f in last.flags))


def _entry(line: str) -> Entry:
    short = len(line) > COLUMN and not line[COLUMN - 3 : COLUMN].strip()
    head, text = (line[:COLUMN], line[COLUMN:].strip()) if short else (line, "")
    flags, at = [], 0
    while found := _FLAG.match(head, at):
        flags.append(spelling(found[1]))
        at = found.end()
        if not found[0].startswith(found[1] + ","):
            break
    hint = head[at:].strip()
    values = 0 if not hint else 2 if re.fullmatch(r"[A-Z]+ [A-Z]+", hint) else 1
    return Entry(tuple(flags), values, text)


def judge_flags(argv: Sequence[str], known: Help, where: str) -> tuple[Check, ...]:
    """Check every flag of a command: one check for all known flags, one for each unknown flag.

    `argv[0]` is the program. A flag that an incomplete text does not list is unknown.
    """
    good, found = [], []
    index = 1
    while index < len(argv):
        argument = argv[index]
        index += 1
        if not argument.startswith("-") or argument == "-" or _NUMBER.match(argument):
            continue
        flag = argument.replace("_", "-") if argument.startswith("--") else argument
        entry = known.entries.get(flag)
        if entry is None or entry.removed is not None:
            found.append(_missing(flag, entry, known, where))
        else:
            good.append(flag)
        index += entry.values if entry else 0
    if good:
        listed = " ".join(dict.fromkeys(good))
        found.insert(0, check("flags", "every flag is in the server's own --help", listed, where,
                              ok=True))  # fmt: skip
    return tuple(found)


def _missing(flag: str, entry: Entry | None, known: Help, where: str) -> Check:
    name, _, value = flag.partition("=")
    if entry is not None:
        observed = f"{flag} has been removed"
        if entry.removed:
            observed += f": {entry.removed}"
    elif value and spelling(name) in known.entries:
        observed = f"'{flag}' is not a flag: write the value as the next argument, {name} {value}"
    else:
        observed = f"unknown flag {flag}{_nearest(name, known.entries)}"
    ok = False if entry is not None or known.complete else None
    if ok is None:
        observed += ", but --help stopped before its end"
    return check(f"flag.{name.lstrip('-')}", f"{name} in the server's own --help", observed, where,
                 ok=ok)  # fmt: skip


def _nearest(flag: str, entries: dict[str, Entry]) -> str:
    return suggestion(flag, (n for n, e in entries.items() if e.removed is None))
