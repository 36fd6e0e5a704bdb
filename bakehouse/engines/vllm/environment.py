"""What a recipe's environment may set in vLLM's container: the table of variables. Pure.

As read by vLLM 0.32 (`vllm/envs.py`), Transformers and huggingface_hub, torch, Python and the
dynamic linker. A variable that is not here may be set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from bakehouse.engines.vllm.reached import Found, Pinned

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""What was not fetched and pinned before must not be fetched inside. These win over the image."""
ENVIRONMENT = {**OFFLINE, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""What every container gets."""

_EVIDENCE = "Bakehouse reads the log and the metrics for evidence; leave it out"
_FETCHES = "what is fetched inside the container is pinned by nothing; leave it out"
_CODE = "it runs code that nothing pins; bring it with the image, by image.mods, and name it there"
_TOKENS = "tokens stay outside: everything is fetched before the container starts"
_ADAPTERS = "it brings in adapters that nothing pins; name them with --lora-modules"
_DREAMS = "it makes up results; leave it out"
_PYTHON = "it changes which Python runs, or what it runs first; leave it out"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"), _TOKENS),
    **dict.fromkeys(("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "S3_ENDPOINT_URL"), _FETCHES),
    **dict.fromkeys(("HF_ENDPOINT", "HF_INFERENCE_ENDPOINT", "VLLM_USE_MODELSCOPE"), _FETCHES),
    "VLLM_MODEL_REDIRECT_PATH": "it puts other models in the place of the one that is named",
    "VLLM_API_KEY": "set serve.api_key",
    "VLLM_PORT": "set serve.port",
    "VLLM_CONFIGURE_LOGGING": _EVIDENCE,
    "VLLM_LOGGING_CONFIG_PATH": _EVIDENCE,
    "VLLM_LOGGING_LEVEL": _EVIDENCE,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "a server whose engine died has to be seen to; leave it out",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "answers would no longer tell which model is served",
    "VLLM_PLUGINS": "which code of the image runs is the image's own; leave it out, or empty",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "it lets requests bring in adapters; leave it out",
    "VLLM_LORA_RESOLVER_CACHE_DIR": _ADAPTERS,
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": _ADAPTERS,
    "VLLM_RUST_FRONTEND_PATH": _CODE,
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "it lets answers call other servers; leave it out",
    "VLLM_SERVER_DEV_MODE": "it opens endpoints that change the server; leave it out",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "it lets requests run code; leave it out",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "it lets files that are loaded run code; leave it out",
    "VLLM_TEST_FORCE_LOAD_FORMAT": _DREAMS,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": _DREAMS,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "beyond the model's own length answers are nonsense; "
    "lower --max-model-len",
    "PYTHONOPTIMIZE": "it takes the engine's own assertions away: a crash becomes a wrong answer",
    **dict.fromkeys(
        ("PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONEXECUTABLE", "PYTHONINSPECT",
         "PYTHONBREAKPOINT", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX"), _PYTHON,
    ),
}  # fmt: skip
"""Names that must not be set to anything, and why; an empty value is as good as none."""

OF_THE_IMAGE = (
    "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "PYTHONPATH", "PATH", "VLLM_NCCL_SO_PATH",
    "VLLM_CUDART_SO_PATH", "VLLM_CUDA_COMPATIBILITY_PATH", "VLLM_NCCL_INCLUDE_PATH",
    "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_INJECTION64_PATH",
)  # fmt: skip
"""Name libraries, programs and Python that run: each has to be the image's own, by its path."""

_SECRET = re.compile(r"(?i)(?:^|_)(?:token|secret|password|api_?key|access_?key(?:_id)?)$")


def judge(given: Mapping[str, str], there: Pinned) -> Iterator[tuple[str, Found]]:
    """Give each variable that must not be set as it is: its name, what is wrong, and the mend."""
    for name, value in given.items():
        if name in OFFLINE:
            if value != OFFLINE[name]:
                yield name, (f"sets {name} to {value}", _FETCHES)
        elif not value:
            continue
        elif hint := REFUSED.get(name):
            yield name, (f"must not hold {name}", hint)
        elif _SECRET.search(name):
            yield name, (f"must not hold {name}", _TOKENS)
        elif name in OF_THE_IMAGE:
            for part in re.split(r"[:\s]" if name == "LD_PRELOAD" else ":", value):
                if not there.image(part):
                    seen = f"'{part}'" if part else "an empty path, which is the working folder"
                    yield name, (f"names in {name} {seen}, which is no file of the image", _CODE)
                    break
