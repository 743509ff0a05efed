"""What `kimi-bridge doctor` looks at."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SETUP = "scripts/setup.sh of the repository installs it"


@dataclass(frozen=True)
class Finding:
    """One row: a package or a tool, whether it works here, and what to do if not."""

    name: str
    version: str | None
    works: bool
    needed: bool
    note: str


# Distribution, the module whose import proves that it works, whether the core needs it, what it is for.
_PACKAGES = (
    ("torch", "torch", True, "tensors"),
    ("safetensors", "safetensors.torch", True, "reading and writing shards"),
    ("transformers", "transformers", True, "configs and tokenizers"),
    ("compressed-tensors", "compressed_tensors", True, "reading quantization configs"),
    ("huggingface-hub", "huggingface_hub", True, "downloads"),
    ("megatron-core", "megatron.core", False, "import, export, training: pip extra [megatron]"),
    ("megatron-bridge", "kimi_bridge.megatron", False, "import, export, training: pip extra [megatron]"),
    ("transformer-engine", "transformer_engine.pytorch", False, f"megatron-bridge imports it: {SETUP}"),
    ("vllm", "vllm", False, "serving: pip extra [vllm], best in an environment of its own"),
    ("ray", "ray", False, "clusters: pip extra [ray]"),
)


def examine() -> list[Finding]:
    """Imports each package in a process of its own (two at a time), and looks for a GPU and nvcc."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        packages = list(pool.map(lambda row: _examine_package(*row), _PACKAGES))
    return [_python(), *packages, _gpu(), _nvcc()]


def _examine_package(distribution: str, module: str, needed: bool, purpose: str) -> Finding:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Finding(distribution, None, False, needed, purpose)
    fault = _import_fault(module)
    return Finding(distribution, version, fault is None, needed or fault is not None, fault or purpose)


def _import_fault(module: str) -> str | None:
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return f"import {module} did not finish within 300 s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"import {module} fails: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    works = sys.version_info[:2] >= (3, 12)
    return Finding("python", version, works, True, "megatron-bridge needs 3.12")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Finding("GPU", f"{torch.cuda.device_count()} x {', '.join(names)}", True, False, "NCCL")
    return Finding("GPU", None, False, False, "conversions run on the CPU under gloo; training needs a GPU")


def _nvcc() -> Finding:
    path = shutil.which("nvcc") or shutil.which(
        "nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    )
    if path is None:
        return Finding("nvcc", None, False, False, "only for building Transformer Engine from source")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return Finding(
        "nvcc", lines[-1].split("/")[0].removeprefix("Build ") if lines else "?", True, False, path
    )
