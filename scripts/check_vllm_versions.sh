#!/usr/bin/env bash
# Runs the checks of the LoRA patch against other vLLM versions, each in an environment that is thrown away.
# Needs a network and about 9 GB on the disk of $TMPDIR; not part of CI.
#
#   scripts/check_vllm_versions.sh [VERSION...]    default: the newest of the registry, and 0.30.0
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
versions=("$@")
[ $# -gt 0 ] || versions=(newest 0.30.0)
passed=() failed=()
for version in "${versions[@]}"; do
  venv=$work/venv
  rm -rf "$venv"
  make_venv "$venv"
  requirement=vllm
  if [ "$version" != newest ]; then requirement="vllm==$version"; fi
  say "installing $requirement"
  "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv" "$requirement" 'compressed-tensors>=0.17' peft pytest pytest-timeout
  "$venv/bin/uv" pip install --quiet --python "$venv" --no-deps --editable .
  found=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm"))')
  say "vllm $found"
  if "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/patches tests/inference; then
    passed+=("$found")
  else
    failed+=("$found")
  fi
done
say "passed on vLLM: ${passed[*]:-none}; failed on: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
