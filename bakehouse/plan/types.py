"""Types of the plan: every step of `build` and `serve`, as plain data.

The digest covers everything that can change the result of a build, and nothing else: not jobs,
caches, ports, run ids or log paths.
"""

from __future__ import annotations

from bakehouse.engines.base import Expected, RequiredCapabilities
from bakehouse.lock import ImagePin
from bakehouse.models import Frozen, digest
from bakehouse.system.docker.models import ContainerSpec

ARTIFACT_RECORD = "build.json"
"""File in the artifact's folder, written last."""


class Step(Frozen):
    """One step. Steps that run no command have an empty `argv`."""

    id: str
    title: str
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    """Added to the allowlisted environment."""
    cwd: str | None = None
    expects: tuple[str, ...] = ()
    """Evidence of success, as text."""


class BuildInputs(Frozen):
    """Everything that can change the bytes of an artifact; its digest is the build digest."""

    rules: int
    """Version of the build rules; incremented when the same inputs would give other bytes."""
    engine: str
    source_tree: str
    stamp: str
    number: int
    date: int
    generator: str
    targets: tuple[str, ...]
    definitions: dict[str, str]
    """CMake definitions as they are passed, prefix maps left out."""
    tools: dict[str, str]
    """Name to identity (version line, target) of every tool that affects output, libc included."""
    cpu: str | None = None
    """The host's CPU, if the build is made for it (GGML_NATIVE)."""
    environment: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Name of the artifact folder."""
        return digest(self)


class BuildPlan(Frozen):
    """How an artifact is built."""

    digest: str
    inputs: BuildInputs
    expected: Expected
    """What the configured build is compared with."""
    steps: tuple[Step, ...]
    work: str
    """The work folder. A second build at the same time takes the next one."""
    artifact: str
    """The folder that the finished artifact is renamed to."""
    server: str
    """Path of the server's binary in the finished artifact."""
    place: str | None = None
    """Where configure and compile see the work folder, if at another path."""
    not_reproducible: str = ""
    """Why two builds of the same inputs may differ; empty if they do not."""

    def bare(self, id: str) -> tuple[str, ...]:  # noqa: A002
        """Give a step's command without the arguments that mount the work folder."""
        argv = self.step(id).argv
        return argv[argv.index("--") + 1 :] if self.place and "--" in argv else argv

    def roots(self) -> tuple[str, ...]:
        """Paths of the source and work folders that tools may print, longest first."""
        folders = [self.work, *([self.place] if self.place else [])]
        return (*(f"{folder}/src" for folder in folders), "../src", *folders)

    def step(self, id: str) -> Step:  # noqa: A002
        """Return a step by its id. Raises KeyError."""
        return {step.id: step for step in self.steps}[id]


class ImagePlan(Frozen):
    """How to pull or build an image, and what it must support."""

    digest: str
    """Covers everything that can change the image's content."""
    image: str
    """The name that it is run by: NAME@sha256:…, an id, or the tag of a built image."""
    arch: str
    pins: dict[str, ImagePin]
    """By role: the images to pull."""
    server: str
    """The engine's command inside the image."""
    dockerfile: str | None = None
    """Text of the Dockerfile, if the image is built."""
    args: dict[str, str] = {}
    labels: dict[str, str] = {}
    asks: RequiredCapabilities | None = None
    """What the image must support; None for an image without vLLM."""
    steps: tuple[Step, ...]
    not_reproducible: str = ""

    @property
    def pin(self) -> ImagePin:
        """The image that is run, or the base of the built one."""
        return self.pins["image"] if "image" in self.pins else self.pins["runtime"]

    def step(self, id: str) -> Step:  # noqa: A002
        """Return a step by its id. Raises KeyError."""
        return {step.id: step for step in self.steps}[id]


class ServePlan(Frozen):
    """How to launch a server, and what it must prove."""

    name: str
    argv: tuple[str, ...]
    late: tuple[int, ...] = ()
    """Indexes in `argv` at which `{nonce}` means the run's nonce; elsewhere it is text."""
    env: dict[str, str]
    host: str
    port: int
    """0 lets the system choose; the port is then read from the server's socket."""
    expects: tuple[str, ...]
    suites: tuple[str, ...]
    container: ContainerSpec | None = None
    """Runs `argv`, if the server is in a container; the image's entrypoint is not used."""

    def command(self, nonce: str) -> tuple[str, ...]:
        """Return the argument list of one run."""
        return tuple(
            text.replace("{nonce}", nonce) if place in self.late else text
            for place, text in enumerate(self.argv)
        )


class Plan(Frozen):
    """The whole plan of a recipe, in order."""

    recipe: str
    lock: str
    """Digest of the lock."""
    fetch: tuple[Step, ...]
    build: BuildPlan | ImagePlan
    serve: ServePlan
