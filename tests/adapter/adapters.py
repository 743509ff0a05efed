"""Adapters with random A and B, written as the exporter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_bridge.adapter import ModuleSpec, fold_scale, plan_adapter, save_adapter
from kimi_bridge.adapter.peft_format import CONFIG_NAME, WEIGHTS_NAME, Target, linear_modules, tensor_name
from kimi_bridge.checkpoint import CheckpointReader

LAYERS = "language_model.model.layers."
# One of each kind; the tiny checkpoint's layer 0 is dense.
Q_A = LAYERS + "0.self_attn.q_a_proj"
O_PROJ = LAYERS + "1.self_attn.o_proj"
DENSE = LAYERS + "0.mlp.down_proj"
SHARED = LAYERS + "2.mlp.shared_experts.up_proj"
EXPERT = LAYERS + "1.mlp.experts.3.down_proj"
EXPERTS = [f"{LAYERS}{layer}.mlp.experts.{e}.gate_proj" for layer in (1, 2) for e in range(8)]
MODULES = [Q_A, O_PROJ, DENSE, SHARED, EXPERT, *EXPERTS]

Pair = tuple[Tensor, Tensor]


def modules_of(base: Path) -> list[str]:
    """MODULES, with a Kimi-VL's name for the queries."""
    direct = Q_A.replace("q_a_proj", "q_proj")
    return [direct if direct + ".weight" in CheckpointReader(base) else Q_A, *MODULES[1:]]


def specs_of(
    base: Path,
    modules: Iterable[str] = MODULES,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, ModuleSpec]:
    """Rank 4 and alpha 8 where nothing else is said."""
    reader = CheckpointReader(base)
    specs = {}
    for module in modules:
        rows, columns = reader.shape(module + ".weight")
        rank, alpha = (ranks or {}).get(module, 4), (alphas or {}).get(module, 8.0)
        specs[module] = ModuleSpec(rank, alpha, dtype, (rows, columns))
    return specs


def random_pairs(specs: Mapping[str, ModuleSpec], gain: float = 0.05, seed: int = 0) -> dict[str, Pair]:
    """A and B without a zero; updates of about `gain` in each weight for scale 2."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for module, spec in specs.items():
        a = torch.randn(spec.rank, spec.shape[1], generator=generator) / 2
        b = torch.randn(spec.shape[0], spec.rank, generator=generator) * gain / spec.rank**0.5
        pairs[module] = (a.to(spec.dtype), b.to(spec.dtype))
    return pairs


def write(
    dst: Path,
    base: Path,
    specs: Mapping[str, ModuleSpec],
    pairs: Mapping[str, Pair],
    target: Target = "peft",
    **options: Any,
) -> Path:
    plan = plan_adapter(specs, CheckpointReader(base), target, **options)
    tensors = []
    for module, (a, b) in pairs.items():
        folded = fold_scale(b, specs[module].scale) if target == "vllm" else b
        tensors += [(tensor_name(module, "A"), a), (tensor_name(module, "B"), folded)]
    save_adapter(dst, plan, tensors)
    return dst


def adapter(dst: Path, base: Path, gain: float = 0.05, target: Target = "peft") -> Path:
    specs = specs_of(base, modules_of(base))
    return write(dst, base, specs, random_pairs(specs, gain), target)


def others(base: Path, modules: Iterable[str]) -> set[str]:
    return linear_modules(CheckpointReader(base)).keys() - set(modules)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(
    folder: Path, edit: Callable[[dict[str, Tensor]], None], metadata: dict[str, str] | None = None
) -> None:
    """Rewrites the tensors; the notes on the base go unless they are given again."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS_NAME).items()}
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_NAME, metadata=metadata)
