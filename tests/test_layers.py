"""Imports point downward only, and looking at the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "kimi_bridge"
PATCHES = ROOT.parent / "patches"

# What each part of the package may import of the others; `errors` and `progress` are for all.
LAYERS = {
    "int4": set(),
    "conversion": {"int4"},
    "checkpoint": {"int4", "conversion"},
    "adapter": {"int4", "checkpoint", "conversion"},
    "megatron": {"int4", "checkpoint", "adapter"},
    "inference": set(),
    "multimodal": set(),
    "integrations": {"int4", "checkpoint", "megatron", "patches", "ray_env"},
    "ray_env": set(),
    "sequence_parallel": set(),
    "patches": {"sequence_parallel"},
    "doctor": set(),
    "demo": {"checkpoint"},
    "report": {"adapter", "checkpoint"},
    "cli_convert": {"int4", "adapter", "checkpoint", "report"},
    "cli": {"checkpoint", "megatron", "doctor", "demo", "report", "cli_convert"},
    "__main__": {"cli"},
}
THIRD_PARTY = {
    "megatron": {"megatron"},
    "transformer_engine": {"megatron"},
    "vllm": {"inference", "patches"},
    "ray": {"checkpoint", "integrations"},
}
COMMON = {"errors", "progress"}


def imported(file: Path) -> set[str]:
    """Full names of what a file imports, wherever in it, without what only type checkers see."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def place(file: Path) -> Path:
    """Where the file lies in the installed package."""
    return Path("patches") / file.name if file.parent == PATCHES else file.relative_to(ROOT)


@pytest.mark.parametrize(
    "file", sorted([*ROOT.rglob("*.py"), *PATCHES.glob("*.py")]), ids=lambda f: str(place(f))
)
def test_imports_point_downward(file: Path) -> None:
    relative = place(file)
    part = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    for name in imported(file):
        top, *rest = name.split(".")
        if top == "kimi_bridge" and rest and part not in COMMON:
            assert rest[0] in LAYERS[part] | COMMON | {part}, f"{relative} imports {name}"
        if top in THIRD_PARTY:
            assert part in THIRD_PARTY[top], f"{relative} imports {name}"
        if top == "ray":
            assert relative.name in ("convert_ray.py", "skyrl.py"), f"{relative} imports {name}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import kimi_bridge", ("torch", "transformers", "megatron", "vllm", "ray")),
        ("import kimi_bridge.checkpoint", ("megatron", "transformer_engine", "vllm", "ray")),
        (
            "import kimi_bridge.multimodal",
            ("megatron", "transformer_engine", "transformers", "vllm", "ray"),
        ),
        ("import kimi_bridge.inference", ("megatron", "transformer_engine", "transformers", "vllm", "ray")),
        ("import kimi_bridge.sequence_parallel", ("megatron", "transformers", "vllm", "ray")),
        (
            "import kimi_bridge.integrations.skyrl",
            ("torch", "transformers", "megatron", "vllm", "ray", "skyrl"),
        ),
        ("import kimi_bridge.ray_env", ("torch", "transformers", "megatron", "vllm", "ray")),
        ("import kimi_bridge.cli", ("torch", "transformers", "megatron", "vllm", "ray")),
    ],
)
def test_import_costs_nothing(statement: str, absent: tuple[str, ...]) -> None:
    script = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
