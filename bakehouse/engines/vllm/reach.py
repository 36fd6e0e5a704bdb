"""What each flag of `vllm serve` may reach for: the table, and the rule for flags not in it.

A flag can name a repository of the Hub, a URL, a file or a Python class, and the engine fetches,
reads or imports it when it starts: inputs that no lock pins. What a recipe may name is what its
lock holds, below /weights, and what it mounts itself. Flags and their values as in vLLM 0.32
(`vllm serve --help=all`, its `config/` and `engine/arg_utils.py`); some of older versions as well.
A flag that is not here may have any value that names nothing elsewhere: no URL and no path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["never", "code", "pinned", "image", "named", "words", "free"]
"""never: Bakehouse sets it, or it must not be set. code: its value is Python that is imported.
pinned: a file or folder of the lock, or below a mount. image: the same, or a file of the image
itself, by its absolute path. named: several NAME=PATH, or JSON with a `path`, each pinned. words:
one of a few words, or pinned. free: any text, which names nothing that is opened.
"""


@dataclass(frozen=True)
class Rule:
    """What a flag's value may be; `why` is the hint where it must not be."""

    kind: Kind
    why: str = ""
    words: tuple[str, ...] = ()


_DOWNLOADS = "it downloads what nothing pins; name it under weights"
_CODE = "it runs code that nothing pins; leave it out, or bring it with the image"
_EVIDENCE = "Bakehouse reads the log and the metrics for evidence; leave the flag out"
_TLS = "put TLS in front of the server; leave the flag out"
_MANY = "a recipe serves one engine on one host; leave the flag out"
_REVISION = "set weights.model.revision: the lock pins it"
_TOOLS = "it lets answers call other servers, or run code; leave the flag out"
_REPLACED = "it lets requests put other weights in the place of the pinned ones; leave it out"
_RANDOM = "it accepts drafts at random, whatever the model says: the text is wrong; leave it out"

SAFE_LOADERS = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "sharded_state",
    "runai_streamer", "runai_streamer_sharded", "gguf", "bitsandbytes",
)  # fmt: skip
"""Of load formats, those that read tensors of the model's own folder, and nothing else."""

NEVER: dict[str, str] = {
    "--host": "set serve.host",
    "--port": "set serve.port",
    "--uds": "set serve.host and serve.port",
    "--served-model-name": "the name of the recipe is the model's name",
    "--api-key": "set serve.api_key: a key in an argument list can be read by every user",
    "--root-path": "the API is served from the root; leave the flag out",
    "--model": "give the model as the word behind `serve`: {{ weights.model.path }}",
    "--config": "a file of flags hides what is served; write them in serve.command",
    "--grpc": "what has to be proven is asked over HTTP; leave the flag out",
    **dict.fromkeys(
        ("--disable-log-stats", "--log-config-file", "--logging-config", "--log-level"), _EVIDENCE
    ),
    "--headless": "it serves no API; leave the flag out",
    "--hf-token": "set weights.model.hub; the token stays in the environment",
    "--download-dir": _DOWNLOADS,
    **dict.fromkeys(("--revision", "--code-revision", "--tokenizer-revision"), _REVISION),
    "--tool-server": _TOOLS,
    "--weight-transfer-config": _REPLACED,
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"), _TLS),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr", "--data-parallel-address"), _MANY),
}
"""Flags that Bakehouse sets itself or that take evidence away, and what to do in their place."""

CODE = (
    "--middleware", "--worker-cls", "--worker-extension-cls", "--scheduler-cls",
    "--logits-processors", "--io-processor-plugin", "--model-class-overrides",
)  # fmt: skip
"""Flags whose value is a Python class that is imported."""

FLAGS: dict[str, Rule] = {
    **{flag: Rule("never", why) for flag, why in NEVER.items()},
    **{flag: Rule("code", _CODE) for flag in CODE},
    "--tokenizer": Rule("pinned"),
    "--hf-config-path": Rule("pinned"),
    "--reasoning-parser-plugin": Rule("pinned"),
    "--tool-parser-plugin": Rule("pinned"),
    "--allowed-local-media-path": Rule("pinned"),
    "--mm-encoder-fp8-scale-path": Rule("pinned"),
    "--quantization-param-path": Rule("pinned"),
    "--qlora-adapter-name-or-path": Rule("pinned"),
    "--speculative-model": Rule("pinned"),
    "--default-mm-loras": Rule("pinned"),
    "--lora-modules": Rule("named"),
    "--prompt-adapters": Rule("named"),
    "--chat-template": Rule("image"),
    "--generation-config": Rule("words", words=("auto", "vllm")),
    "--load-format": Rule("words", "serve safetensors", SAFE_LOADERS),
    "--distributed-executor-backend": Rule("words", _CODE, ("mp", "uni", "ray")),
    "--chat-template-content-format": Rule("free"),
    "--default-chat-template-kwargs": Rule("free"),
    "--reasoning-config": Rule("free"),
    "--response-role": Rule("free"),
    "--fingerprint-value": Rule("free"),
    "--ignore-patterns": Rule("free"),
    "--allowed-origins": Rule("free"),
    "--allowed-methods": Rule("free"),
    "--allowed-headers": Rule("free"),
    "--allowed-media-domains": Rule("free"),
    "--disable-access-log-for-endpoints": Rule("free"),
    "--ssl-ciphers": Rule("free"),
    "--otlp-traces-endpoint": Rule("free"),
    # No text, and here because other flags begin like them.
    "--watermark": Rule("free"),
    "--numa-bind": Rule("free"),
}
"""By the long spelling."""

KEYS: dict[str, Rule] = {
    "*.reasoning_parser_plugin": Rule("pinned"),
    "*.kv_connector_module_path": Rule("code", _CODE),
    "*.ec_connector_module_path": Rule("code", _CODE),
    "*.encoder_cache_manager_cls": Rule("code", _CODE),
    "*.inductor_passes": Rule("code", _CODE),
    "*.auto_map": Rule("code", _CODE),
    "*.revision": Rule("never", _REVISION),
    "*.code_revision": Rule("never", _REVISION),
    "*.load_format": Rule("words", "serve safetensors", SAFE_LOADERS),
    "--compilation-config.backend": Rule("words", _CODE, ("", "inductor", "eager")),
    # Its own rule says more: the drafter belongs under weights.drafter.
    "--speculative-config.model": Rule("free"),
    "--speculative-config.rejection_sample_method": Rule("words", _RANDOM, ("standard", "block")),
    "--speculative-config.synthetic_acceptance_rates": Rule("never", _RANDOM),
    "--speculative-config.synthetic_acceptance_length": Rule("never", _RANDOM),
}
"""Keys of JSON values: of one flag, or with `*.` of every flag, however deep they stand."""

ELSEWHERE = Rule("pinned")
"""For whatever is in no table and names a URL or a path."""

LOADERS: dict[str, str] = {
    "dummy": "it fills the model with random numbers",
    "pt": "it unpickles the weights, which runs code that they hold",
    "npcache": "it unpickles the weights, which runs code that they hold",
    "tensorizer": "it takes the model from a place that its own settings name",
    "ipc_cache": "it takes the model from another process",
    "modelexpress": "it takes the model from another server",
}
"""What is known of load formats that are refused."""
