# Sourced by quickstart, test and nightly: finds a Python, makes .venv, installs missing packages.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf '%s\n' "$*" >&2; }

fail() { # what, hint, exit code (9: this machine lacks something)
  say "error: $1"
  [ -z "${2:-}" ] || say "  hint: $2"
  exit "${3:-9}"
}

debian_like() { [ -r /etc/debian_version ] && command -v apt-get >/dev/null; }

# need COMMAND PACKAGE: note the Debian package if the command is missing.
missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }

install_missing() {
  [ ${#missing[@]} -gt 0 ] || return 0
  local packages="${missing[*]}" log
  debian_like || fail "missing: $packages (Debian's names for them)" \
    "install them with this system's package manager, then run this again"
  [ "$(id -u)" -eq 0 ] || fail "missing: $packages" \
    "sudo apt-get update && sudo apt-get install --yes $packages"
  say "Installing Debian packages: $packages"
  log=$(mktemp)
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive \
    apt-get install --yes --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    fail "apt-get could not install: $packages" "the whole output is in $log"
  fi
  rm -f "$log"
  missing=()
}

good_python() {
  "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
    >/dev/null 2>&1
}

find_python() {
  local name
  for name in ${BAKEHOUSE_PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && good_python "$name"; then
      python=$name
      return
    fi
  done
  if ! command -v python3 >/dev/null; then
    missing+=(python3 python3-venv)
    install_missing
    python=python3
    if good_python "$python"; then return; fi
  fi
  fail "no Python 3.11 to 3.14 found" \
    "install one, or name it: BAKEHOUSE_PYTHON=/path/to/python3"
}

# make_venv [EXTRA]: .venv with Bakehouse installed; instant if nothing changed.
make_venv() {
  local extra=${1:-} wanted stamp=.venv/bakehouse-installed
  find_python
  if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    missing+=("$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')")
    install_missing
  fi
  if ! .venv/bin/python -c '' >/dev/null 2>&1; then
    say "Making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  wanted="$(cat pyproject.toml constraints.txt | cksum) $root"
  case "$(cat "$stamp" 2>/dev/null)" in
    "$wanted $extra" | "$wanted test") return ;;
  esac
  say "Installing Bakehouse into .venv"
  rm -f "$stamp"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extra:+[$extra]}" >&2 ||
    fail "pip could not install Bakehouse" \
      "pip's own message is above; 'pip config' sets a proxy or another index"
  printf '%s' "$wanted $extra" >"$stamp"
}
