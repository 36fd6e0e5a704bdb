"""The task `patch` shows changes of mode, and new, deleted and renamed files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.commands.patch import Options, run
from bakehouse.context import Context, Outcome
from bakehouse.errors import UsageError

HUNK = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
CASES = {
    "run.sh": ("old mode 100644\nnew mode 100755\n", "+0 -0, mode 100644 -> 100755"),
    "both.sh": (
        "old mode 100755\nnew mode 100644\nindex 7898192..6178079\n" + HUNK.format("both.sh"),
        "+1 -1, mode 100755 -> 100644",
    ),
    "new.sh": ("new file mode 100755\nindex 0000000..e69de29\n", "+0 -0, new, mode 100755"),
    "gone.sh": ("deleted file mode 100755\nindex e69de29..0000000\n", "+0 -0, deleted"),
    "plain.c": ("index 7898192..6178079 100644\n" + HUNK.format("plain.c"), "+1 -1"),
}


def patch(ctx: Context, folder: Path, body: str) -> Outcome:
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "x.patch").write_text(body)
    ctx = replace(ctx, recipes=folder / "recipes")
    return run(ctx, Options(file=str(folder / "x.patch"), dry_run=True))


def test_patch_shows_changes_of_mode(context: Context, tmp_path: Path) -> None:
    whole = "".join(f"diff --git a/{n} b/{n}\n{body}" for n, (body, _) in CASES.items())
    found = patch(context, tmp_path, whole)
    shown = [line for line in found.text.splitlines() if line.startswith("file ")]
    assert shown == [f"file      {name} {says}" for name, (_, says) in CASES.items()]
    assert found.result["modes"] == {
        "run.sh": "mode 100644 -> 100755", "both.sh": "mode 100755 -> 100644",
        "new.sh": "new, mode 100755", "gone.sh": "deleted",
    }  # fmt: skip


def test_patch_shows_a_renamed_file_with_its_mode(context: Context, tmp_path: Path) -> None:
    body = (
        "diff --git a/a.sh b/b.sh\nold mode 100644\nnew mode 100755\nsimilarity index 100%\n"
        "rename from a.sh\nrename to b.sh\n"
    )
    text = patch(context, tmp_path, body).text
    assert "file      b.sh +0 -0, renamed from a.sh, mode 100644 -> 100755" in text.splitlines()


def test_patch_refuses_flags_without_effect(context: Context) -> None:
    for options in (
        Options(pr="7", set_=("serve.context=1",)),
        Options(pr="7", accept_memory_risk="mine"),
        Options(pr="7", recipe="smollm2-cpu", accept_memory_risk="x"),
    ):
        flag = "--set" if options.set_ else "--accept-memory-risk"
        with pytest.raises(UsageError, match=f"^{flag} needs"):
            run(context, options)
