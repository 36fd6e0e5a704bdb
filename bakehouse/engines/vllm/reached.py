"""Holds a `vllm serve` command against the table of what flags reach for. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from bakehouse.engines.vllm.flags import Command
from bakehouse.engines.vllm.reach import ELSEWHERE, FLAGS, KEYS, LOADERS, Rule
from bakehouse.lock import Lock
from bakehouse.recipe.model import Recipe

WEIGHTS = "/weights"
"""Where the pinned files of each role lie inside the container: `/weights/model` and so on."""
Found = tuple[str, str]
"""What is wrong, and what to do."""
_HINT = (
    "name a file or folder of the weights, such as {{ weights.model.path }}/NAME, or one below a "
    "mount of container.volumes"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
DEEPEST = 8


class Pinned:
    """What a recipe's container holds that may be named."""

    def __init__(self, recipe: Recipe, lock: Lock | None = None) -> None:
        self._roles = {role for role, _ in recipe.weights.items()}
        self._lock = lock
        wanted = recipe.container.volumes if recipe.container else ()
        targets = (text.split(":")[1] for text in wanted if ":" in text)
        self._mounts = [_parts(target) for target in targets if target.startswith("/")]

    def weights(self, path: str, role: str | None = None) -> bool:
        """Whether a path is, or lies in, a role's pinned files; with a lock, one that it holds."""
        parts = _parts(path)
        if parts[:2] != ("/", WEIGHTS[1:]) or len(parts) < 3 or role not in (None, parts[2]):
            return False
        if self._lock is None or parts[2] not in self._lock.weights:
            return parts[2] in self._roles
        inner = "/".join(parts[3:])
        files = (file.path for file in self._lock.weights[parts[2]].files)
        return not inner or any(f == inner or f.startswith(f"{inner}/") for f in files)

    def mounted(self, path: str) -> bool:
        """Whether a path is, or lies below, what the recipe mounts."""
        parts = _parts(path)
        return any(parts[: len(mount)] == mount for mount in self._mounts)

    def image(self, path: str) -> bool:
        """Whether a path is the image's own: absolute, and below nothing that is mounted."""
        parts = _parts(path)
        return parts[:1] == ("/",) and parts[1:2] != (WEIGHTS[1:],) and not self.mounted(path)


def _parts(path: str) -> tuple[str, ...]:
    """Parts of an absolute path; none of one that is relative, or leads upwards."""
    parts = PurePosixPath(path).parts
    rooted = path.startswith("/") and not path.startswith("//") and ".." not in parts
    return parts if rooted and "\0" not in path else ()


def judge(command: Command, there: Pinned) -> Iterator[Found]:
    """Say of each flag that reaches for what nothing pins what it names, and the mend."""
    for flag, words in command.flags.items():
        head, dot, key = flag.partition(".")
        rule = FLAGS.get(head, ELSEWHERE)
        if rule.kind in ("never", "code"):
            yield f"serve.command must not hold {flag}", rule.why
            continue
        above = tuple(key.split(".")) if dot else ()
        for word in words:
            yield from _value(head, above, word, rule, there)


def _value(
    flag: str, above: Sequence[str], word: str, rule: Rule, there: Pinned
) -> Iterator[Found]:
    """Judge one word behind a flag: text, JSON, or NAME=PATH."""
    if rule.kind == "named" and not word.startswith(("{", "[")):
        word = word.partition("=")[2]
    seen: set[str] = set()
    for keys, text in _leaves(_decoded(word), tuple(above)):
        name = ".".join((flag, *keys))
        one = _rule(flag, keys, rule)
        if one.kind in ("never", "code"):
            place = next(n for n in _prefixes(flag, keys) if _key_rule(flag, n) is one)
            if place not in seen:
                seen.add(place)
                yield f"serve.command must not set {place}", one.why
        elif isinstance(text, str):
            yield from _text(name, keys, text, one, there)


def _text(name: str, keys: Sequence[str], text: str, rule: Rule, there: Pinned) -> Iterator[Found]:
    named = rule.kind == "named" and keys and keys[-1] != "path"
    if rule.kind == "free" or named or not (text or rule.words):
        return
    if text in rule.words or there.weights(text) or there.mounted(text):
        return
    if rule.kind == "words":
        takes = ", ".join(word for word in rule.words if word)
        why = LOADERS.get(text, f"it takes {takes}" + ("" if rule.why else ", or what is pinned"))
        yield f"{name} {text}: {why}", rule.why or _HINT
    elif rule.kind == "image":
        if not (there.image(text) or "{" in text):  # a template may be written out
            yield f"{name} names '{text}', which nothing pins", _HINT
    elif rule is not ELSEWHERE or _elsewhere(text):
        yield f"{name} names '{text}', which nothing pins", _HINT


def _elsewhere(text: str) -> bool:
    """Whether a text may name something outside of the command: a URL, a path, OWNER/NAME."""
    return bool(_URL.search(text)) or "/" in text or text.startswith("~")


def _decoded(word: str) -> Any:
    if word.lstrip().startswith(("{", "[")):
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return word
    return word


def _leaves(value: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a JSON document that holds no other, and the keys that lead to it."""
    if isinstance(value, dict) and value and len(above) < DEEPEST:
        for key, inner in value.items():
            yield from _leaves(inner, (*above, key))
    elif isinstance(value, list) and value and len(above) < DEEPEST:
        for inner in value:
            yield from _leaves(inner, above)
    else:
        yield above, json.dumps(value) if isinstance(value, dict | list) else value


def _rule(flag: str, keys: Sequence[str], whole: Rule) -> Rule:
    """The rule for a value below these keys: that of the innermost key that has one."""
    if whole.kind == "free":
        return whole
    found = (_key_rule(flag, name) for name in reversed(list(_prefixes(flag, keys))))
    return next((rule for rule in found if rule), whole)


def _prefixes(flag: str, keys: Sequence[str]) -> Iterable[str]:
    return (".".join((flag, *keys[: n + 1])) for n in range(len(keys)))


def _key_rule(flag: str, name: str) -> Rule | None:
    inner = name.removeprefix(f"{flag}.").replace("-", "_")
    return KEYS.get(f"{flag}.{inner}") or KEYS.get(f"*.{inner.rpartition('.')[2]}")
