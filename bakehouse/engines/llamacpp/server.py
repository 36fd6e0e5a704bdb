"""What readiness adds to a llama-server command, what it refuses there, what the command asks for.

Flags as in llama.cpp build 11434 (`common/arg.cpp`): a flag takes its value as the next argument,
`_` and `-` are the same inside a long flag, and the last of two wins, so a second `--port` would
silently move the server away from where it is proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bakehouse.engines.engine import NONCE_ALIAS, Asked
from bakehouse.errors import RecipeError
from bakehouse.lock import Lock
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe

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
"""Flags that a recipe's command must not hold, and what to do in place of each."""

FREE_TEXT = frozenset(
    {"--chat-template", "--chat-template-kwargs", "--grammar", "-j", "--json-schema", "--tags",
     "-r", "--reverse-prompt", "--reasoning-budget-message", "--dry-sequence-breaker"}
)  # fmt: skip
"""Flags whose next argument is text of any form, also of the form of a flag."""

REFUSED_ENVIRONMENT = ("LLAMA_", "AIP_", "HF_")
"""Prefixes of variables that llama-server takes as flags, or that name tokens."""

LEVEL = ("-lv", "--verbosity", "--log-verbosity")
EVIDENCE_LEVEL = 4
"""The first level of the log that tells of layers on the GPU and of the attention used."""
VERBOSITY = (*LEVEL, "-v", "--verbose", "--log-verbose")


def spelling(argument: str) -> str:
    """Give a flag as the engine reads it: without `=value`, `_` as `-` in a long one."""
    flag = argument.partition("=")[0] if argument.startswith("-") else argument
    return flag.replace("_", "-") if flag.startswith("--") else flag


def flags(argv: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Give each flag of a command, as `spelling` gives it, with the argument that follows it.

    `argv[0]` is the program. A value that looks like a flag is read as one, save after a flag that
    takes free text: being too strict costs a clear error, being too lax a server that is elsewhere.
    """
    found: list[tuple[str, str | None]] = []
    after_text = False
    for index, argument in enumerate(argv[1:], start=1):
        if after_text or not argument.startswith("-") or argument == "-":
            after_text = False
            continue
        flag = spelling(argument)
        if "=" in argument:
            found.append((flag, argument.partition("=")[2]))
            continue
        found.append((flag, argv[index + 1] if index + 1 < len(argv) else None))
        after_text = flag in FREE_TEXT
    return tuple(found)


def refuse(command: Sequence[str], recipe: Recipe, origin: Origin) -> None:
    """Raise RecipeError, exit 2, for flags and variables that Bakehouse sets itself."""
    given = flags(command)
    faults = [
        origin.fault(f"serve.command must not hold {flag}", OWNED[flag])
        for flag in dict.fromkeys(flag for flag, _ in given if flag in OWNED)
    ]
    faults += [
        origin.fault(
            f"serve.env must not hold {name}",
            "llama-server reads it in place of a flag, or as a token; write the flag in "
            "serve.command, where it can be seen",
        )
        for name in recipe.serve.env
        if name.startswith(REFUSED_ENVIRONMENT)
    ]
    faults += [
        origin.fault(
            f"serve.command lowers {flag} to {value}",
            f"Bakehouse reads the log for evidence; {EVIDENCE_LEVEL} or more, or leave it out",
        )
        for flag, value in given
        if flag in LEVEL and value and value.lstrip("-").isdigit() and int(value) < EVIDENCE_LEVEL
    ]
    if not any(flag in {"-m", "--model"} and value for flag, value in given):
        faults.append(
            origin.fault(
                "serve.command names no model",
                "add -m {{ weights.model.first }}; without it llama-server starts as a router "
                "that answers 200 with nothing loaded",
            )
        )
    if faults:
        raise RecipeError("the command sets what Bakehouse has to set itself", faults)


def additions(
    command: Sequence[str], *, name: str, host: str, port: int, slots: int, key_file: str | None
) -> tuple[tuple[str, ...], int]:
    """Give the arguments that readiness needs and the index, among them, of the alias.

    In the alias `{nonce}` stands where the nonce of the run will be. The engine keeps its aliases
    sorted and shows the first as the model's id: `~` sorts behind every name.
    """
    added = [
        "--alias", f"{name},{NONCE_ALIAS}{{nonce}}",
        "--host", host,
        "--port", str(port),
        "--parallel", str(slots),
        "--metrics",
        "--slots",
    ]  # fmt: skip
    if not any(flag in VERBOSITY for flag, _ in flags(command)):
        added += ["--verbosity", str(EVIDENCE_LEVEL)]
    if key_file:
        added += ["--api-key-file", key_file]
    return tuple(added), 1


class Features(Asked):
    """What a llama-server has to be, so that it is the one that the recipe asks for.

    The context counts over all slots.
    """

    build_info: str | None = None
    slots: int = 1
    chat: bool = False
    multimodal: bool = False
    speculation_lacks: str | None = None
    """What the command lacks, where the engine would then serve without speculating."""
    gpu_layers: int | None = None
    """At least so many layers on the GPU, or all of the model's where it has fewer."""
    cpu: bool = False
    """No layer on the GPU is what the recipe asks for."""
    flash_attn: str | None = None
    """`on` or `off`."""


def features(recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str) -> Features:
    """Derive what to expect, from the recipe's keys and from the command itself, which is wider."""
    given = {flag: value for flag, value in flags(command) if value is not None}
    questions = recipe.probe.facts.questions
    spec = speculation(recipe, given)
    attention = recipe.serve.flash_attn or given.get("-fa") or given.get("--flash-attn")
    return Features(
        name=recipe.name,
        model_path=model_path,
        build_info=f"b{lock.build_number}-{lock.stamp}" if lock.stamp else None,
        slots=recipe.serve.slots,
        context=recipe.serve.context or _whole(given, "-c", "--ctx-size"),
        chat=questions is None or any(q.mode == "chat" for q in questions),
        multimodal=recipe.weights.projector is not None,
        speculation=spec,
        speculation_lacks=_lacks(spec, given) if spec else None,
        gpu_layers=_layers(recipe, given),
        cpu=_on_the_cpu(recipe, given),
        flash_attn=attention if attention in {"on", "off"} else None,
        key=recipe.serve.api_key is not None,
    )


DRAFT_FLAGS = frozenset({"-md", "--model-draft", "--spec-draft-model"})
WITH_DRAFTER = frozenset({"draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"})
"""Modes that draft with a model in a file of its own."""


def speculation(recipe: Recipe, given: Mapping[str, str]) -> str | None:
    """Give the speculation that a recipe or its command asks for; None for none."""
    spec = recipe.serve.speculation or given.get("--spec-type")
    if not spec and given.keys() & DRAFT_FLAGS:
        spec = "draft"
    return None if not spec or all(part == "none" for part in spec.split(",")) else spec


def _lacks(spec: str, given: Mapping[str, str]) -> str | None:
    """Say what a command lacks; a drafter's file may name its own mode, so this is no refusal."""
    drafter = bool(given.keys() & DRAFT_FLAGS)
    if drafter and "--spec-type" not in given:
        return "-md without --spec-type serves without speculating; add --spec-type draft-simple"
    modes = sorted(WITH_DRAFTER & set(spec.split(",")))
    if modes and not drafter:
        return f"{modes[0]} without -md serves without speculating; add -md and the drafter's file"
    if "--spec-type" not in given:
        return f"serve.speculation is {spec}, and the command holds no --spec-type"
    return None


def _whole(given: dict[str, str], *names: str) -> int | None:
    """Read a positive whole number; 0 and anything else asks for nothing that can be judged."""
    for name in names:
        if (value := given.get(name, "")).isdigit():
            return int(value) or None
    return None


GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")


def _layers(recipe: Recipe, given: dict[str, str]) -> int | None:
    if recipe.serve.gpu_layers is not None:
        return recipe.serve.gpu_layers or None
    if any(given.get(name) == "all" for name in GPU_LAYERS):
        return 10**6
    return _whole(given, *GPU_LAYERS)


def _on_the_cpu(recipe: Recipe, given: dict[str, str]) -> bool:
    if recipe.serve.gpu_layers is not None:
        return recipe.serve.gpu_layers == 0
    return any(given.get(name) == "0" for name in GPU_LAYERS)


def expectations(asked: Features) -> tuple[str, ...]:
    """Say in words what readiness will ask of the server."""
    said = [
        "the nonce of the run comes back in /v1/models, from our child's own socket",
        '/health answers 200 {"status": "ok"}, before the probe and after it',
        f"/v1/models names {asked.name}",
        f"/props shows model_path {asked.model_path}",
        f"/slots shows {asked.slots} slots",
    ]
    if asked.build_info:
        said.append(f"/props shows build_info {asked.build_info}")
    if asked.context:
        said.append(f"/slots shows {asked.context} tokens of context or more")
    if asked.chat:
        said.append("/props shows a chat template")
    if asked.multimodal:
        said.append("/v1/models shows the capability multimodal")
    if asked.speculation:
        said.append(f"/slots shows speculation on ({asked.speculation})")
    if asked.gpu_layers:
        said.append(f"the log shows {asked.gpu_layers} layers, or all, on the GPU")
    if asked.flash_attn:
        said.append(f"the log shows flash attention {asked.flash_attn}")
    said.append("no log line carries a fatal or a silent fault")
    return tuple(said)
