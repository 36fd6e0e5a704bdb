"""Log lines as people and templates want them: no colours, no logger's prefix, no surprises."""

from __future__ import annotations

import json
import re

from bakehouse.redact import clean
from bakehouse.signatures.pattern import shape

_ANSI = re.compile(
    rb"(?:\x1b|\\u001b|\\x1b|\\033)"
    rb"(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|[()][A-Z0-9])",
    re.IGNORECASE,
)

_ESCAPES = (b"u001b", b"U001B", b"\\x1b")
_QUOTES = re.compile(rb"\\u20(?:18|19|1c|1d)", re.IGNORECASE)

_PREFIX = re.compile(
    r"""\s*(?:
      \d{1,4}\.\d\d\.\d{3}\.\d{3}\s+[DIWEFT](?=\s)                          # llama.cpp
    | (?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\s+\d\d-\d\d\s[\d:.]+\s\[[^\]\s]{1,80}\]  # vLLM
    | \((?:EngineCore|APIServer|Worker|VllmWorker|Engine|pid)[^()]{0,60}\)  # vLLM's processes
    | (?:ERROR|WARNING|INFO|CRITICAL)(?=\s+\[[\w.]+\.py:\d+\])
    | \[[\w.]+\.py:\d+\]
    | \[?\d{4}[-/]\d\d[-/]\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?\s?(?:Z|[+-]\d\d:?\d\d|UTC)?\]?:?
    | (?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)?\s?[A-Z][a-z]{2}\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d
      (?:\.\d+)?\s[\w.:-]{1,64}\s[\w./@-]{1,64}(?:\[\d+\])?:                # syslog, journald
    | \[\s{0,8}\d+\.\d{6}\]                                                 # the kernel's ring
    | \[[A-Z][a-z]{2}\s[A-Z][a-z]{2}\s{1,2}\d{1,2}\s[\d:]{8}\s\d{4}\]
    | \#\d+\s\d+\.\d+                                                       # BuildKit
    | [\w.-]{1,64}\s{1,20}\|(?=\s)                                          # Compose
    | <\d{1,2}>                                                             # syslog priority
    | [\w.:-]{1,64}\s[\w./@-]{1,64}\[\d{1,9}\]:                             # journald, short-iso
    | \[rank\d{1,5}\]:                                                     # torchrun
    | std(?:out|err)\s[FP](?=\s)                                           # Kubernetes' CRI
    | \[pod/[\w./-]{1,160}\]                                               # kubectl --prefix
    | \#\#\[\w{1,20}\]                                                     # GitHub Actions
    | time="[^"]{1,40}"\slevel=\w{1,20}\smsg="                             # logfmt
    )(?:\s|(?=<)|(?<=[\]"]))\s{0,200}""",
    re.VERBOSE | re.IGNORECASE,
)
_SHOWN = 500


def without_colours(data: bytes) -> bytes:
    """Take terminal escapes out, also those that a JSON logger wrote as backslash, u001b.

    Typographic quotes that such a logger wrote as numbers become plain ones.
    """
    written = b"\\" in data
    if b"\x1b" in data or (written and any(word in data for word in _ESCAPES)):
        data = _ANSI.sub(b"", data)
    if written and b"\\u20" in data:
        data = _QUOTES.sub(b"'", data)
    return data


def message(line: str) -> str:
    """Take off what loggers, Docker, journald and the kernel put before a message."""
    position = 0
    for _ in range(6):
        found = _PREFIX.match(line, position)
        if not found:
            break
        position = found.end()
    return line[position:].lstrip()


def decoded(data: bytes) -> str:
    """Give a line's text, also where a logger wrapped it into a JSON object."""
    line = data.decode(errors="replace")
    if not line.startswith('{"'):
        return line
    try:
        wrapped = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if isinstance(wrapped, dict):
        for name in ("log", "msg", "message", "MESSAGE"):
            if isinstance(wrapped.get(name), str):
                return str(wrapped[name]).rstrip("\n")
    return line


_SPOKEN = re.compile(
    r"""["'](?:content|prompt|reasoning(?:_content)?)\\?["']\s?:\s?\\?["'\[]
      | \bReceived\srequest\s[\w-]{1,80}:\s{1,3}prompt:\s
      | \bGenerated\sresponse\s[\w-]{1,80}(?:\s\([^()]{1,40}\))?:\s{1,3}output:\s
      | \bPars(?:ing|ed)\s(?:chat\s|input\s)?message:\s
      | \bnext\stoken:\s{1,9}\d{1,9}\s""",
    re.VERBOSE | re.IGNORECASE,
)
"""What a server logs before the words of its users and its model, who may talk of anything."""
_SPEECH = (b"content", b"prompt", b"reasoning", b"Generated response", b"message:", b"next token:")
"""One of these is in every such line."""
_SPEECH_SHAPES = tuple(shape(word).strip() for word in _SPEECH)


def may_speak(seen: bytes) -> bool:
    """Whether a line of this shape may hold somebody's words; most lines of most logs do not."""
    return any(word in seen for word in _SPEECH_SHAPES)


def spoken_from(data: bytes) -> int | None:
    """Give where the words of users or of the model begin in a line; None where nowhere.

    The place is one in the line's decoded text.
    """
    if not any(word in data for word in _SPEECH):
        return None
    found = _SPOKEN.search(decoded(data))
    return found.end() if found else None


def printable(line: str) -> str:
    """Make one line safe to print: controls escaped, at most 500 characters."""
    cut = line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
    return clean(cut.replace("\t", " ").strip(), one_line=True)
