#!/usr/bin/env bash
# The whole circle on one machine: makes .venv, installs, runs every step, writes report.html.
#
#   launch/quickstart.sh [--config.KEY=VALUE ...]     further words go to every step
#
#   CONFIG   config file (default configs/quickstart.py)
#   WORKDIR  where the run's files go (default runs/quickstart)
#   VENV, PYTHON: see venv.sh. Paths are relative to the repository.
#
# Every step is a command that can be run alone; finished steps are skipped, broken ones continue.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

CONFIG="${CONFIG:-configs/quickstart.py}"
WORKDIR="${WORKDIR:-runs/quickstart}"
# The quickstart's sizes are made for a CPU; set JAX_PLATFORMS=cuda or tpu to use another device.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

step() {
  local command=(python -m mdlm_jax "$@" --workdir="$WORKDIR")
  printf '\n$'
  printf ' %q' "${command[@]}"
  printf '\n'
  "${command[@]}"
}

if [[ ! "$VENV/installed-" -nt setup.py ]]; then
  make_venv ""
  mkdir -p "$WORKDIR"
  printf '{"program": "install", "what": "", "kind": "", "seconds": %d}\n' "$SECONDS" \
    >>"$WORKDIR/wall.jsonl"
  echo "installed in $SECONDS s"
else
  make_venv ""
fi

echo "to run a step by hand: cd $PWD && source $VENV/bin/activate && export JAX_PLATFORMS=$JAX_PLATFORMS"
step collect --config="$CONFIG" "$@"
step sft --what=world --config="$CONFIG" "$@"
step sft --what=world --config="$CONFIG" "$@" --config.world.kind=autoregressive
step sft --what=policy --config="$CONFIG" "$@"
step evaluate --what=world --config="$CONFIG" "$@"
step grpo --config="$CONFIG" "$@"
step evaluate --what=agent --config="$CONFIG" "$@"
step report --config="$CONFIG" "$@"

echo
echo "all steps took $((SECONDS / 60)) min $((SECONDS % 60)) s; open $WORKDIR/report.html"
