"""What the real llama-server, git and CMake print when they fail gets its right verdict."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from bakehouse.logscan.findings import Finding, exit_code
from bakehouse.logscan.scanner import scan


def _findings(*argv: str | Path, cwd: Path | None = None) -> tuple[Finding, ...]:
    done = subprocess.run(
        [str(word) for word in argv],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        timeout=60, check=False, cwd=cwd,
    )  # fmt: skip
    assert done.returncode != 0
    return scan(done.stdout.split(b"\n"))


@pytest.mark.engine
class TestLlamaServer:
    def test_an_unknown_flag(self, llama_server: Path) -> None:
        assert _findings(llama_server, "--draft-n-max", "3")[0].id == "flag-unknown"

    def test_a_removed_flag(self, llama_server: Path) -> None:
        first = _findings(llama_server, "--draft-max", "3")[0]

        assert first.id == "flag-removed"
        assert "--spec-draft-n-max" in first.mend

    def test_a_missing_model(self, llama_server: Path, tmp_path: Path) -> None:
        found = _findings(llama_server, "--port", "0", "-m", tmp_path / "no.gguf")

        assert found[0].id == "model-file-missing"
        assert exit_code(found) == 7

    @pytest.mark.parametrize(
        ("head", "row"),
        [
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "gguf-is-lfs-pointer"),
            (b"<!DOCTYPE html><html></html>", "gguf-is-web-page"),
            (b"Entry not found", "gguf-is-error-text"),
            (b"\x00\x01\x02\x03 some bytes", "gguf-bad-magic"),
        ],
    )
    def test_a_file_that_is_no_model(
        self, llama_server: Path, tmp_path: Path, head: bytes, row: str
    ) -> None:
        model = tmp_path / "model.gguf"
        model.write_bytes(head)

        assert _findings(llama_server, "--port", "0", "-m", model)[0].id == row

    @pytest.mark.parametrize("kept", [1000, 1_000_000, 60_000_000])
    def test_a_model_cut_short(
        self, llama_server: Path, smollm2: Path, tmp_path: Path, kept: int
    ) -> None:
        model = tmp_path / "model.gguf"
        with smollm2.open("rb") as whole:
            model.write_bytes(whole.read(kept))

        assert _findings(llama_server, "--port", "0", "-m", model)[0].id == "gguf-truncated"

    def test_a_taken_port(self, llama_server: Path, smollm2: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            found = _findings(llama_server, "--port", port, "-m", smollm2)

        assert found[0].id == "port-taken"


@pytest.mark.integration
class TestGit:
    def test_a_missing_ref(self, tmp_path: Path) -> None:
        subprocess.run(["git", "init", "-q", "--bare", tmp_path / "a"], check=True)

        found = _findings("git", "fetch", tmp_path / "a", "refs/heads/gone", cwd=tmp_path / "a")

        assert found[0].id == "ref-not-found"

    def test_a_patch_that_does_not_fit(self, tmp_path: Path) -> None:
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        (tmp_path / "a").write_text("one\n")
        diff = "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-two\n+three\n"
        (tmp_path / "p.diff").write_text(diff)
        (tmp_path / "cut.diff").write_text(diff[:-8])
        (tmp_path / "no.diff").write_text("<html></html>\n")

        rows = {"p": "hunk-rejected", "cut": "patch-malformed", "no": "patch-empty"}
        for name, row in rows.items():
            assert _findings("git", "apply", f"{name}.diff", cwd=tmp_path)[0].id == row

    def test_no_repository(self, tmp_path: Path) -> None:
        assert _findings("git", "-C", tmp_path, "log")[0].id == "no-git-metadata"
