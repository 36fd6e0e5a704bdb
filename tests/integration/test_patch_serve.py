"""Serving recipes with unsound patches; all is real but the engine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.commands import serve
from bakehouse.patches.manifest import Manifest, PatchVerdict, manifest_path, write_manifest
from bakehouse.paths import Places
from bakehouse.resolver import lock_path, read_lock
from bakehouse.server.status import folders, stop
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.filehost import serve_files
from tests.support.serving import write
from tests.support.small_engine import FILES, pack

pytestmark = pytest.mark.integration

DIFF = b"--- a/ggml.c\n+++ b/ggml.c\n@@ -1 +1,2 @@\n+// more\n " + FILES["ggml.c"].encode()
SHA = hashlib.sha256(DIFF).hexdigest()
REPO = "ggml-org/llama.cpp"

Invoke = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipe with patch 7, whose diff lies beside its manifest."""
    monkeypatch.setenv("BAKEHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(serve, "ensure_build", lambda *_: None)
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(gguf_bytes(llama_metadata(), [f32("a", 8, 4)]))
    pack(folder / "source.tar.gz")
    write(folder)
    text = (folder / "tiny.yaml").read_text()
    text = text.replace("number: 7}\n", "number: 7}\n  patches: [{pr: 7}]\n")
    text = text.replace("{{ weights.model.first }}", "{{ weights.model.first }}", 1)
    sha = hashlib.sha256((folder / "source.tar.gz").read_bytes()).hexdigest()[:9]
    (folder / "tiny.yaml").write_text(text.replace(f"build=b7-{sha}", f"build=b7-{sha}-p{SHA[:7]}"))
    known(tmp_path)
    yield tmp_path
    for one in folders(Places.from_environment()):
        stop(one)


def known(root: Path, *verdicts: PatchVerdict, **more: Any) -> None:
    path = manifest_path(root / "patches", REPO, "7")
    path.unlink(missing_ok=True)
    made = Manifest(
        id="7", pr=7, repo=REPO, source="https://example.org/7", status="pinned", sha256=SHA,
        size=len(DIFF), date="2026-11-30T00:00:00Z", vendored="7.diff", verdicts=verdicts, **more,
    )  # fmt: skip
    write_manifest(path, made)
    path.with_suffix(".diff").write_bytes(DIFF)


def verdict(word: str, recipe: str = "tiny", base: str = "b", sha256: str = SHA) -> PatchVerdict:
    return PatchVerdict.model_validate({
        "recipe": recipe, "base": base, "sha256": sha256, "word": word, "date": "2026-11-30",
        "reasons": ("2,661 lines of llama_decode[1]",),
    })  # fmt: skip


@pytest.fixture
def invoke(home: Path, capsys: pytest.CaptureFixture[str]) -> Invoke:
    def call(task: str, **options: Any) -> tuple[int, dict[str, Any], str]:
        code = cli.main(task, options, json=True, recipes=home / "recipes")
        out = capsys.readouterr()
        return code, json.loads(out.out), out.err

    return call


def loss(home: Path, base: str, word: str = "experimental", recipe: str = "tiny") -> None:
    """Let a verdict say that it found a head that fails, and what no verdict can excuse."""
    found = {"losses": ["draft-head-failing", "cuda-error-line", "no-such-signature"]}
    one = verdict(word, recipe=recipe, base=base).model_copy(update={"evidence": found})
    known(home, one)


def served(invoke: Invoke, **options: Any) -> tuple[list[str], dict[str, Any], str]:
    """What is said of unsound patches: in the result, in the record's facts, on standard error."""
    code, said, err = invoke("serve", recipe="tiny", **options)
    assert said["error"] is None
    assert code == 0
    facts = json.loads(Path(said["result"]["record"]).read_text())["facts"]
    invoke("stop", recipe="tiny")
    return said["result"]["unsound_patches"], facts, err


def test_serve_reports_an_experimental_patch_every_time(home: Path, invoke: Invoke) -> None:
    lines, facts, err = served(invoke)
    assert lines == []
    assert "unsound_patches" not in facts
    assert [p["sha256"] for p in facts["patches"]["applied"]] == [SHA]
    lock = read_lock(lock_path(home / "recipes" / "tiny.yaml"))
    assert lock is not None
    known(home, verdict("experimental", base=str(lock.base)))
    for _ in range(2):
        lines, facts, err = served(invoke)
        (line,) = lines
        assert line.startswith(f"EXPERIMENTAL patch {REPO}#7: 2,661 lines of llama_decode[1]")
        assert line in err
        assert facts["unsound_patches"][0]["verdict"]["word"] == "experimental"
    known(home, verdict("clean", base=str(lock.base)), experimental=True)
    assert served(invoke)[0] == [], "measured here, and clean"
    known(home, verdict("experimental", sha256="c" * 64))
    assert served(invoke)[0] == [], "of another diff"
    known(home, verdict("harmful", recipe="other"))
    assert served(invoke)[0][0].startswith("HARMFUL patch")
    known(home, experimental=True, notes="heads past the first\ngo on failing\n\nmore\n")
    (line,) = served(invoke)[0]
    assert "heads past the first go on failing (no verdict with tiny yet)" in line


def test_serve_without_the_patch_reports_nothing(home: Path, invoke: Invoke) -> None:
    known(home, experimental=True)
    recipe = home / "recipes" / "tiny.yaml"
    invoke("lock", recipe="tiny")
    sha = hashlib.sha256((home / "recipes" / "source.tar.gz").read_bytes()).hexdigest()[:9]
    command = "--fault build=b7-" + sha
    text = recipe.read_text().replace(f"{command}-p{SHA[:7]}", command)
    recipe.write_text(text)
    lines, facts, _ = served(invoke, no_patch=["7"])
    assert lines == []
    assert facts["patches"] == {
        "applied": [], "added_for_this_run": [], "left_out_of_this_run": ["7"],
    }  # fmt: skip
    code, said, _ = invoke("serve", recipe="tiny")
    assert code != 0, "the server of the whole recipe is another build"
    assert "build" in {c["id"] for c in said["checks"] if c["verdict"] != "passed"}


def test_watch_restarts_with_the_same_patches(home: Path, invoke: Invoke) -> None:
    invoke("lock", recipe="tiny")
    recipe = home / "recipes" / "tiny.yaml"
    sha = hashlib.sha256((home / "recipes" / "source.tar.gz").read_bytes()).hexdigest()[:9]
    command = "--fault build=b7-" + sha
    recipe.write_text(recipe.read_text().replace(f"{command}-p{SHA[:7]}", command))
    code, said, _ = invoke("serve", recipe="tiny", no_patch=["7"])
    assert code == 0
    os.kill(said["result"]["pid"], signal.SIGKILL)
    code, said, _ = invoke(
        "watch", recipe="tiny", every="1s", count="1", on_failure="restart", no_patch=["7"]
    )
    (one,) = invoke("status", recipe="tiny")[1]["result"]["servers"]
    assert one["status"] == "running", said
    runs = sorted(Places.from_environment().runs.glob("*-serve-tiny-*/record.json"))
    facts = json.loads(runs[-1].read_text())["facts"]["patches"]
    assert len(runs) == 2
    assert facts["left_out_of_this_run"] == ["7"]
    code, said, err = invoke("watch", recipe="tiny", every="1s", count="1")
    assert f"the running server was started without patch {REPO}#7" in err
    code, said, err = invoke("watch", recipe="tiny", every="1s", count="1", no_patch=["7"])
    assert "the running server was started" not in err
    code, said, _ = invoke("watch", url="http://127.0.0.1:1", patch=["7"])
    assert code == 2
    code, said, _ = invoke("watch", recipe="tiny", every="1s", patch=["nope"])
    assert code != 0
    assert "nope" in f"{said['error']['what']} {said['error']['where']}", "before it is needed"


def test_patch_hides_tokens_in_urls(home: Path, invoke: Invoke) -> None:
    for token in ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "hunter2"):
        with serve_files() as files:
            files.put(f"/{token[:3]}.diff?token={token}", DIFF)
            code, said, err = invoke("patch", url=files.at(f"/{token[:3]}.diff?token={token}"))
        assert code == 0
        manifest = manifest_path(home / "patches", REPO, token[:3]).read_text()
        assert token not in json.dumps(said) + manifest + err


def test_serve_expects_a_loss_that_was_judged_and_no_other(home: Path, invoke: Invoke) -> None:
    """A line that the verdict found does not stop the server, and is reported each time."""
    served(invoke)
    path = home / "recipes" / "tiny.yaml"
    lock = read_lock(lock_path(path))
    assert lock is not None
    base, recipe = str(lock.base), path.read_text()

    def grumbling(line: str) -> tuple[int, dict[str, Any]]:
        path.write_text(recipe.replace("--fault build", f"--fault 'grumbles={line}' --fault build"))
        code, said, _ = invoke("serve", recipe="tiny")
        assert invoke("stop", recipe="tiny")[0] == 0
        return code, said

    head = "llama_decode[1] returned -1"
    assert grumbling(head)[0] == 7, "no verdict excuses it"
    loss(home, base, recipe="other")
    assert grumbling(head)[0] == 7, "a verdict on another recipe"
    loss(home, base)
    code, said = grumbling(head)
    assert code == 0, said["error"]
    assert said["result"]["unsound_patches"][0].startswith("EXPERIMENTAL patch")
    assert grumbling("CUDA error: an illegal memory access was encountered")[0] in (7, 8)
    loss(home, base, word="harmful")
    assert grumbling(head)[0] == 7, "what harms is not excused"
