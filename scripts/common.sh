# What the set-up scripts share: sourced by them, in the repository's root.
#
#   PYTHON=/path/to/python3.12   which interpreter to use (default: the first 3.12 found)

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
