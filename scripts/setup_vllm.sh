#!/usr/bin/env bash
# Makes .venv-vllm: vLLM and this package, for serving and for the tests that need the real vLLM. It is
# an environment of its own, since Megatron and vLLM together would start slowly. Runs once, like setup.sh.
#
#   PYTHON=/path/to/python3.12   which interpreter to use (default: the first 3.12 found)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-vllm
. scripts/common.sh

stamp=$(stamp_of pyproject.toml scripts/common.sh scripts/setup_vllm.sh scripts/constraints-vllm.txt)
if [ "$(cat "$venv/.kimi-bridge-setup" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

make_venv "$venv"
say "installing the pinned packages into .venv-vllm (8 GB, one to five minutes)"
"$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv" \
  --constraint scripts/constraints-vllm.txt --editable '.[vllm]' peft pytest pytest-timeout
echo "$stamp" > "$venv/.kimi-bridge-setup"
say "done"
