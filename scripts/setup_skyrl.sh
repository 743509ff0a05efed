#!/usr/bin/env bash
# Makes .venv-skyrl: SkyRL 0.3.0 with the Megatron stack it was made for and this package, for the tests of
# kimi_bridge.integrations.skyrl. No GPU and no vLLM. Runs once, like setup.sh.
#
#   PYTHON=/path/to/python3.12   which interpreter to use (default: the first 3.12 found)
#   KIMI_BRIDGE_WHEELS=DIR       a folder with a transformer_engine_torch wheel, if you have one
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-skyrl
. scripts/common.sh

stamp=$(stamp_of pyproject.toml scripts/common.sh scripts/setup_skyrl.sh scripts/constraints.txt \
  scripts/constraints-skyrl.txt scripts/overrides.txt)
if [ "$(cat "$venv/.kimi-bridge-setup" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

make_venv "$venv"
wheels=$(find_te_wheel) || { build_te_wheel; wheels=$cache; }
# constraints.txt, less the names that constraints-skyrl.txt has: those come from there.
constraints=$venv/constraints.txt
names=$(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' scripts/constraints-skyrl.txt | paste -sd'|')
{ grep -vE "^($names)==" scripts/constraints.txt; cat scripts/constraints-skyrl.txt; } > "$constraints"
say "installing SkyRL 0.3.0 and what it trains with into .venv-skyrl (6 GB, one to five minutes)"
uv pip install --quiet --compile-bytecode --python "$venv" --find-links "$wheels" \
  --constraint "$constraints" --override scripts/overrides.txt --editable '.[megatron,dev]' \
  cloudpathlib func-timeout hydra-core jaxtyping omegaconf pandas polars tensordict torchdata uvicorn fastapi
# Without its dependencies: they name vLLM, flash-attn and packages for other clouds.
uv pip install --quiet --compile-bytecode --python "$venv" --constraint "$constraints" --no-deps skyrl skyrl-gym
# SkyRL 0.4.0 wants a newer Megatron-Bridge than any release: what of it imports here is tested from this folder.
uv pip install --quiet --python "$venv" --target "$venv/skyrl-0.4.0" --no-deps skyrl==0.4.0
echo "$stamp" > "$venv/.kimi-bridge-setup"
say "done"
