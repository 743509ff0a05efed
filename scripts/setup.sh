#!/usr/bin/env bash
# Makes .venv with everything this repository needs: pinned versions, no GPU required. Runs once; a
# second call returns at once unless one of the files that define the environment has changed.
#
#   PYTHON=/path/to/python3.12   which interpreter to use (default: the first 3.12 found)
#   KIMI_BRIDGE_WHEELS=DIR       a folder with a transformer_engine_torch wheel, if you have one
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$root/.venv
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kimi-bridge/wheels
te_version=2.12.0

. scripts/common.sh

stamp=$(stamp_of pyproject.toml scripts/common.sh scripts/setup.sh scripts/constraints.txt scripts/overrides.txt)
if [ "$(cat "$venv/.kimi-bridge-setup" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

make_venv "$venv"
uv() { "$venv/bin/uv" "$@"; }

# One Transformer Engine wheel: a folder the user names, one beside this clone, or one built before.
find_te_wheel() {
  local folder
  for folder in "${KIMI_BRIDGE_WHEELS:-}" "$root/wheels" "$root"/../wheels "$root"/../*/wheels "$cache"; do
    if [ -n "$folder" ] && compgen -G "$folder/transformer_engine_torch-$te_version-cp312-*_$(uname -m).whl" >/dev/null; then
      (cd "$folder" && pwd); return
    fi
  done
  return 1
}

# The toolkit's folder: nvcc on PATH may be a wrapper that lies elsewhere, so its headers decide.
find_cuda() {
  local candidate nvcc
  nvcc=$(command -v nvcc || true)
  for candidate in "${CUDA_HOME:-}" "${nvcc:+$(dirname "$(dirname "$(readlink -f "$nvcc")")")}" /usr/local/cuda \
    /usr/local/cuda-13*; do
    if [ -n "$candidate" ] && [ -x "$candidate/bin/nvcc" ] && [ -e "$candidate/include/crt/host_defines.h" ]; then
      echo "$candidate"; return
    fi
  done
  return 1
}

build_te_wheel() {
  local cuda site work
  cuda=$(find_cuda) || fail "nvcc is needed to build Transformer Engine $te_version and was not found: install the CUDA 13 toolkit (or set CUDA_HOME), or put a transformer_engine_torch wheel into wheels/."
  say "no Transformer Engine wheel found: building one from source with $cuda. This takes about ten minutes, once."
  uv pip install --quiet --compile-bytecode --python "$venv" --constraint scripts/constraints.txt torch numpy \
    "transformer-engine-cu13==$te_version" setuptools pybind11 ninja
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  work=$(mktemp -d)
  # Expanded now: when it runs, the function and its variables are gone.
  trap "rm -rf '$work'" EXIT
  CUDA_HOME=$cuda NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-$(nproc)} PATH="$venv/bin:$PATH" \
    CPATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/nvidia/cu13/include${CPATH:+:$CPATH}" \
    "$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --no-binary :all: --wheel-dir "$work" "transformer-engine-torch==$te_version" \
    || fail "Transformer Engine did not build: the compiler's message stands above."
  mkdir -p "$cache"
  mv "$work"/*.whl "$cache/"
}

wheels=$(find_te_wheel) || { build_te_wheel; wheels=$cache; }
say "installing the pinned packages into .venv (6 GB, one to five minutes)"
uv pip install --quiet --compile-bytecode --python "$venv" --find-links "$wheels" \
  --constraint scripts/constraints.txt --override scripts/overrides.txt --editable '.[megatron,multimodal,dev]'
echo "$stamp" > "$venv/.kimi-bridge-setup"
say "done"
