# Sourced by the scripts beside it: `make_venv EXTRA` makes, fills and activates $VENV.
#
#   VENV    folder of the virtual environment (default .venv in the repository)
#   PYTHON  Python to make it with, at least 3.11 (default python3)

VENV="${VENV:-.venv}"
PYTHON="${PYTHON:-python3}"

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Runs a quiet command, with a line every ten seconds so that the wait is seen to be one.
with_ticks() {
  local what=$1 pid status=0 waited=0
  shift
  "$@" &
  pid=$!
  # Where the shell is interrupted, so is the command.
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    ((waited % 10)) || echo "  $what: $waited s"
  done
  wait "$pid" || status=$?
  trap - INT TERM
  return "$status"
}

# Installs this package with an extra ("" = none), once per change of setup.py.
make_venv() {
  local extra=$1 target='.' stamp="$VENV/installed-$1"
  if [[ ! -x "$VENV/bin/pip" ]]; then
    command -v "$PYTHON" >/dev/null || fail "$PYTHON not found; set PYTHON to a Python >= 3.11"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      fail "$PYTHON is older than 3.11; set PYTHON, e.g. PYTHON=python3.12 $0"
    "$PYTHON" -m venv "$VENV" ||
      fail "$PYTHON cannot make $VENV; its venv module may be missing (Debian: apt install python3-venv)"
  fi
  # shellcheck disable=SC1091
  source "$VENV/bin/activate"
  if [[ ! "$stamp" -nt setup.py ]]; then
    [[ -z "$extra" ]] || target=".[$extra]"
    echo "installing into $VENV: pip install -e '$target'"
    with_ticks "installing" python -m pip install -qq --disable-pip-version-check -e "$target" ||
      fail "pip install failed"
    touch "$stamp"
  fi
}
