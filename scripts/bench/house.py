"""Size of the code and its ways: modules, lines, imports, files passed through, tests, start-up.

    python scripts/bench/house.py [--recipe NAME] [--serve]

What is counted:

* modules, lines: `.py` files of `bakehouse/` and their lines; an `__init__.py` counts as lines, not
  as a module.
* imports: modules of Bakehouse in `sys.modules` at the end of the task, without packages.
* passed through: files of Bakehouse in which a function ran, in any process of the task (the
  supervisor of a server as well), except functions that only ran while a module was imported.
  `--serve` starts a real server, verifies and stops it; BAKEHOUSE_HOME has to hold its build, or
  building is counted as well.
* test items: what pytest collects, all levels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import startup

ROOT = startup.ROOT
PACKAGE = ROOT / "bakehouse"

TRACE = """
import atexit, os, sys, threading
PACKAGE, OUT, seen, skipped = {package!r}, {out!r}, set(), set()
def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or code in skipped or code in seen:
        return
    if not code.co_filename.startswith(PACKAGE) or not code.co_flags & 1:
        skipped.add(code)
        return
    above = frame.f_back
    while above is not None:
        outer = above.f_code
        if outer.co_name == "<module>" and outer.co_filename.startswith(PACKAGE) \\
                and above.f_globals["__name__"] != "__main__":
            return
        above = above.f_back
    seen.add(code)
def save():
    sys.setprofile(None)
    with open(os.path.join(OUT, f"{{os.getpid()}}-{{id(seen)}}"), "w") as file:
        file.write("\\n".join({{code.co_filename for code in seen}}))
real = os._exit
def leave(code):
    save()
    real(code)
atexit.register(save)
os._exit = leave
os.register_at_fork(after_in_child=seen.clear)
threading.setprofile(profile)
sys.setprofile(profile)
"""
"""A `sitecustomize` that notes in which files functions run; children find it by PYTHONPATH."""

IMPORTS = """
import sys
from bakehouse.cli import main
main(sys.argv[1], eval(sys.argv[2]), json=True)
names = [n for n, m in sys.modules.items()
         if n.startswith("bakehouse.") and not hasattr(m, "__path__")]
print(len(names), file=sys.stderr)
"""


def modules_and_lines() -> tuple[int, int]:
    """Count modules and lines."""
    files = list(PACKAGE.rglob("*.py"))
    modules = sum(path.name != "__init__.py" for path in files)
    return modules, sum(len(path.read_text().splitlines()) for path in files)


def imported(task: str, options: dict[str, Any]) -> int:
    """Count the modules of Bakehouse that a task imports."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, task, repr(options)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stderr.splitlines()[-1])


def passed_through(*argv: str) -> set[str]:
    """Run a task with `invoke`; return the files in which functions ran. Raises SystemExit."""
    with tempfile.TemporaryDirectory() as folder:
        site, out = Path(folder, "site"), Path(folder, "out")
        site.mkdir()
        out.mkdir()
        (site / "sitecustomize.py").write_text(
            TRACE.format(package=f"{PACKAGE}{os.sep}", out=str(out))
        )
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [startup.INVOKE, *argv, "--json"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"invoke {' '.join(argv)}: {json.loads(done.stdout)['error']}")
        if argv[0] == "serve" and "--dry-run" not in argv:
            recipe = argv[argv.index("--recipe") + 1]
            subprocess.run(
                [startup.INVOKE, "stop", "--recipe", recipe],
                cwd=ROOT, check=True, capture_output=True,
            )  # fmt: skip
        return {name for file in out.iterdir() for name in file.read_text().splitlines()}


def test_items() -> int:
    """Count the tests that pytest collects."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--durations=0"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sum("::" in line for line in done.stdout.splitlines())


def main() -> None:
    """Print a table: figure, target, value."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="smollm2-cpu")
    parser.add_argument("--serve", action="store_true", help="start a real server as well")
    given = parser.parse_args()
    recipe = given.recipe
    rows: list[tuple[str, str, str]] = []

    def row(name: str, most: str, value: object) -> None:
        rows.append((name, most, str(value)))

    modules, lines = modules_and_lines()
    row("modules", "140", modules)
    row("lines", "36000", lines)
    row("modules imported by serve --dry-run", "130",
        imported("serve", {"recipe": recipe, "dry_run": True}))  # fmt: skip
    row("modules imported by plan", "85", imported("plan", {"recipe": recipe}))
    row("files that plan passes through", "", len(passed_through("plan", "--recipe", recipe)))
    if given.serve:
        files = passed_through("serve", "--recipe", recipe, "--port", "0")
        row("files that serve passes through", "60", len(files))
    row("test items", "2800", test_items())
    seconds = [statistics.median(values) for values in startup.measure(recipe).values()]
    row("invoke --list against a bare task file", "1.10", f"{seconds[1] / seconds[0]:.2f}")
    row("invoke plan, seconds", "", f"{seconds[2]:.2f}")
    width = max(len(name) for name, *_ in rows)
    for name, most, value in rows:
        print(f"{name:{width}}  {value:>6}{f'  of at most {most}' if most else ''}")


if __name__ == "__main__":
    main()
