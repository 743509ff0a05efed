"""Random adapters for a synthesized checkpoint, as PEFT would write them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_bridge.checkpoint.synthetic_config import weight_specs

ATTENTION = r"self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)"
EXPERTS = r"mlp\.experts\.\d+\.(gate|up|down)_proj"
SHARED = r"mlp\.(shared_experts\.)?(gate|up|down)_proj"
ROUTER = r"mlp\.gate"


def random_adapter(
    checkpoint: Path, pattern: str, rank: int = 4, seed: int = 0, size: float = 0.05
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of an adapter on every module of the language model whose name ends in `pattern`.

    `size` is about the ratio of the change's norm to the weight's, if that has rows of norm one.
    """
    tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for module, (rows, columns) in language_modules(checkpoint).items():
        if re.search(rf"\.{pattern}$", module):
            a = torch.randn(rank, columns, generator=generator) * columns**-0.5
            b = torch.randn(rows, rank, generator=generator) * size * (columns / rank) ** 0.5 * rows**-0.5
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.bfloat16()
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.bfloat16()
    targets = sorted({name.split(".")[-3] for name in tensors})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}, tensors


def language_modules(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Linear layers of the language model: name -> (rows, columns)."""
    config = json.loads((checkpoint / "config.json").read_text())
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, _, shape in weight_specs(config)
        if name.startswith("language_model.model.layers.") and len(shape) == 2
    }


def save_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, *adapters: dict[str, Tensor]) -> Path:
    """Adds every B A, computed in float32, to the weights of the bf16 checkpoint in `folder`."""
    for shard in sorted(folder.glob("*.safetensors")):
        weights = load_file(shard)
        for name, weight in weights.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for tensors in adapters:
                if f"{stem}.lora_A.weight" in tensors:
                    a, b = (tensors[f"{stem}.lora_{matrix}.weight"].float() for matrix in "AB")
                    weights[name] = (weights[name].float() + b @ a).to(weight.dtype)
        save_file(weights, shard, {"format": "pt"})
    return folder


def calm(checkpoint: Path) -> Path:
    """Makes the logits of random weights a sixteenth: bfloat16 rounds those of 10 to steps of 0.06.

    Differences of log-probabilities shrink alike, those that are asserted to be small and to be large.
    """
    for shard in sorted(checkpoint.glob("*.safetensors")):
        weights = load_file(shard)
        if "language_model.lm_head.weight" in weights:
            weights["language_model.lm_head.weight"] /= 16
            save_file(weights, shard, {"format": "pt"})
    return checkpoint
