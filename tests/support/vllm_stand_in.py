"""A package named vllm that is small, with a registry that can be asked: for images of tests."""

from __future__ import annotations

from collections.abc import Mapping

REGISTRY = """\
class _Lazy:
    def __init__(self, name):
        self.module_name, self.class_name = f"vllm.models.{name}", name


NAMES = ["LlamaForCausalLM"]


class ModelRegistry:
    models = {name: _Lazy(name) for name in NAMES}

    @classmethod
    def get_supported_archs(cls):
        return cls.models.keys()
"""
MORE = REGISTRY.replace('"LlamaForCausalLM"', '"LlamaForCausalLM", "MuseGlimmerForCausalLM"')
"""The registry with one architecture more, as a branch would have it."""
PATH = "vllm/model_executor/models/registry.py"


def files(version: str, registry: str = REGISTRY) -> Mapping[str, str]:
    """The package's files, by their path below the folder of packages."""
    return {
        "vllm/__init__.py": f"__version__ = '{version}'\n",
        "vllm/_version.py": f"__version__ = version = '{version}'\n",
        "vllm/model_executor/__init__.py": "",
        "vllm/model_executor/models/__init__.py": "",
        PATH: registry,
        "vllm/old.py": "gone = True\n",
    }
