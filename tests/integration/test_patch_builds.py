"""Pinned patches in recipes and for one run: from a git host on loopback to a built server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse import flags
from bakehouse.commands import build, patch, plan
from bakehouse.commands.lock import run_fetch, run_lock
from bakehouse.commands.recipes import run_check
from bakehouse.context import Context, Outcome
from bakehouse.errors import LockError, PatchError, RecipeError, UsageError
from bakehouse.patches.apply import stored
from bakehouse.patches.manifest import Manifest, read_manifest, write_manifest
from bakehouse.paths import Places
from bakehouse.resolver import lock_path, read_lock
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.clocks import ImpatientClock
from tests.support.filehost import status
from tests.support.githost import Repo, git
from tests.support.heard import Heard
from tests.support.pullhost import PullHost, serve_pulls
from tests.support.small_engine import FILES, RECIPE, pack

pytestmark = pytest.mark.integration

LLAMA = "ggml-org/llama.cpp"
GREETING = (
    FILES["llama.cpp"].replace(': "wrong"', ': "no"').replace("? SMALL_GREETING", '? "patched"')
)
SERVER = FILES["server.cpp"].replace("which < 5", "which <  5")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[PullHost]:
    with serve_pulls(tmp_path / "host") as served:
        yield served


@pytest.fixture
def repo(host: PullHost) -> Repo:
    """Upstream: 7 changes the greeting, 8 another file, 9 what 7 changes as well."""
    made = host.repo(f"{LLAMA}.git")
    base = made.commit(FILES)
    offer(made, 7, base, {"llama.cpp": GREETING})
    offer(made, 8, base, {"server.cpp": SERVER})
    offer(made, 9, base, {"llama.cpp": GREETING.replace("patched", "other")})
    return made


def offer(repo: Repo, number: int, base: str, changes: dict[str, str]) -> str:
    ref = f"refs/pull/{number}/head"
    return repo.commit({**FILES, **changes}, ref=ref, parents=(base,), message=f"Change {number}")


@pytest.fixture
def ctx(context: Context, host: PullHost, repo: Repo, tmp_path: Path) -> Context:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(gguf_bytes(llama_metadata(), [f32("x", 4)]))
    (folder / "small.yaml").write_text(RECIPE.format(sha256=pack(folder / "small.tar.gz")))
    environment = {**context.environment, "BAKEHOUSE_GITHUB": host.url}
    return replace(context, recipes=folder, environment=environment, clock=ImpatientClock())


def pin(ctx: Context, number: int, **flags: Any) -> Outcome:
    return patch.run(ctx, patch.Options(pr=str(number), **flags))


def built(ctx: Context, *overrides: str, **options: Any) -> Outcome:
    return build.run(ctx, build.Options("small", overrides, **options))


def patched_recipe(ctx: Context, patches: str) -> Path:
    path = ctx.recipes / "small.yaml"
    text = path.read_text()
    start = text.index("number: 77}\n") + len("number: 77}\n")
    end = text.index("build:")
    path.write_text(f"{text[:start]}  patches: {patches}\n{text[end:]}")
    return path


def says(outcome: Outcome) -> str:
    done = subprocess.run([outcome.result["server"]], capture_output=True, text=True, env={},
                          check=True)  # fmt: skip
    return done.stdout.splitlines()[-1]


def manifest_file(ctx: Context, number: int) -> Path:
    return ctx.recipes.parent / "patches" / LLAMA / f"{number}.yaml"


def test_build_with_and_without_a_recipes_patch(ctx: Context, host: PullHost) -> None:
    plain = built(ctx)
    assert says(plain) == "good morning"
    pin(ctx, 7)
    path = patched_recipe(ctx, "[{pr: 7}]")
    with pytest.raises(LockError, match="patch-changed"):
        built(ctx)
    moved = run_lock(ctx, flags.Lock("small", update=True))
    sha256 = str(read_manifest(manifest_file(ctx, 7)).sha256)
    found = read_lock(lock_path(path))
    assert found is not None
    (pinned,) = found.patches
    assert (pinned.file.path, pinned.file.sha256) == (f"{LLAMA}#7", sha256)
    assert pinned.base == found.base
    assert f"moved patch {LLAMA}#7: none -> sha256 {sha256} on {found.base}" in moved.text
    host.gone = True
    one = built(ctx)
    assert says(one) == "patched"
    assert one.result["digest"] != plain.result["digest"]
    server = one.result["server"]
    stamp = subprocess.run(
        [server, "--version"], capture_output=True, text=True, check=True, env={}
    )
    assert f"-p{sha256[:7]})" in stamp.stderr
    record = json.loads(Path(one.result["record"]).read_text())
    assert record["facts"]["patches"]["applied"][0]["sha256"] == sha256
    patched_recipe(ctx, "[]")
    run_lock(ctx, flags.Lock("small", update=True))
    again = built(ctx)
    assert again.result["reused"] is True
    assert (again.result["digest"], again.result["content"]) == (
        plain.result["digest"], plain.result["content"],
    )  # fmt: skip


def test_build_adds_a_patch_for_one_run(ctx: Context) -> None:
    plain = built(ctx)
    lock_file = lock_path(ctx.recipes / "small.yaml")
    before = lock_file.read_bytes()
    pin(ctx, 7)
    planned = plan.run(ctx, plan.Options("small", patch=("7",)))
    assert planned.result["built"] is False
    dry = built(ctx, patch=("7",), dry_run=True)
    assert dry.result["digest"] == planned.result["build"]["digest"] != plain.result["digest"]
    one = built(ctx, patch=("7",), locked=True)
    assert one.result["digest"] == dry.result["digest"]
    assert says(one) == "patched"
    assert lock_file.read_bytes() == before
    facts = json.loads(Path(one.result["record"]).read_text())["facts"]["patches"]
    assert facts["added_for_this_run"] == ["7"]
    assert [p["id"] for p in facts["applied"]] == [f"{LLAMA}#7"]
    assert built(ctx).result["digest"] == plain.result["digest"]
    named = built(ctx, patch=(f"{LLAMA}#7",), dry_run=True)
    assert named.result["digest"] == dry.result["digest"]


def test_build_patch_named_twice(ctx: Context) -> None:
    run_lock(ctx, flags.Lock("small"))
    pin(ctx, 7)
    heard = Heard()
    once = built(ctx, patch=("7",), dry_run=True)
    twice = built(replace(ctx, progress=heard), patch=("7", f"{LLAMA}#7"), dry_run=True)
    assert twice.result["digest"] == once.result["digest"]
    assert f"patch {LLAMA}#7 is already applied" in heard.lines  # the recipe itself has none


def test_build_drops_a_patch_for_one_run(ctx: Context) -> None:
    plain = built(ctx)
    pin(ctx, 7)
    pin(ctx, 8)
    path = patched_recipe(ctx, "[{pr: 7}, {pr: 8}]")
    run_lock(ctx, flags.Lock("small", update=True))
    before = lock_path(path).read_bytes()
    both = built(ctx, dry_run=True)
    less = built(ctx, no_patch=("7",), dry_run=True)
    none = built(ctx, no_patch=("7", "8"))
    assert len({d.result["digest"] for d in (both, less, none)}) == 3
    assert none.result["digest"] == plain.result["digest"]
    assert none.result["reused"] is True
    facts = json.loads(Path(none.result["record"]).read_text())["facts"]["patches"]
    assert (facts["applied"], facts["left_out_of_this_run"]) == ([], ["7", "8"])
    assert lock_path(path).read_bytes() == before
    pin(ctx, 9)
    swapped = built(ctx, no_patch=("7",), patch=("9",), dry_run=True)
    assert swapped.result["digest"] not in (both.result["digest"], less.result["digest"])


def test_build_refuses_invalid_patch_flags(ctx: Context) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"patch": ("x y",)}, UsageError, "is not the name of a patch"),
        ({"patch": ("7",), "no_patch": ("7",)}, UsageError, "both name 7"),
        ({"no_patch": ("8",)}, UsageError, "no patch '8'"),
        ({"patch": ("5",)}, Exception, "patch '?5"),
        ({"allow": "fuzz"}, UsageError, "needs --patch"),
        ({"patch": ("7",), "allow": "all"}, UsageError, "offset or fuzz"),
        ({"patch": ("7", "9")}, PatchError, "patch 9 does not apply"),
    ]
    run_lock(ctx, flags.Lock("small"))
    pin(ctx, 7)
    pin(ctx, 9)
    for given, error, why in rows:
        with pytest.raises(error, match=why):
            built(ctx, **given, dry_run=True)


def test_plan_with_a_patch_fetches_nothing(ctx: Context, tmp_path: Path) -> None:
    run_lock(ctx, flags.Lock("small"))
    pin(ctx, 7)
    empty = replace(ctx, places=Places(tmp_path / "other" / "cache", tmp_path / "other" / "state"))
    with pytest.raises(LockError, match="not on this machine") as caught:
        plan.run(empty, plan.Options("small", patch=("7",)))
    assert "invoke fetch" in str(caught.value.hint)
    assert not (tmp_path / "other" / "cache" / "patches").exists()


def test_build_stops_at_a_patch_that_fails(ctx: Context) -> None:
    for number in (7, 8, 9):
        pin(ctx, number)
    patched_recipe(ctx, "[{pr: 8}, {pr: 7}, {pr: 9}]")
    with pytest.raises(PatchError, match="patch 9 does not apply: hunk 1 of 1") as caught:
        built(ctx)
    assert caught.value.exit_code == 5
    where = str(caught.value.where)
    assert "the patch has      default: return small_start() == 42 ? SMALL_GREETING" in where
    assert 'the source has     default: return small_start() == 42 ? "patched"' in where
    assert not list(ctx.places.builds.glob("*"))
    assert not lock_path(ctx.recipes / "small.yaml").exists()


def test_build_refuses_a_patch_that_upstream_has(ctx: Context) -> None:
    pin(ctx, 7)
    pin(ctx, 8)
    sha256 = pack(ctx.recipes / "small.tar.gz", {"llama.cpp": GREETING})
    (ctx.recipes / "small.yaml").write_text(RECIPE.format(sha256=sha256))
    patched_recipe(ctx, "[{pr: 7}, {pr: 8}]")
    with pytest.raises(PatchError, match=r"patch 7 .* already in the source") as caught:
        built(ctx)
    assert "remove it" in str(caught.value.hint)


def test_lock_drift_patch_moved(ctx: Context, repo: Repo, host: PullHost) -> None:
    pin(ctx, 7)
    patched_recipe(ctx, "[{pr: 7}]")
    run_lock(ctx, flags.Lock("small"))
    offer(repo, 7, host_main(repo), {"llama.cpp": GREETING.replace("patched", "newer")})
    assert built(ctx, dry_run=True).result["built"] is False, "a build contacts no host"
    pin(ctx, 7, update=True)
    with pytest.raises(LockError, match="patch-moved") as caught:
        built(ctx)
    assert caught.value.exit_code == 4
    assert "invoke lock --update" in str(caught.value.hint)
    run_lock(ctx, flags.Lock("small", update=True))
    assert says(built(ctx)) == "newer"


def host_main(repo: Repo) -> str:
    return git(repo.folder, "rev-parse", "main")


def test_lock_drift_patch_base_changed(ctx: Context, repo: Repo) -> None:
    pin(ctx, 7)
    base = host_main(repo)
    text = (ctx.recipes / "small.yaml").read_text()
    start, end = text.index("  archive:"), text.index("build:")
    source = f"  git: {repo.url}\n  commit: {base}\n  patches: [{{pr: 7}}]\n"
    (ctx.recipes / "small.yaml").write_text(text[:start] + source + text[end:])
    run_lock(ctx, flags.Lock("small"))
    other = repo.commit({**FILES, "new": "n\n"}, parents=(base,))
    recipe = ctx.recipes / "small.yaml"
    recipe.write_text(recipe.read_text().replace(base, other))
    with pytest.raises(LockError, match=r"commit-changed.*patch-base-changed"):
        built(ctx)


def test_fetch_on_a_fresh_clone_gets_pinned_patches(
    ctx: Context, host: PullHost, repo: Repo, tmp_path: Path
) -> None:
    pin(ctx, 7)
    patched_recipe(ctx, "[{pr: 7}]")
    run_lock(ctx, flags.Lock("small"))
    sha256 = str(read_manifest(manifest_file(ctx, 7)).sha256)
    empty = replace(ctx, places=Places(tmp_path / "o" / "cache", tmp_path / "o" / "state"))
    run_fetch(empty, flags.Fetch("small", locked=True))
    assert stored(empty.places, sha256).is_file()
    offer(repo, 7, host_main(repo), {"llama.cpp": GREETING.replace("patched", "newer")})
    late = replace(ctx, places=Places(tmp_path / "l" / "cache", tmp_path / "l" / "state"))
    run_fetch(late, flags.Fetch("small", locked=True))
    assert stored(late.places, sha256).is_file(), "its old head still exists"
    stored(late.places, sha256).unlink()
    head = read_manifest(manifest_file(ctx, 7)).head
    host.collected.add(str(head))
    last = replace(ctx, places=Places(tmp_path / "m" / "cache", tmp_path / "m" / "state"))
    with pytest.raises(LockError, match="moved: sha256"):
        run_fetch(last, flags.Fetch("small", locked=True))
    host.gone = True
    with pytest.raises(PatchError, match="404"):
        run_fetch(last, flags.Fetch("small", locked=True))


def test_fetch_vendored_patch_needs_no_host(ctx: Context, host: PullHost, tmp_path: Path) -> None:
    pin(ctx, 7, vendor=True)
    patched_recipe(ctx, "[{pr: 7}]")
    host.gone = True
    empty = replace(ctx, places=Places(tmp_path / "o" / "cache", tmp_path / "o" / "state"))
    run_lock(empty, flags.Lock("small"))
    run_fetch(empty, flags.Fetch("small", locked=True))
    assert stored(empty.places, str(read_manifest(manifest_file(ctx, 7)).sha256)).is_file()


def test_patch_not_pinned_is_refused(ctx: Context) -> None:
    write_manifest(manifest_file(ctx, 7), Manifest(id="7", pr=7, repo=LLAMA, source="x"))
    patched_recipe(ctx, "[{pr: 7}]")
    checked = run_check(ctx, flags.Check("small"))
    assert checked.exit == 0
    assert f"patch {LLAMA}#7 is not pinned yet: run 'invoke patch --pr 7'" in checked.text
    runs: tuple[Callable[[], object], ...] = (
        lambda: run_lock(ctx, flags.Lock("small")),
        lambda: plan.run(ctx, plan.Options("small")),
        lambda: built(ctx),
        lambda: run_fetch(ctx, flags.Fetch("small")),
    )
    for run in runs:
        with pytest.raises(LockError, match="not pinned yet") as caught:
            run()
        assert "invoke patch --pr 7" in str(caught.value.hint)
        assert caught.value.exit_code == 4


def test_patch_lifts_must_be_in_its_manifest(ctx: Context) -> None:
    pin(ctx, 7)
    patched_recipe(ctx, "[{pr: 7, lifts: [some-rule]}]")
    checked = run_check(ctx, flags.Check("small"))
    assert checked.exit == 2
    assert "its manifest does not lift some-rule" in checked.text
    with pytest.raises(RecipeError, match="are invalid"):
        built(ctx)
    patched_recipe(ctx, "[{pr: 5}]")
    assert "manifest of patch" in run_check(ctx, flags.Check("small")).text


def tried(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {row["recipe"]: row for row in outcome.result["tried"]}


def variant(ctx: Context, name: str, changes: dict[str, str], patches: str = "[]") -> None:
    """Another recipe, whose source differs."""
    sha256 = pack(ctx.recipes / f"{name}.tar.gz", changes)
    text = RECIPE.format(sha256=sha256).replace("small.tar.gz", f"{name}.tar.gz")
    text = text.replace("name: small\n", f"name: {name}\n")
    text = text.replace("number: 77}\n", f"number: 77}}\n  patches: {patches}\n")
    (ctx.recipes / f"{name}.yaml").write_text(text)


def test_patch_is_tried_on_all_recipes(ctx: Context) -> None:
    above = FILES["llama.cpp"].replace('extern "C" int small', '// more\n\nextern "C" int small')
    near = FILES["llama.cpp"].replace("case 1: return", "case 1:  return")
    variant(ctx, "shifted", {"llama.cpp": above})
    variant(ctx, "fuzzy", {"llama.cpp": near})
    variant(ctx, "upstream", {"llama.cpp": GREETING})
    variant(ctx, "conflict", {"llama.cpp": FILES["llama.cpp"].replace("== 42", "== 43")})
    variant(ctx, "gone", {"llama.cpp": "int nothing;\n"})
    variant(ctx, "away", {"ggml.c": "// other\n" + FILES["ggml.c"]})
    (ctx.recipes / "faulty.yaml").write_text("nonsense: 1\n")
    for name in ("small", "shifted", "fuzzy", "upstream", "conflict", "gone"):
        run_lock(ctx, flags.Lock(name))
    done = pin(ctx, 7)
    rows = tried(done)
    words = {name: row["result"] for name, row in rows.items()}
    assert words == {
        "small": "applies", "shifted": "applies with offset", "fuzzy": "applies with fuzz",
        "upstream": "already upstream", "conflict": "conflicts", "gone": "conflicts",
        "away": "unknown", "faulty": "unknown",
    }  # fmt: skip
    assert rows["shifted"]["applies"] is False
    assert rows["away"]["applies"] is None
    assert "hunk 1 of llama.cpp: at line 9, offset +2" in rows["shifted"]["notes"]
    verdicts = {c.id.removeprefix("patch."): c.verdict.value for c in done.checks}
    assert verdicts["small"] == "passed"
    assert verdicts["conflict"] == verdicts["shifted"] == "failed"
    assert verdicts["away"] == verdicts["faulty"] == "unknown"
    assert done.exit == 0
    assert done.error is None
    assert "no lock" in done.text
    loose = tried(pin(ctx, 7, allow="offset"))
    assert loose["shifted"]["applies"] is True
    assert loose["fuzzy"]["applies"] is False
    assert tried(pin(ctx, 7, allow="fuzz"))["fuzzy"]["applies"] is True


def test_patch_on_one_recipe_fetches_its_source(ctx: Context) -> None:
    variant(ctx, "conflict", {"llama.cpp": FILES["llama.cpp"].replace("== 42", "== 43")})
    good = pin(ctx, 7, recipe="small")
    assert good.error is None
    assert tried(good)["small"]["result"] == "applies"
    assert not lock_path(ctx.recipes / "small.yaml").exists(), "trying locks nothing"
    bad = pin(ctx, 7, recipe="conflict")
    assert bad.error is not None
    assert bad.error.exit_code == 5
    assert bad.error.id == "patch-conflicts"
    assert "== 43" in str(bad.error.where)


def test_patch_partly_upstream(ctx: Context, repo: Repo) -> None:
    offer(repo, 10, host_main(repo), {"llama.cpp": GREETING, "server.cpp": SERVER})
    variant(ctx, "half", {"server.cpp": SERVER})
    done = pin(ctx, 10, recipe="half")
    assert tried(done)["half"]["result"] == "partly upstream"
    assert done.error is not None
    assert "hunk 1 of 1 of server.cpp is already in the source" in str(done.error.where)


def test_patch_is_tried_after_those_before_it(ctx: Context) -> None:
    pin(ctx, 7)
    variant(ctx, "has7", {}, "[{pr: 7}]")
    variant(ctx, "has9first", {}, "[{pr: 9}, {pr: 7}]")
    on = {name: tried(pin(ctx, 9, recipe=name))[name]["result"] for name in ("has7", "has9first")}
    assert on == {"has7": "conflicts", "has9first": "applies"}


def test_patch_offset_allowed_by_the_recipe(ctx: Context) -> None:
    pin(ctx, 7)
    above = FILES["llama.cpp"].replace('extern "C" int small', '// more\n\nextern "C" int small')
    variant(ctx, "shifted", {"llama.cpp": above}, "[{pr: 7}]")
    with pytest.raises(PatchError, match="applies only with offset") as caught:
        run_lock(ctx, flags.Lock("shifted"))
    assert "at line 9, offset +2" in caught.value.what
    variant(ctx, "shifted", {"llama.cpp": above}, "[{pr: 7, allow: offset}]")
    run_lock(ctx, flags.Lock("shifted"))
    assert tried(pin(ctx, 7, recipe="shifted"))["shifted"]["applies"] is True


def test_patch_host_is_contacted_only_by_the_task_patch(ctx: Context, host: PullHost) -> None:
    pin(ctx, 7)
    patched_recipe(ctx, "[{pr: 7}]")
    asked = len(host.asked)
    host.page_faults[f"/raw/{LLAMA}/pull/7.diff"] = [status(429)] * 50
    run_lock(ctx, flags.Lock("small"))
    built(ctx)
    plan.run(ctx, plan.Options("small"))
    assert len(host.asked) == asked
