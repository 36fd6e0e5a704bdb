"""The types of a recipe. Strict: an unknown key is an error.

`recipe/load.py` makes these from YAML and names the place of every fault; nothing here reads files.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.fields import (
    Definition,
    InnerPath,
    Name,
    Reference,
    Requirement,
    Sha256,
    Url,
    User,
    Variable,
)
from bakehouse.recipe.gate import Probe, default_suites
from bakehouse.recipe.guard import MemoryGuard
from bakehouse.recipe.memory import Memory
from bakehouse.recipe.patches import Patch
from bakehouse.recipe.scalars import (
    Anything,
    Duration,
    Filled,
    Flag,
    Misplaced,
    Size,
    Text,
    TextOrInteger,
    Version,
    Whole,
)
from bakehouse.recipe.weights import AllWeights

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
        if sum(o is not None for o in (self.pypi, self.url, self.path)) != 1:
            raise Misplaced("give exactly one of pypi, url and path")
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
References = Annotated[dict[Arch, Reference], Field(min_length=1)]
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
    def asked(self) -> Probe:
        """The probe settings, with the default suites if the recipe names none."""
        suites = self.probe.suites or default_suites(
            self.engine,
            speculation=self.serve.speculation not in (None, "none"),
            vision=self.weights.projector is not None,
        )
        return self.probe.model_copy(update={"suites": suites})

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        takes: tuple[str, str] = ("source", "build")
        other: tuple[str, str] = ("image", "container")
        if self.engine == "vllm":
            takes, other = other, takes
        inside = self.build is not None and self.build.where == "docker"
        for key in other[: 1 if inside else 2]:
            if getattr(self, key) is not None:
                wanted = " and ".join(takes)
                raise Misplaced(f"engine {self.engine} takes {wanted}, not {key}", key)
        if getattr(self, takes[0]) is None:
            raise Misplaced(f"engine {self.engine} needs {takes[0]}", "engine")
        return self
