#!/usr/bin/env bash
# Makes .venv, installs the test extra, then lint, format and tests.
#
#   launch/test.sh [pytest arguments, default: tests]     VENV, PYTHON: see venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

make_venv test
export JAX_PLATFORMS=cpu
ruff check .
ruff format --check .
python -m pytest "${@:-tests}"
