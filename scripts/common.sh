# What the set-up scripts share: sourced by them, in the repository's root.
# Each of them names its environment in $venv.
#
#   PYTHON=/path/to/python3.12   which interpreter to use (default: the first 3.12 found)
#   KIMI_BRIDGE_WHEELS=DIR       a folder with a transformer_engine_torch wheel, if you have one

root=$PWD
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kimi-bridge/wheels
te_version=2.12.0

uv() { "$venv/bin/uv" "$@"; }
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }
say() { printf 'setup: %s\n' "$1"; }

is_312() { [ -x "$(command -v "$1" 2>/dev/null)" ] && "$1" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 python \
    "$HOME"/.pyenv/versions/3.12*/bin/python "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12 \
    /usr/local/bin/python3.12 /opt/python*/bin/python3.12; do
    if [ -n "$candidate" ] && is_312 "$candidate"; then echo "$candidate"; return; fi
  done
  if command -v uv >/dev/null 2>&1 && candidate=$(uv python find 3.12 2>/dev/null) && is_312 "$candidate"; then
    echo "$candidate"; return
  fi
  return 1
}

# make_venv FOLDER: a virtual environment of Python 3.12 with its own uv; does nothing where it is there.
make_venv() {
  local python
  python=$(find_python) || fail "Python 3.12 is needed and was not found: install it (megatron-bridge supports no other), or set PYTHON=/path/to/python3.12."
  [ "$(uname -s)" = Linux ] || fail "Megatron and vLLM need Linux; this is $(uname -s)."
  if ! is_312 "$1/bin/python"; then
    say "making $(basename "$1") with $("$python" --version)"
    "$python" -m venv --clear "$1"
  fi
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
}

# stamp_of FILES...: changes when one of the files that define an environment does.
stamp_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

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
