"""llama-server's command: refused flags (`OWNED`, `refuse`), added flags, check against --help.

Flags as in llama.cpp build 11434 (`common/arg.cpp`): a flag takes its value as the next argument,
`_` and `-` are the same inside a long flag, and the last of two wins, so a second `--port` would
silently move the server away from the address that is verified.

Format of build 11434: flags first, text from column 40 on; a removed flag is still listed, with
the words "the argument has been removed", and is fatal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bakehouse.engines.base import NONCE_ALIAS, Requirements, as_features
from bakehouse.errors import RecipeError
from bakehouse.lock import Lock
from bakehouse.models import Check, check
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import Origin
from bakehouse.util.text import suggestion

_DOWNLOADS = "it downloads what nothing pins; name the weights under weights.model"
_ROUTER = "a recipe serves one model, named under weights.model and given with -m"
_EVIDENCE = "Bakehouse reads the log for evidence; leave the flag out"

OWNED: dict[str, str] = {
    "--host": "set serve.host",
    "--port": "set serve.port",
    "--reuse-port": "two servers on one port cannot be told apart; leave the flag out",
    "-np": "set serve.slots",
    "--parallel": "set serve.slots",
    "-a": "the name of the recipe is the model's name",
    "--alias": "the name of the recipe is the model's name",
    "--metrics": "Bakehouse always sets it; leave the flag out",
    "--slots": "Bakehouse always sets it; leave the flag out",
    "--no-slots": "readiness reads /slots; leave the flag out",
    "--api-key": "set serve.api_key: a key in an argument list can be read by every user",
    "--api-key-file": "set serve.api_key",
    "--api-prefix": "the API is served from the root; leave the flag out",
    "--ssl-key-file": "put TLS in front of the server; leave the flag out",
    "--ssl-cert-file": "put TLS in front of the server; leave the flag out",
    "--log-disable": _EVIDENCE,
    "--log-file": _EVIDENCE,
    "--log-jsonl": _EVIDENCE,
    "--log-colors": _EVIDENCE,
    "--models-dir": _ROUTER,
    "--models-preset": _ROUTER,
    "--hf-token": "set weights.model.hub; the token stays in the environment",
    "-hft": "set weights.model.hub; the token stays in the environment",
    **dict.fromkeys(
        (
            "-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff",
            "--hf-file", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "-mmu",
            "--mmproj-url", "--embd-gemma-default", "--fim-qwen-1.5b-default",
            "--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec",
            "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default",
            "--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default",
        ),
        _DOWNLOADS,
    ),
}  # fmt: skip
"""Flags that a recipe's command must not contain, and what to do instead of each."""

FREE_TEXT = frozenset(
    {"--chat-template", "--chat-template-kwargs", "--grammar", "-j", "--json-schema", "--tags",
     "-r", "--reverse-prompt", "--reasoning-budget-message", "--dry-sequence-breaker"}
)  # fmt: skip
"""Flags whose next argument is text of any form, also of the form of a flag."""

REFUSED_ENVIRONMENT = ("LLAMA_", "AIP_", "HF_")
"""Prefixes of variables that llama-server takes as flags, or that name tokens."""

LEVEL = ("-lv", "--verbosity", "--log-verbosity")
EVIDENCE_LEVEL = 4
"""The first level of the log that reports layers on the GPU and the attention used."""
VERBOSITY = (*LEVEL, "-v", "--verbose", "--log-verbose")


def spelling(argument: str) -> str:
    """Give a flag as the engine reads it: without `=value`, `_` as `-` in a long one."""
    flag = argument.partition("=")[0] if argument.startswith("-") else argument
    return flag.replace("_", "-") if flag.startswith("--") else flag


def flags(argv: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse a command: each flag, as `spelling` gives it, with its value or the next argument.

    `argv[0]` is the program. A value that looks like a flag counts as one, except after a flag that
    takes free text: too strict costs a clear error, too lax a server at another address.
    """
    found: list[tuple[str, str | None]] = []
    free_text = False
    for argument, following in zip(argv[1:], [*argv[2:], None], strict=False):
        if free_text or not argument.startswith("-") or argument == "-":
            free_text = False
            continue
        flag, equals, value = spelling(argument), *argument.partition("=")[1:]
        found.append((flag, value if equals else following))
        free_text = not equals and flag in FREE_TEXT
    return tuple(found)


def refuse(
    command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
) -> None:
    """Raise RecipeError, exit 2, for flags and variables that Bakehouse sets itself."""
    del lock  # what a command may contain does not depend on pins here
    options = flags(command)
    faults = [
        origin.fault(f"serve.command must not hold {flag}", OWNED[flag])
        for flag in dict.fromkeys(flag for flag, _ in options if flag in OWNED)
    ]
    faults += [
        origin.fault(
            f"serve.env must not hold {name}",
            "llama-server reads it instead of a flag, or as a token; write the flag in "
            "serve.command",
        )
        for name in recipe.serve.env
        if name.startswith(REFUSED_ENVIRONMENT)
    ]
    faults += [
        origin.fault(
            f"serve.command lowers {flag} to {value}",
            f"Bakehouse reads the log for evidence; use {EVIDENCE_LEVEL} or more, or leave it out",
        )
        for flag, value in options
        if flag in LEVEL and value and value.lstrip("-").isdigit() and int(value) < EVIDENCE_LEVEL
    ]
    if not any(flag in {"-m", "--model"} and value for flag, value in options):
        faults.append(
            origin.fault(
                "serve.command names no model",
                "add -m {{ weights.model.first }}; without it llama-server starts as a router "
                "that answers 200 with nothing loaded",
            )
        )
    if faults:
        raise RecipeError("the command sets flags that Bakehouse has to set itself", faults)


def additions(
    command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
) -> tuple[tuple[str, ...], int]:
    """Give the arguments that readiness needs, and the index of the alias among them.

    In the alias `{nonce}` stands for the nonce of the run. The engine sorts its aliases and shows
    the first as the model's id: `~` sorts behind every name.
    """
    added = [
        "--alias", f"{recipe.name},{NONCE_ALIAS}{{nonce}}",
        "--host", host,
        "--port", str(port),
        "--parallel", str(recipe.serve.slots),
        "--metrics",
        "--slots",
    ]  # fmt: skip
    if not any(flag in VERBOSITY for flag, _ in flags(command)):
        added += ["--verbosity", str(EVIDENCE_LEVEL)]
    if key_file:
        added += ["--api-key-file", key_file]
    return tuple(added), 1


DRAFT_FLAGS = frozenset({"-md", "--model-draft", "--spec-draft-model"})
GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")


class Features(Requirements):
    """What a llama-server has to show to be the one that the recipe asks for.

    The context is the sum over all slots.
    """

    build_info: str | None = None
    slots: int = 1
    chat: bool = False
    multimodal: bool = False
    speculation_lacks: str | None = None
    """What is missing from the command, if the engine would silently serve without speculating."""
    gpu_layers: int | None = None
    """Minimum number of layers on the GPU; all of the model's if it has fewer."""
    cpu: bool = False
    """Whether the recipe asks for no layer on the GPU."""
    flash_attn: str | None = None
    """`on` or `off`."""


def features(recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str) -> Features:
    """Derive what to expect from the recipe's keys and from the command."""
    options = {flag: value for flag, value in flags(command) if value is not None}
    questions = recipe.probe.facts.questions
    spec = recipe.serve.speculation or options.get("--spec-type")
    if not spec and options.keys() & DRAFT_FLAGS:
        spec = "draft"
    if spec and all(part == "none" for part in spec.split(",")):
        spec = None
    layers = recipe.serve.gpu_layers
    if layers is None:  # 0 for the CPU alone
        values = [options[name] for name in GPU_LAYERS if name in options]
        layers = 10**6 if "all" in values else _whole(options, *GPU_LAYERS)
        layers = layers or (0 if "0" in values else None)
    attention = recipe.serve.flash_attn or options.get("-fa") or options.get("--flash-attn")
    return Features(
        name=recipe.name,
        model_path=model_path,
        build_info=f"b{lock.build_number}-{lock.stamp}" if lock.stamp else None,
        slots=recipe.serve.slots,
        context=recipe.serve.context or _whole(options, "-c", "--ctx-size"),
        chat=questions is None or any(q.mode == "chat" for q in questions),
        multimodal=recipe.weights.projector is not None,
        speculation=spec or None,
        speculation_lacks=_lacks(spec, options) if spec else None,
        gpu_layers=layers or None,
        cpu=layers == 0,
        flash_attn=attention if attention in {"on", "off"} else None,
        key=recipe.serve.api_key is not None,
    )


WITH_DRAFTER = frozenset({"draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"})
"""Modes that draft with a second model file."""


def _lacks(spec: str, options: Mapping[str, str]) -> str | None:
    """Describe what is missing; not refused, since a drafter's file may name its own mode."""
    drafter = bool(options.keys() & DRAFT_FLAGS)
    if drafter and "--spec-type" not in options:
        return "-md without --spec-type serves without speculating; add --spec-type draft-simple"
    modes = sorted(WITH_DRAFTER & set(spec.split(",")))
    if modes and not drafter:
        return f"{modes[0]} without -md serves without speculating; add -md and the drafter's file"
    if "--spec-type" not in options:
        return f"serve.speculation is {spec}, but the command has no --spec-type"
    return None


def _whole(options: dict[str, str], *names: str) -> int | None:
    """Parse a positive whole number; None for 0 and anything else, which cannot be checked."""
    for name in names:
        if (value := options.get(name, "")).isdigit():
            return int(value) or None
    return None


def expectations(requirements: Requirements) -> tuple[str, ...]:
    """Describe the checks of readiness; part of the digest of a serve plan."""
    wanted = as_features(requirements, Features)
    lines = [
        "the nonce of the run comes back in /v1/models, from our child's own socket",
        '/health answers 200 {"status": "ok"}, before the probe and after it',
        f"/v1/models names {wanted.name}",
        f"/props shows model_path {wanted.model_path}",
        f"/slots shows {wanted.slots} slots",
    ]
    if wanted.build_info:
        lines.append(f"/props shows build_info {wanted.build_info}")
    if wanted.context:
        lines.append(f"/slots shows {wanted.context} tokens of context or more")
    if wanted.chat:
        lines.append("/props shows a chat template")
    if wanted.multimodal:
        lines.append("/v1/models shows the capability multimodal")
    if wanted.speculation:
        lines.append(f"/slots shows speculation on ({wanted.speculation})")
    if wanted.gpu_layers:
        lines.append(f"the log shows {wanted.gpu_layers} layers, or all, on the GPU")
    if wanted.flash_attn:
        lines.append(f"the log shows flash attention {wanted.flash_attn}")
    lines.append("no log line carries a fatal or a silent fault")
    return tuple(lines)


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
            last = replace(last, text=f"{last.text} {line.strip()}".strip())
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


def check_flags(argv: Sequence[str], usage: Help, where: str) -> tuple[Check, ...]:
    """Check every flag of a command: one check for all known flags, one for each unknown flag.

    `argv[0]` is the program. A flag that an incomplete text does not list is unknown.
    """
    listed: dict[str, None] = {}
    checks: list[Check] = []
    words = iter(argv[1:])
    for argument in words:
        if not argument.startswith("-") or argument == "-" or _NUMBER.match(argument):
            continue
        flag = argument.replace("_", "-") if argument.startswith("--") else argument
        entry = usage.entries.get(flag)
        for _ in range(entry.values if entry else 0):
            next(words, None)
        if entry and entry.removed is None:
            listed[flag] = None
            continue
        name, _, value = flag.partition("=")
        ok = False if entry or usage.complete else None
        if entry:
            observed = f"{flag} has been removed" + (f": {entry.removed}" if entry.removed else "")
        elif value and spelling(name) in usage.entries:
            observed = f"'{flag}' is not a flag: write the value as the next argument, "
            observed += f"{name} {value}"
        else:
            usable = (other for other, one in usage.entries.items() if one.removed is None)
            observed = f"unknown flag {flag}{suggestion(name, usable)}"
        if ok is None:
            observed += ", but --help stopped before its end"
        expected = f"{name} in the server's own --help"
        checks.append(check(f"flag.{name.lstrip('-')}", expected, observed, where, ok=ok))
    if listed:
        expected = "every flag is in the server's own --help"
        checks.insert(0, check("flags", expected, " ".join(listed), where, ok=True))
    return tuple(checks)
