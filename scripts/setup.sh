#!/usr/bin/env bash
# Makes .venv with everything this repository needs: pinned versions, no GPU required. Runs once; a
# second call returns at once unless one of the files that define the environment has changed.
#
#   PYTHON=/path/to/python3.12   which interpreter to use (default: the first 3.12 found)
#   KIMI_BRIDGE_WHEELS=DIR       a folder with a transformer_engine_torch wheel, if you have one
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv
. scripts/common.sh

stamp=$(stamp_of pyproject.toml scripts/common.sh scripts/setup.sh scripts/constraints.txt scripts/overrides.txt)
if [ "$(cat "$venv/.kimi-bridge-setup" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

make_venv "$venv"
wheels=$(find_te_wheel) || { build_te_wheel; wheels=$cache; }
say "installing the pinned packages into .venv (6 GB, one to five minutes)"
uv pip install --quiet --compile-bytecode --python "$venv" --find-links "$wheels" \
  --constraint scripts/constraints.txt --override scripts/overrides.txt --editable '.[megatron,multimodal,dev]'
echo "$stamp" > "$venv/.kimi-bridge-setup"
say "done"
