"""A recipe whose engine is a stand-in, a patch for it, and builds that differ by their faults.

As a program: judges a patch with it, with one side's server that never answers.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from bakehouse import cli
from bakehouse.commands import serve
from bakehouse.commands.patch import Case
from bakehouse.context import Context
from bakehouse.errors import BuildFailed
from bakehouse.lock import Lock
from bakehouse.patch_review import overrides
from bakehouse.patches.manifest import Expect
from bakehouse.plan.types import BuildPlan
from bakehouse.recipe.loader import load
from bakehouse.resolver import ensure_lock
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.serving import FAKE

RECIPE = """\
schema: 1
name: tiny
engine: llama.cpp
source:
  archive: {{path: source.tar.gz, sha256: {sha256}, number: 7}}
  patches: [{patches}]
weights:
  model: {{path: model.gguf}}
serve:
  port: 0
  stop_timeout: 2s
  ready_timeout: 20s
  command: "{{{{ server }}}} -m {{{{ weights.model.first }}}}"
probe:
  suites: [facts]
  facts: {{questions: [{{ask: "What is 2+2?", answers: ["4"]}}]}}
"""
PATCH = """\
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1 +1,2 @@
 #
+# fixed
"""
MORE = """\
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,2 +1,3 @@
 #
 # fixed
+# more
"""
RATE = "rate=20"


class Builds:
    """Stands for the build: an artifact is a script that runs the fake engine with its faults."""

    def __init__(self) -> None:
        self.without: Sequence[str] = (RATE,)
        self.patched: Sequence[str] = (RATE,)
        self.broken = False
        self.judged = "fix"
        """The patch that makes the difference."""
        self.made: list[str] = []

    def __call__(self, ctx: Context, lock: Lock, plan: BuildPlan, record: object) -> None:
        patched = any(pin.id == self.judged for pin in lock.patches)
        if patched and self.broken:
            raise BuildFailed("server.cpp:7: expected ';'", where="compile.log:9")
        server = Path(plan.server)
        if not server.exists():
            self.made.append("with" if patched else "without")
        server.parent.mkdir(parents=True, exist_ok=True)
        faults = (*(self.patched if patched else self.without), f"build=b7-{lock.stamp}")
        words = " ".join(f"--fault '{fault}'" for fault in faults)
        server.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S '{FAKE}' \"$@\" {words}\n")
        server.chmod(0o755)


def make_home(folder: Path) -> Path:
    """Write recipe, model, source and patch; give the folder of recipes."""
    recipes = folder / "recipes"
    recipes.mkdir()
    (recipes / "model.gguf").write_bytes(gguf_bytes(llama_metadata(), [f32("a", 8, 4)]))
    with tarfile.open(recipes / "source.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("x/CMakeLists.txt")
        entry.size, entry.mtime = 2, 1_700_000_000
        archive.addfile(entry, io.BytesIO(b"#\n"))
    (recipes / "fix.patch").write_text(PATCH)
    write(recipes)
    return recipes


def write(folder: Path, patches: str = "{file: fix.patch}") -> None:
    sha256 = hashlib.sha256((folder / "source.tar.gz").read_bytes()).hexdigest()
    (folder / "tiny.yaml").write_text(RECIPE.format(sha256=sha256, patches=patches))
    (folder / "tiny.lock.json").unlink(missing_ok=True)


def case(ctx: Context, home: Path, expect: Expect) -> Case:
    loaded = load(home / "tiny.yaml")
    lock = ensure_lock(ctx, loaded)
    (pin,) = lock.patches
    drop = overrides.PatchOverrides(drop=("fix",))
    bare = drop.change(ctx)(loaded)
    return Case(loaded, bare, pin, lock, overrides.ensure(ctx, bare, drop), "fix", expect)


def main() -> int:
    """Judge a patch as the task does; the exit code."""
    home, patch, slow = sys.argv[1:]
    builds = Builds()
    builds.judged = "more"
    faults = (RATE, "chatty", "hangs")
    builds.without, builds.patched = (faults, (RATE,)) if slow == "without" else ((RATE,), faults)
    vars(serve)["ensure_build"] = builds
    flags = {"file": patch, "recipe": "tiny", "judge": True}
    return cli.main("patch", flags, recipes=Path(home))


if __name__ == "__main__":
    sys.exit(main())
