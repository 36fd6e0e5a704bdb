"""The command of `vllm serve`: its parser, and which flags and variables are refused. Pure.

A flag can name a repository of the Hub, a URL, a file or a Python class, and the engine fetches,
reads or imports it when it starts: inputs that no lock pins. A recipe may name the files of its
lock, below /weights, and what it mounts itself. `NEVER` and `FLAGS` say so for each flag, `KEYS`
for keys of JSON values, `REFUSED_VARIABLES` and `IMAGE_VARIABLES` for variables; `check_flags` and
`check_variables` apply them. A flag that is not listed may have any value except a URL or a path; a
variable that is not listed may be set.

Flags and their values as in vLLM 0.32 (`vllm serve --help=all`, `config/`, `engine/arg_utils.py`,
`utils/argparse_utils.py`), some of older versions as well: `_` and `-` are the same in a flag,
`--flag=value` and `--flag value` as well, a JSON option may be written key by key
(`--speculative-config.method ngram`), and the last of two wins. Variables as read by vLLM 0.32
(`vllm/envs.py`), Transformers, huggingface_hub, torch, Python and the dynamic linker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from bakehouse.lock import Lock
from bakehouse.recipe.models import Recipe

SHORT = {
    "-sc": "--speculative-config", "-q": "--quantization", "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size", "-ep": "--enable-expert-parallel",
    "-cc": "--compilation-config", "-ac": "--attention-config", "-dc": "--diffusion-config",
    "-n": "--nnodes", "-r": "--node-rank", "-asc": "--api-server-count",
    "-dp": "--data-parallel-size", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address", "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend", "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb", "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--spec-method": "--speculative-config.method", "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}  # fmt: skip
"""Other spellings of a flag."""
SPECULATION = "--speculative-config"
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w.-]*")
_WHOLE = re.compile(r"(\d{1,12})(?:\.0)?([kKmMgG]?)")
_FACTORS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


@dataclass(frozen=True)
class Command:
    """A parsed `vllm serve` command."""

    program: tuple[str, ...]
    """The words before the first flag and the model: `vllm serve`."""
    model: str | None
    """The first word that belongs to no flag."""
    extra: tuple[str, ...]
    """More such words, which vLLM does not accept."""
    flags: Mapping[str, tuple[str, ...]]
    """By long spelling: the words that follow; the last one wins."""
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """The speculative settings; empty for none."""
    bad_json: str | None = None
    """Why the speculative settings are invalid."""

    def text(self, name: str) -> str | None:
        """Return the first value of a flag."""
        return next(iter(self.flags.get(name, ())), None)

    def number(self, name: str) -> int | None:
        """Return a whole number, as vLLM reads `8192`, `8k` (1000) and `8K` (1024)."""
        found = _WHOLE.fullmatch(self.text(name) or "")
        return int(found[1]) * _FACTORS[found[2]] if found else None

    @property
    def method(self) -> str | None:
        """The speculative method, if the command names one."""
        value = self.speculation.get("method")
        return value if isinstance(value, str) and value else None

    @property
    def drafter(self) -> str | None:
        """The drafter's model, if the command names one."""
        value = self.speculation.get("model")
        return value if isinstance(value, str) and value not in ("", "ngram", "[ngram]") else None

    @property
    def draft_tokens(self) -> int | None:
        """Number of tokens drafted at once."""
        value = self.speculation.get("num_speculative_tokens")
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def spelling(argument: str) -> str:
    """Return a flag's long spelling: without `=value`, and `_` as `-` in its first part."""
    name = argument.partition("=")[0]
    head, dot, rest = name.partition(".")
    head = head.replace("_", "-") if head.startswith("--") else head
    return SHORT.get(f"{head}{dot}{rest}", f"{SHORT.get(head, head)}{dot}{rest}")


def parse(argv: Sequence[str]) -> Command:
    """Parse a command; never raises: the engine's `refuse` reports what is wrong."""
    begin = 2 if list(argv[1:2]) == ["serve"] else 1
    flags: dict[str, tuple[str, ...]] = {}
    alone: list[str] = []
    current: str | None = None
    for word in argv[begin:]:
        if _FLAG.match(word):
            flag, (_, equals, value) = spelling(word), word.partition("=")
            flags[flag] = (value,) if equals else ()
            current = None if equals else flag
        elif current is not None:
            flags[current] += (word,)
            current = current if current in SEVERAL else None
        else:
            alone.append(word)
    model = alone[0] if alone else None
    return Command(tuple(argv[:begin]), model, tuple(alone[1:]), flags, *_speculation(flags))


def shortened(flag: str, judged: Iterable[str]) -> str | None:
    """Return the flag among `judged` that `flag` abbreviates; None for a whole flag.

    vLLM's parser takes every unambiguous beginning (`--trust-remote`), and a value without a space
    after a letter (`-n2`). `flag` is spelled as in `Command.flags`.
    """
    head = flag.partition(".")[0]
    whole = (one.partition(".")[0] for one in SHORT.values())
    known = sorted({*judged, *SHORT, *whole, *SEVERAL})
    if head in known:
        return None
    glued = [long for short, long in SHORT.items() if len(short) == 2 and head.startswith(short)]
    return next((one for one in (*known, *glued) if one.startswith(head) or one in glued), None)


SEVERAL = frozenset({
    "--served-model-name", "--lora-modules", "--middleware", "--api-key", "--prompt-adapters",
    "--allowed-media-domains", "--sleep-preserve-parameter-names", "--logits-processors",
    "--ignore-patterns", "--numa-bind-nodes", "--numa-bind-cpus", "--kv-cache-dtype-skip-layers",
    "--cpu-offload-params", "--offload-params", "--lora-target-modules",
    "--collect-detailed-traces", "--cudagraph-capture-sizes",
})  # fmt: skip
"""Flags that take all words up to the next flag."""


def _speculation(flags: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Any], str | None]:
    found: Any = {}
    if (whole := flags.get(SPECULATION)) is not None:
        try:
            found = json.loads(whole[0]) if whole else None
        except ValueError as error:
            return {}, f"invalid JSON: {error}"
        if not isinstance(found, dict):
            return {}, "not a JSON object"
    for name, values in flags.items():
        if name.startswith(f"{SPECULATION}."):
            key, text = name.removeprefix(f"{SPECULATION}."), values[0] if values else ""
            found[key.replace("-", "_")] = int(text) if text.isdecimal() else text
    return found, None


Kind = Literal["never", "pinned", "image", "named", "words", "free"]
"""never: Bakehouse sets it, or it must not be set. pinned: a file or folder of the lock, or below a
mount. image: the same, or a file of the image by its absolute path. named: several NAME=PATH, or
JSON with a `path`, each pinned. words: one of a few words, or pinned. free: any text, which names
nothing that is opened.
"""
Problem = tuple[str, str]
"""A message and a hint."""


@dataclass(frozen=True)
class Rule:
    """What a flag's value may be; `why` is the hint if it is refused."""

    kind: Kind
    why: str = ""
    words: tuple[str, ...] = ()


_DOWNLOADS = "it downloads files that are not pinned; list them under weights"
_CODE = "it runs code that is not pinned; remove it, or add the code to the image"
_EVIDENCE = "Bakehouse needs the log and the metrics for its checks; remove it"
_TLS = "use a TLS proxy in front of the server; remove the flag"
_MANY = "a recipe runs one engine on one host; remove the flag"
_REVISION = "set weights.model.revision: the lock pins it"
_TOOLS = "it lets the model call other servers or run code; remove it"
_REPLACED = "it lets requests replace the pinned weights; remove it"
_RANDOM = "it accepts draft tokens at random, so the text is wrong; remove it"

SAFE_LOADERS = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "sharded_state",
    "runai_streamer", "runai_streamer_sharded", "gguf", "bitsandbytes",
)  # fmt: skip
"""Load formats that read tensors from the model's own folder only."""

NEVER: dict[str, str] = {
    "--host": "set serve.host",
    "--port": "set serve.port",
    "--uds": "set serve.host and serve.port",
    "--served-model-name": "the model is served under the recipe's name",
    "--api-key": "set serve.api_key: every user can read an argument list",
    "--root-path": "the API has to be at the root; remove the flag",
    "--model": "name the model after `serve`: {{ weights.model.path }}",
    "--config": "write the flags in serve.command, where Bakehouse can check them",
    "--grpc": "Bakehouse checks the server over HTTP; remove the flag",
    **dict.fromkeys(
        ("--disable-log-stats", "--log-config-file", "--logging-config", "--log-level"), _EVIDENCE
    ),
    "--headless": "it serves no API; remove the flag",
    "--hf-token": "set weights.model.hub; the token stays in the environment",
    "--download-dir": _DOWNLOADS,
    **dict.fromkeys(("--revision", "--code-revision", "--tokenizer-revision"), _REVISION),
    "--tool-server": _TOOLS,
    "--weight-transfer-config": _REPLACED,
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"), _TLS),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr", "--data-parallel-address"), _MANY),
    **dict.fromkeys(
        ("--middleware", "--worker-cls", "--worker-extension-cls", "--scheduler-cls",
         "--logits-processors", "--io-processor-plugin", "--model-class-overrides"), _CODE,
    ),
}  # fmt: skip
"""Flags that must not be set, and what to do instead: Bakehouse sets them, they hide evidence, or
their value is a Python class that is imported.
"""

FLAGS: dict[str, Rule] = {
    **{flag: Rule("never", why) for flag, why in NEVER.items()},
    **dict.fromkeys((
        "--tokenizer", "--hf-config-path", "--reasoning-parser-plugin", "--tool-parser-plugin",
        "--allowed-local-media-path", "--mm-encoder-fp8-scale-path", "--quantization-param-path",
        "--qlora-adapter-name-or-path", "--speculative-model", "--default-mm-loras",
    ), Rule("pinned")),
    "--lora-modules": Rule("named"),
    "--prompt-adapters": Rule("named"),
    "--chat-template": Rule("image"),
    "--generation-config": Rule("words", words=("auto", "vllm")),
    "--load-format": Rule("words", "serve safetensors", SAFE_LOADERS),
    "--distributed-executor-backend": Rule("words", _CODE, ("mp", "uni", "ray")),
    **dict.fromkeys((
        "--chat-template-content-format", "--default-chat-template-kwargs", "--reasoning-config",
        "--response-role", "--fingerprint-value", "--ignore-patterns", "--allowed-origins",
        "--allowed-methods", "--allowed-headers", "--allowed-media-domains",
        "--disable-access-log-for-endpoints", "--ssl-ciphers", "--otlp-traces-endpoint",
        "--watermark", "--numa-bind",
    ), Rule("free")),
}  # fmt: skip
"""By the long spelling. `--watermark` and `--numa-bind` take no text, but other flags begin so."""

KEYS: dict[str, Rule] = {
    "*.reasoning_parser_plugin": Rule("pinned"),
    "*.kv_connector_module_path": Rule("never", _CODE),
    "*.ec_connector_module_path": Rule("never", _CODE),
    "*.encoder_cache_manager_cls": Rule("never", _CODE),
    "*.inductor_passes": Rule("never", _CODE),
    "*.auto_map": Rule("never", _CODE),
    "*.revision": Rule("never", _REVISION),
    "*.code_revision": Rule("never", _REVISION),
    "*.load_format": Rule("words", "serve safetensors", SAFE_LOADERS),
    "--compilation-config.backend": Rule("words", _CODE, ("", "inductor", "eager")),
    # Checked by the engine, with a better hint: the drafter belongs under weights.drafter.
    "--speculative-config.model": Rule("free"),
    "--speculative-config.rejection_sample_method": Rule("words", _RANDOM, ("standard", "block")),
    "--speculative-config.synthetic_acceptance_rates": Rule("never", _RANDOM),
    "--speculative-config.synthetic_acceptance_length": Rule("never", _RANDOM),
}
"""Keys of JSON values: of one flag, or with `*.` of every flag at any depth."""

ELSEWHERE = Rule("pinned")
"""For values of other flags that name a URL or a path."""

LOADERS: dict[str, str] = {
    "dummy": "it fills the model with random numbers",
    "pt": "it unpickles the weights, which runs code in them",
    "npcache": "it unpickles the weights, which runs code in them",
    "tensorizer": "it takes the model from a place in its own settings",
    "ipc_cache": "it takes the model from another process",
    "modelexpress": "it takes the model from another server",
}
"""Refused load formats, and why."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Nothing may be fetched inside the container. These win over the image and the recipe."""
ENVIRONMENT = {**OFFLINE, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Set in every container, unless the recipe says otherwise."""

_FETCHES = "files that the container fetches itself are not pinned; remove it"
_IMAGE_CODE = "it runs code that is not pinned; add it with image.mods, and use its path there"
_TOKENS = "the container needs no tokens: everything is fetched before it starts"
_ADAPTERS = "it loads adapters that are not pinned; name them with --lora-modules"
_FAKE = "it makes results up; remove it"
_PYTHON = "it changes which Python code runs; remove it"

REFUSED_VARIABLES: dict[str, str] = {
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"), _TOKENS),
    **dict.fromkeys(("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "S3_ENDPOINT_URL"), _FETCHES),
    **dict.fromkeys(("HF_ENDPOINT", "HF_INFERENCE_ENDPOINT", "VLLM_USE_MODELSCOPE"), _FETCHES),
    "VLLM_MODEL_REDIRECT_PATH": "it replaces the model that the command names",
    "VLLM_API_KEY": "set serve.api_key",
    "VLLM_PORT": "set serve.port",
    "VLLM_CONFIGURE_LOGGING": _EVIDENCE,
    "VLLM_LOGGING_CONFIG_PATH": _EVIDENCE,
    "VLLM_LOGGING_LEVEL": _EVIDENCE,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "a server must end with its engine; remove it",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "answers would not show which model is served; remove it",
    "VLLM_PLUGINS": "the image decides which of its plugins run; remove it, or leave it empty",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "it lets requests load adapters; remove it",
    "VLLM_LORA_RESOLVER_CACHE_DIR": _ADAPTERS,
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": _ADAPTERS,
    "VLLM_RUST_FRONTEND_PATH": _IMAGE_CODE,
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": _TOOLS,
    "VLLM_SERVER_DEV_MODE": "it opens endpoints that change the server; remove it",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "it lets requests run code; remove it",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "it lets loaded files run code; remove it",
    "VLLM_TEST_FORCE_LOAD_FORMAT": _FAKE,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": _FAKE,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "answers are nonsense beyond the model's own length; "
    "lower --max-model-len",
    "PYTHONOPTIMIZE": "it disables the engine's assertions: a crash becomes a wrong answer",
    **dict.fromkeys(
        ("PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONEXECUTABLE", "PYTHONINSPECT",
         "PYTHONBREAKPOINT", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX"), _PYTHON,
    ),
}  # fmt: skip
"""Variables that must not be set, and why; an empty value counts as not set."""

IMAGE_VARIABLES = (
    "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "PYTHONPATH", "PATH", "VLLM_NCCL_SO_PATH",
    "VLLM_CUDART_SO_PATH", "VLLM_CUDA_COMPATIBILITY_PATH", "VLLM_NCCL_INCLUDE_PATH",
    "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_INJECTION64_PATH",
)  # fmt: skip
"""Paths of libraries, programs and Python code: each must be a file of the image."""

_SECRET = re.compile(r"(?i)(?:^|_)(?:token|secret|password|api_?key|access_?key(?:_id)?)$")

WEIGHTS = "/weights"
"""Folder of each role's pinned files inside the container: `/weights/model` and so on."""
_HINT = (
    "name a file or folder of the weights, such as {{ weights.model.path }}/NAME, or one below a "
    "mount of container.volumes"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_MAX_DEPTH = 8


class Pinned:
    """Paths in a recipe's container that may be named."""

    def __init__(self, recipe: Recipe, lock: Lock | None = None) -> None:
        self._roles = {role for role, _ in recipe.weights.items()}
        self._lock = lock
        volumes = recipe.container.volumes if recipe.container else ()
        targets = (text.split(":")[1] for text in volumes if ":" in text)
        self._mounts = [_parts(target) for target in targets if target.startswith("/")]

    def weights(self, path: str, role: str | None = None) -> bool:
        """Whether a path is one of a role's pinned files, or a folder above one."""
        parts = _parts(path)
        if parts[:2] != ("/", WEIGHTS[1:]) or len(parts) < 3 or role not in (None, parts[2]):
            return False
        if self._lock is None or parts[2] not in self._lock.weights:
            return parts[2] in self._roles
        inner = "/".join(parts[3:])
        files = (file.path for file in self._lock.weights[parts[2]].files)
        return not inner or any(f == inner or f.startswith(f"{inner}/") for f in files)

    def mounted(self, path: str) -> bool:
        """Whether a path is, or is below, one of the recipe's mounts."""
        parts = _parts(path)
        return any(parts[: len(mount)] == mount for mount in self._mounts)

    def image(self, path: str) -> bool:
        """Whether a path belongs to the image: absolute, and not below a mount."""
        parts = _parts(path)
        return parts[:1] == ("/",) and parts[1:2] != (WEIGHTS[1:],) and not self.mounted(path)


def _parts(path: str) -> tuple[str, ...]:
    """Parts of an absolute path; empty for a relative one, or one with `..`."""
    parts = PurePosixPath(path).parts
    rooted = path.startswith("/") and not path.startswith("//") and ".." not in parts
    return parts if rooted and "\0" not in path else ()


def check_variables(variables: Mapping[str, str], pinned: Pinned) -> Iterator[tuple[str, Problem]]:
    """Check a container's variables: each refused name, with message and hint."""
    for name, value in variables.items():
        if name in OFFLINE:
            if value != OFFLINE[name]:
                yield name, (f"sets {name} to {value}", _FETCHES)
        elif not value:
            continue
        elif hint := REFUSED_VARIABLES.get(name):
            yield name, (f"must not set {name}", hint)
        elif _SECRET.search(name):
            yield name, (f"must not set {name}", _TOKENS)
        elif name in IMAGE_VARIABLES:
            for part in re.split(r"[:\s]" if name == "LD_PRELOAD" else ":", value):
                if not pinned.image(part):
                    shown = f"'{part}'" if part else "an empty path (the working folder)"
                    yield name, (f"names {shown} in {name}: not a file of the image", _IMAGE_CODE)
                    break


def check_flags(command: Command, pinned: Pinned) -> Iterator[Problem]:
    """Check a command's flags: message and hint for each that must not be set as it is."""
    for flag, words in command.flags.items():
        head, dot, key = flag.partition(".")
        rule = FLAGS.get(head, ELSEWHERE)
        if rule.kind == "never":
            yield f"serve.command must not set {flag}", rule.why
            continue
        above = tuple(key.split(".")) if dot else ()
        for word in words:
            named = rule.kind == "named" and not word.startswith(("{", "["))
            document: Any = word.partition("=")[2] if named else word  # NAME=PATH, text or JSON
            if document.lstrip().startswith(("{", "[")):
                with suppress(ValueError, RecursionError):
                    document = json.loads(document)
            refused: set[str] = set()
            for keys, value in _leaves(document, above):
                inner, place = _rule_of(head, keys, rule)
                if inner.kind == "never" and place not in refused:
                    refused.add(place)
                    yield f"serve.command must not set {place}", inner.why
                elif inner.kind != "never" and isinstance(value, str):
                    yield from _check_text(".".join((head, *keys)), keys, value, inner, pinned)


def _check_text(
    name: str, keys: Sequence[str], text: str, rule: Rule, pinned: Pinned
) -> Iterator[Problem]:
    not_a_path = rule.kind == "named" and keys and keys[-1] != "path"
    if rule.kind == "free" or not_a_path or not (text or rule.words):
        return
    if text in rule.words or pinned.weights(text) or pinned.mounted(text):
        return
    if rule.kind == "words":
        takes = ", ".join(word for word in rule.words if word)
        why = LOADERS.get(text, f"use {takes}" + ("" if rule.why else ", or a pinned path"))
        yield f"{name} {text}: {why}", rule.why or _HINT
        return
    # A template may be given as text instead of a path.
    of_image = rule.kind == "image" and (pinned.image(text) or "{" in text)
    # A URL, a path, or OWNER/NAME.
    plain = rule is ELSEWHERE and not (_URL.search(text) or "/" in text or text.startswith("~"))
    if not (of_image or plain):
        yield f"{name} names '{text}', which is not pinned", _HINT


def _leaves(value: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every innermost value of a JSON document, with the keys that lead to it."""
    if isinstance(value, dict) and value and len(above) < _MAX_DEPTH:
        for key, inner in value.items():
            yield from _leaves(inner, (*above, key))
    elif isinstance(value, list) and value and len(above) < _MAX_DEPTH:
        for inner in value:
            yield from _leaves(inner, above)
    else:
        yield above, json.dumps(value) if isinstance(value, dict | list) else value


def _rule_of(flag: str, keys: Sequence[str], rule: Rule) -> tuple[Rule, str]:
    """The rule of the innermost key that has one, else the flag's, and the place it is for."""
    for count in range(len(keys), 0, -1) if rule.kind != "free" else ():
        place = ".".join(keys[:count])
        name = place.replace("-", "_")
        found = KEYS.get(f"{flag}.{name}") or KEYS.get(f"*.{name.rpartition('.')[2]}")
        if found:
            return found, f"{flag}.{place}"
    return rule, flag
