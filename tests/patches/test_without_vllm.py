"""Where vLLM is not installed the patches say nothing, and importing them costs nothing anywhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


def printed(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_silent_without_vllm() -> None:
    done = printed(
        "import logging; logging.basicConfig(level=0)\n"
        "import kimi_bridge.patches.auto as auto, sys\n"
        "print(auto.APPLIED, len(sys.meta_path))\n"
        "import sys; print(len(sys.meta_path))"
    )
    first, _ = done.stdout.splitlines()
    assert first.startswith("{'vllm_kimi_k25_lora': 'vLLM is not installed.'}")
    assert done.stderr == ""


def test_importing_costs_nothing() -> None:
    script = (
        "import kimi_bridge.patches, kimi_bridge.patches.vllm_kimi_k25_lora, sys\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'megatron') if name in sys.modules])"
    )
    assert printed(script).stdout.strip() == "[]"
