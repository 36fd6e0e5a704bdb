"""Git sources against a real git over HTTP on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound, UsageError
from bakehouse.lock import GitPin, Lock
from bakehouse.patches.apply import pin_patches, stored
from bakehouse.patches.source_tree import ensure_tree, materialise, patched_tree
from bakehouse.recipe.models import Patch, Source
from bakehouse.resolver import pin_git
from bakehouse.sources.git_mirror import ensure_commit, find_ref, find_short, mirror_folder
from bakehouse.system.git import Git
from tests.support.clocks import ImpatientClock
from tests.support.filehost import raw, redirect, status
from tests.support.githost import DATE, File, GitHost, Repo, git, serve_git

pytestmark = pytest.mark.integration

FILES: dict[str, File] = {
    "CMakeLists.txt": "project(x)\n",
    "src/main.c": "int main(void) { return 0; }\n",
    "run.sh": ("100755", "#!/bin/sh\n"),
}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[GitHost]:
    with serve_git(tmp_path / "host") as served:
        yield served


@pytest.fixture
def repo(host: GitHost) -> Repo:
    return host.repo()


@pytest.fixture
def ctx(context: Context) -> Context:
    return replace(context, clock=ImpatientClock())


def pin(ctx: Context, repo: Repo, commit: str, ref: str | None = None) -> GitPin:
    source = Source(git=repo.url, commit=commit, ref=ref)
    return pin_git(ctx, Git(ctx.processes, ctx.environment), source)


def lock_of(source: GitPin) -> Lock:
    return Lock(
        recipe="test", engine="llama.cpp", wants="", source=source, source_tree=source.tree,
        weights={},
    )  # fmt: skip


def read(folder: Path) -> dict[str, bytes]:
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def test_commit_is_fetched_by_id_and_written_as_it_is(
    ctx: Context, repo: Repo, tmp_path: Path
) -> None:
    commit = repo.commit(FILES)
    found = pin(ctx, repo, commit)
    assert (found.commit, found.date, found.submodules) == (commit, DATE, ())
    assert found.tree == repo.tree(FILES)
    out = tmp_path / "out"
    materialise(ctx, lock_of(found), out)
    assert read(out) == {
        "CMakeLists.txt": b"project(x)\n",
        "run.sh": b"#!/bin/sh\n",
        "src/main.c": b"int main(void) { return 0; }\n",
    }
    modes = {p.name: p.stat().st_mode & 0o7777 for p in (out, *out.rglob("*"))}
    assert modes == {
        "out": 0o755, "src": 0o755, "CMakeLists.txt": 0o644, "main.c": 0o644, "run.sh": 0o755,
    }  # fmt: skip
    assert {p.stat().st_mtime for p in (out, *out.rglob("*"))} == {float(DATE)}


def test_commit_that_no_branch_reaches(ctx: Context, repo: Repo) -> None:
    orphan = repo.commit({"old": "x"}, ref=None)
    repo.commit(FILES)
    assert pin(ctx, repo, orphan).commit == orphan


def test_commit_that_was_fetched_needs_no_network(
    ctx: Context, host: GitHost, repo: Repo, tmp_path: Path
) -> None:
    lock = lock_of(pin(ctx, repo, repo.commit(FILES)))
    asked = host.count
    host.gone = True
    ensure_tree(ctx, lock)
    materialise(ctx, lock, tmp_path / "out")
    assert host.count == asked


def test_commit_is_fetched_without_history(ctx: Context, repo: Repo) -> None:
    first = repo.commit({"a": "1" * 1000})
    second = repo.commit({"a": "2" * 1000}, parents=(first,))
    found = pin(ctx, repo, second)
    assert found.number is None
    listed = git(mirror_folder(ctx.places, repo.url), "rev-list", "--all")
    assert listed.split() == [second]


def test_mirror_searches_a_host_that_refuses_ids(ctx: Context, host: GitHost) -> None:
    refs = ("refs/heads/side", "refs/tags/v1", "refs/pull/7/head", "refs/merge-requests/3/head")
    for number, ref in enumerate(refs):
        repo = host.repo(f"org/number-{number}.git").be_strict()
        repo.commit(FILES)
        first = repo.commit({"a": "1"}, ref=None)
        wanted = repo.commit({"a": "2"}, ref=None, parents=(first,))
        repo.commit({"a": "3"}, ref=ref, parents=(wanted,))
        found = pin(ctx, repo, wanted)
        assert (found.commit, found.number) == (wanted, 2), ref


def test_mirror_searches_after_a_shallow_fetch(ctx: Context, repo: Repo) -> None:
    first = repo.commit({"a": "1"})
    second = repo.commit({"a": "2"}, parents=(first,))
    third = repo.commit({"a": "3"}, parents=(second,))
    pin(ctx, repo, third)  # by id, one commit deep
    repo.be_strict()
    assert pin(ctx, repo, first).commit == first


def test_commit_not_found_lists_what_was_tried(ctx: Context, repo: Repo) -> None:
    repo.be_strict()
    repo.commit(FILES)
    gone = repo.commit({"a": "gone"}, ref=None)
    with pytest.raises(LockError, match=gone) as caught:
        pin(ctx, repo, gone, ref="main")
    assert caught.value.exit_code == 4
    for place in ("by id", "main", "branches", "tags", "pull requests"):
        assert place in str(caught.value.where)


def test_commit_that_never_existed(ctx: Context, repo: Repo) -> None:
    repo.commit(FILES)
    for _ in range(2):
        with pytest.raises(LockError, match="1" * 40):
            pin(ctx, repo, "1" * 40)
        repo.be_strict()


def test_commit_survives_a_force_push(
    ctx: Context, host: GitHost, repo: Repo, tmp_path: Path
) -> None:
    lock = lock_of(pin(ctx, repo, repo.commit(FILES), ref="main"))
    repo.be_strict()
    repo.commit({"other": "history"})
    git(repo.folder, "reflog", "expire", "--expire=now", "--all")
    git(repo.folder, "gc", "--prune=now", "--quiet")
    ensure_tree(ctx, lock)
    materialise(ctx, lock, tmp_path / "out")
    assert (tmp_path / "out" / "run.sh").is_file()


def test_ref_is_resolved_and_pinned(ctx: Context, repo: Repo) -> None:
    first = repo.commit(FILES)
    second = repo.commit({"a": "2"}, parents=(first,))
    found = pin(ctx, repo, first, ref="main")
    assert (found.ref, found.ref_commit, found.commit) == ("main", second, first)


def test_ref_annotated_tag_is_followed(ctx: Context, repo: Repo) -> None:
    commit = repo.commit(FILES)
    git(repo.folder, "tag", "-a", "v1", "-m", "one", commit)
    assert pin(ctx, repo, commit, ref="v1").ref_commit == commit


def test_ref_may_be_a_pull_request(ctx: Context, repo: Repo) -> None:
    repo.commit(FILES)
    commit = repo.commit({"a": "pr"}, ref="refs/pull/37/head")
    assert pin(ctx, repo, commit, ref="pull/37/head").ref_commit == commit


def test_ref_that_is_branch_and_tag_is_ambiguous(ctx: Context, repo: Repo) -> None:
    first = repo.commit(FILES, ref="refs/heads/v1")
    second = repo.commit({"a": "2"}, ref="refs/tags/v1")
    with pytest.raises(LockError, match="ambiguous") as caught:
        pin(ctx, repo, first, ref="v1")
    assert first[:12] in caught.value.what
    assert second[:12] in caught.value.what
    assert pin(ctx, repo, first, ref="refs/heads/v1").ref_commit == first


def test_ref_that_is_missing_or_invalid(ctx: Context, repo: Repo) -> None:
    commit = repo.commit(FILES)
    with pytest.raises(LockError, match="no branch or tag 'nope'"):
        pin(ctx, repo, commit, ref="nope")
    for ref in ("--upload-pack=x", "a b", "a..b", "*", "a:b", "@{1}", "x\n"):
        with pytest.raises(UsageError, match="not a valid ref name"):
            find_ref(ctx, Git(ctx.processes), repo.url, ref)


def test_short_commit_is_searched_in_its_ref(ctx: Context, repo: Repo) -> None:
    first = repo.commit(FILES)
    repo.commit({"a": "2"}, parents=(first,))
    elsewhere = repo.commit({"b": "3"}, ref="refs/heads/other")
    assert pin(ctx, repo, first[:9], ref="main").commit == first
    with pytest.raises(LockError, match="no commit of refs/heads/main starts with"):
        pin(ctx, repo, elsewhere[:9], ref="main")


def test_short_commit_that_is_ambiguous(ctx: Context, repo: Repo) -> None:
    """Seven digits seldom meet by chance, so the look-up is asked with fewer."""
    commits: list[str] = []
    for number in range(40):
        above = tuple(commits[-1:])
        commits.append(repo.commit({"a": str(number)}, parents=above, message=str(number)))
    heads = [commit[:2] for commit in commits]
    twice = next(head for head in heads if heads.count(head) > 1)
    with pytest.raises(LockError, match="ambiguous") as caught:
        find_short(ctx, Git(ctx.processes), repo.url, "refs/heads/main", twice)
    for commit in [c for c in commits if c.startswith(twice)][:2]:
        assert commit in caught.value.what


def test_submodule_is_pinned_and_written_inside(
    ctx: Context, host: GitHost, repo: Repo, tmp_path: Path
) -> None:
    inner, leaf = host.repo("org/inner.git"), host.repo("org/leaf.git")
    leaf_commit = leaf.commit({"leaf.txt": "leaf"})
    modules = '[submodule "leaf"]\n\tpath = deps/leaf\n\turl = {}\n'
    inner_commit = inner.commit(
        {".gitmodules": modules.format(leaf.url), "i.c": "i", "deps/leaf": ("160000", leaf_commit)}
    )
    outer = '[submodule "x"]\n\tpath = third/inner\n\turl = ../inner.git\n'
    commit = repo.commit({**FILES, ".gitmodules": outer, "third/inner": ("160000", inner_commit)})
    found = pin(ctx, repo, commit)
    assert [(s.path, s.url, s.commit) for s in found.submodules] == [
        ("third/inner", inner.url, inner_commit),
        ("third/inner/deps/leaf", leaf.url, leaf_commit),
    ]
    host.gone = True
    materialise(ctx, lock_of(found), tmp_path / "out")
    written = read(tmp_path / "out")
    assert written["third/inner/i.c"] == b"i"
    assert written["third/inner/deps/leaf/leaf.txt"] == b"leaf"
    assert not list((tmp_path / "out").rglob(".git"))


def test_submodule_url_is_checked_like_any_other(ctx: Context, repo: Repo) -> None:
    urls = {
        "ext::sh -c touch% /tmp/x": "refused",
        "-u./payload": "refused",
        "git://127.0.0.1/x": "not spoken|unsupported",
        "../../../../x.git": "above its host",
        "https://user:secret@example.org/x.git": "credentials",
    }
    for url, why in urls.items():
        modules = f'[submodule "x"]\n\tpath = x\n\turl = {url}\n'
        commit = repo.commit({".gitmodules": modules, "x": ("160000", "2" * 40)})
        with pytest.raises(UsageError, match=why) as caught:
            pin(ctx, repo, commit)
        assert "secret" not in str(caught.value)


def test_submodule_without_a_url(ctx: Context, repo: Repo) -> None:
    commit = repo.commit({"a": "a", "x": ("160000", "2" * 40)})
    with pytest.raises(LockError, match="submodule 'x' has no URL"):
        pin(ctx, repo, commit)


HOSTILE: dict[str, bytes | str] = {
    ".gitattributes": (
        "* text eol=crlf ident filter=evil working-tree-encoding=UTF-16\n"
        "hidden export-ignore\nsubst export-subst\n"
    ),
    "lf.txt": "one\ntwo\n$Id$\n",
    "crlf.txt": b"one\r\ntwo\r\n",
    "hidden": "h",
    "subst": "$Format:%H$\n",
    "utf8.txt": "ö",
}


def test_tree_attributes_do_not_alter_bytes(ctx: Context, repo: Repo, tmp_path: Path) -> None:
    lock = lock_of(pin(ctx, repo, repo.commit({**HOSTILE})))
    materialise(ctx, lock, tmp_path / "out")
    wanted = {k: v if isinstance(v, bytes) else v.encode() for k, v in HOSTILE.items()}
    assert read(tmp_path / "out") == wanted


def test_tree_links_and_unusual_names_are_written(ctx: Context, repo: Repo, tmp_path: Path) -> None:
    files: dict[str, File] = {
        "a b/ö.txt": "x",
        "link": ("120000", "a b/ö.txt"),
        "to-folder": ("120000", "a b"),
    }
    materialise(ctx, lock_of(pin(ctx, repo, repo.commit(files))), tmp_path / "out")
    assert os.readlink(tmp_path / "out" / "link") == "a b/ö.txt"
    assert (tmp_path / "out" / "to-folder" / "ö.txt").read_text() == "x"
    assert os.lstat(tmp_path / "out" / "link").st_mtime == DATE


def test_git_ignores_the_users_configuration_and_environment(
    ctx: Context, repo: Repo, tmp_path: Path
) -> None:
    home = tmp_path / "user"
    home.mkdir()
    mark = tmp_path / "ran"
    hook = home / "hooks" / "reference-transaction"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[core]\n\thooksPath = {hook.parent}\n\tautocrlf = true\n"
        f'[url "file:///nowhere"]\n\tinsteadOf = {repo.url}\n'
        f'[filter "lfs"]\n\tsmudge = touch {mark}\n'
    )
    foreign = {
        "HOME": str(home), "GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/nowhere",
        "GIT_INDEX_FILE": "/nowhere", "GIT_TRACE": str(mark), "GIT_ALLOW_PROTOCOL": "none",
        "GIT_CONFIG_PARAMETERS": "'core.autocrlf=true'", "GIT_PROXY_COMMAND": f"touch {mark}",
        "GIT_SSH_COMMAND": f"touch {mark}", "GIT_EXEC_PATH": "/nowhere",
        "http_proxy": "http://127.0.0.1:9",
    }  # fmt: skip
    hostile = replace(ctx, environment={**ctx.environment, **foreign})
    commit = repo.commit({".gitattributes": "* filter=lfs\n", "f": "x\n"})
    lock = lock_of(pin(hostile, repo, commit))
    materialise(hostile, lock, tmp_path / "out")
    assert (tmp_path / "out" / "f").read_bytes() == b"x\n"
    assert not mark.exists()


def failed(ctx: Context, repo: Repo, commit: str) -> BakehouseError:
    with pytest.raises(BakehouseError) as caught:
        pin(ctx, repo, commit)
    return caught.value


def test_mirror_of_a_deleted_repository(ctx: Context, host: GitHost, repo: Repo) -> None:
    commit = repo.commit(FILES)
    host.gone = True
    error = failed(ctx, repo, commit)
    assert isinstance(error, NotFound)
    assert repo.url in str(error.where)


def test_mirror_explains_what_a_host_refuses(ctx: Context, host: GitHost, repo: Repo) -> None:
    commit = repo.commit(FILES)
    said = {401: "requires a login", 403: "requires a login", 410: "repository not found"}
    for code, words in said.items():
        headers = {"WWW-Authenticate": 'Basic realm="x"'} if code == 401 else {}
        host.faults = [status(code, b"no", headers)] * 8
        assert words in failed(ctx, repo, commit).what
        host.faults = []


def test_mirror_retries_a_busy_host(ctx: Context, host: GitHost, repo: Repo) -> None:
    commit = repo.commit(FILES)
    host.faults = [status(429, b"<html>slow down</html>"), status(503), raw(b"")]
    assert pin(ctx, repo, commit).commit == commit


def test_mirror_gives_up_on_a_busy_host(ctx: Context, host: GitHost, repo: Repo) -> None:
    commit = repo.commit(FILES)
    host.faults = [status(429, b"<html>slow down</html>")] * 50
    error = failed(ctx, repo, commit)
    assert isinstance(error, HostError)
    assert "429" in str(error.where)
    assert host.count < 20


def test_mirror_refuses_a_web_page(ctx: Context, host: GitHost, repo: Repo) -> None:
    commit = repo.commit(FILES)
    host.faults = [status(200, b"<html>Log in</html>", {"Content-Type": "text/html"})] * 20
    assert "not a git repository" in failed(ctx, repo, commit).what
    with pytest.raises(HostError, match="no refs found"):
        pin(ctx, repo, commit, ref="main")


@pytest.mark.parametrize("to", ["file:///etc", "http://127.0.0.1:1/x.git/info/refs"])
def test_loopback_http_leads_nowhere_else(ctx: Context, host: GitHost, repo: Repo, to: str) -> None:
    commit = repo.commit(FILES)
    host.faults = [redirect(to)] * 20
    assert isinstance(failed(ctx, repo, commit), HostError)


def test_mirror_of_a_closed_port(ctx: Context, tmp_path: Path) -> None:
    source = Source(git="http://127.0.0.1:9/x.git", commit="1" * 40)
    with pytest.raises(HostError, match="cannot be fetched"):
        pin_git(ctx, Git(ctx.processes), source)


def test_mirror_of_a_local_repository(ctx: Context, repo: Repo) -> None:
    commit = repo.commit(FILES)
    source = Source(git=f"file://{repo.folder}", commit=commit)
    assert pin_git(ctx, Git(ctx.processes), source).commit == commit


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("whose", ["mirror", "remote"])
def test_mirror_of_another_user_is_refused(ctx: Context, repo: Repo, whose: str) -> None:
    commit = repo.commit(FILES)
    url = f"file://{repo.folder}"
    if whose == "mirror":
        url = repo.url
        pin(ctx, repo, commit)
    folder = mirror_folder(ctx.places, url) if whose == "mirror" else repo.folder
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 12345, 12345)
    with pytest.raises(HostError, match="another user") as caught:
        pin_git(ctx, Git(ctx.processes), Source(git=url, commit=commit))
    assert "chown" in str(caught.value.hint)
    assert caught.value.exit_code == 9


def damage_pack(mirror: Path) -> None:
    for pack in mirror.glob("objects/pack/*.pack"):
        pack.chmod(0o644)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2 :] = b"\0" * (len(data) - len(data) // 2)
        pack.write_bytes(data)


def lose_pack(mirror: Path) -> None:
    shutil.rmtree(mirror / "objects" / "pack")


def lose_head(mirror: Path) -> None:
    (mirror / "HEAD").unlink()


def empty_ref(mirror: Path) -> None:
    for ref in mirror.rglob("refs/bakehouse/commits/*"):
        ref.write_bytes(b"")


def leave_locks(mirror: Path) -> None:
    (mirror / "shallow.lock").write_text("")
    (mirror / "packed-refs.lock").write_text("")
    for ref in mirror.rglob("refs/bakehouse/commits/*"):
        ref.unlink()


@pytest.mark.parametrize("damage", [damage_pack, lose_pack, lose_head, empty_ref, leave_locks])
def test_mirror_that_is_damaged_is_fetched_again(
    ctx: Context, repo: Repo, tmp_path: Path, damage: object
) -> None:
    assert callable(damage)
    big = os.urandom(20_000).hex()
    lock = lock_of(pin(ctx, repo, repo.commit({**FILES, "big": big})))
    damage(mirror_folder(ctx.places, repo.url))
    materialise(ctx, lock, tmp_path / "out")
    assert (tmp_path / "out" / "big").read_text() == big


def test_tree_write_failure_keeps_the_mirror(ctx: Context, repo: Repo, tmp_path: Path) -> None:
    """A name too long stands for all that keeps git from writing: the mirror stays where it is."""
    lock = lock_of(pin(ctx, repo, repo.commit({**FILES, "src/" + "n" * 300: "x\n"})))
    mirror = mirror_folder(ctx.places, repo.url)
    before = sorted(mirror.parent.iterdir())
    git(repo.folder, "update-ref", "-d", "refs/heads/main")
    with pytest.raises(HostError, match=r"the source cannot be written: .*File name too long"):
        materialise(ctx, lock, tmp_path / "out")
    assert sorted(mirror.parent.iterdir()) == before


def test_tree_with_a_changed_object_is_fetched_again(
    ctx: Context, repo: Repo, tmp_path: Path
) -> None:
    """Content that git's own bookkeeping calls whole, and that is not what the tree names."""
    lock = lock_of(pin(ctx, repo, repo.commit(FILES)))
    mirror = mirror_folder(ctx.places, repo.url)
    packs = [p.rename(tmp_path / p.name) for p in mirror.glob("objects/pack/*.pack")]
    for leftover in mirror.glob("objects/pack/*"):
        leftover.unlink()
    for pack in packs:
        git(mirror, "unpack-objects", "-q", stdin=pack.read_bytes())
    blob = git(mirror, "rev-parse", f"{lock.source_tree}:src/main.c")
    other = git(mirror, "hash-object", "-w", "--stdin", stdin=b"int main(void) { return 1; }\n")
    place = mirror / "objects" / blob[:2] / blob[2:]
    place.chmod(0o644)
    place.write_bytes((mirror / "objects" / other[:2] / other[2:]).read_bytes())
    materialise(ctx, lock, tmp_path / "out")
    assert (tmp_path / "out" / "src" / "main.c").read_bytes() == b"int main(void) { return 0; }\n"


def test_tree_refuses_a_folder_that_is_not_empty(ctx: Context, repo: Repo, tmp_path: Path) -> None:
    lock = lock_of(pin(ctx, repo, repo.commit(FILES)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(HostError, match="not empty"):
        materialise(ctx, lock, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "precious"


@pytest.mark.parametrize("which", ["unpatched", "another"])
def test_tree_that_exists_but_not_from_these_patches(
    ctx: Context, repo: Repo, tmp_path: Path, which: str
) -> None:
    source = pin(ctx, repo, repo.commit(FILES))
    patched, other = (patched_lock(ctx, tmp_path, source, text) for text in ("2", "3"))
    wrong = source.tree if which == "unpatched" else other.source_tree
    edited = patched.model_copy(update={"source_tree": wrong})
    with pytest.raises(LockError, match="differs from its pin"):
        ensure_tree(ctx, edited)
    plain = lock_of(source).model_copy(update={"source_tree": other.source_tree})
    with pytest.raises(LockError, match="differs from its pin"):
        ensure_tree(ctx, plain)
    materialise(ctx, patched, tmp_path / "out")
    assert "return 2" in (tmp_path / "out" / "src" / "main.c").read_text()


def test_tree_with_patches_needs_the_diff_once(ctx: Context, repo: Repo, tmp_path: Path) -> None:
    lock = patched_lock(ctx, tmp_path, pin(ctx, repo, repo.commit(FILES)), "2")
    stored(ctx.places, lock.patches[0].file.sha256).unlink()
    ensure_tree(ctx, lock)
    materialise(ctx, lock, tmp_path / "out")
    assert "return 2" in (tmp_path / "out" / "src" / "main.c").read_text()


def patched_lock(ctx: Context, folder: Path, source: GitPin, text: str) -> Lock:
    """Pin a patch that makes main return another number."""
    (folder / "p.patch").write_text(
        "--- a/src/main.c\n+++ b/src/main.c\n@@ -1 +1 @@\n"
        f"-int main(void) {{ return 0; }}\n+int main(void) {{ return {text}; }}\n"
    )
    pins = pin_patches(ctx, folder, [Patch(file="p.patch")])
    made = patched_tree(ctx, Git(ctx.processes, ctx.environment), source, pins)
    return lock_of(source).model_copy(update={"patches": pins, "source_tree": made})


def test_tree_that_differs_from_its_pin(ctx: Context, repo: Repo) -> None:
    found = pin(ctx, repo, repo.commit(FILES))
    wrong = found.model_copy(update={"tree": "3" * 40})
    with pytest.raises(LockError, match="differs from its pin"):
        ensure_tree(ctx, lock_of(wrong))


CHILD = """
import sys
from pathlib import Path
from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.sources.git_mirror import ensure_commit
from bakehouse.system.git import Git
ctx = Context(places=Places(Path(sys.argv[1]), Path(sys.argv[1])), recipes=Path("."))
ensure_commit(ctx, Git(ctx.processes), sys.argv[2], sys.argv[3])
"""


def start_child(ctx: Context, url: str, commit: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", CHILD, str(ctx.places.cache), url, commit]
    return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.getcwd()})


@pytest.mark.parametrize("after", [0.25, 0.55])
def test_mirror_survives_kill_during_fetch(
    ctx: Context, repo: Repo, tmp_path: Path, after: float
) -> None:
    big = os.urandom(4_000_000).hex()
    commit = repo.commit({**FILES, "big": big})
    child = start_child(ctx, repo.url, commit)
    time.sleep(after)
    child.send_signal(signal.SIGKILL)
    child.wait()
    lock = lock_of(pin(ctx, repo, commit))
    materialise(ctx, lock, tmp_path / "out")
    assert (tmp_path / "out" / "big").read_text() == big
    mirror = mirror_folder(ctx.places, repo.url)
    git(mirror, "fsck", "--strict", "--no-dangling")
    assert not list(mirror.glob("objects/pack/tmp_*"))


def test_mirror_of_two_processes_is_fetched_once(ctx: Context, host: GitHost, repo: Repo) -> None:
    commit = repo.commit({**FILES, "big": os.urandom(500_000).hex()})
    children = [start_child(ctx, repo.url, commit) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    alone = host.count
    shutil.rmtree(ctx.places.git)
    host.count = 0
    ensure_commit(ctx, Git(ctx.processes), repo.url, commit)
    assert alone == host.count
