"""An adapter on its way to vLLM's workers: packed without pickle, and checked for what vLLM gets wrong.

Tensors are named as in PEFT's files: `base_model.model.M.lora_A.weight` [r, in] and `....lora_B.weight`
[out, r], where M is `language_model.model.layers.3.mlp.experts.17.gate_proj` or its like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_bridge.errors import KimiBridgeError

# One message to a vLLM process holds at most 4 GiB of bytes in one piece.
_PART_BYTES = 256 << 20

_CURE = (
    "vLLM serves a scale of 1 alone as it was trained, so multiply the scale into lora_B "
    "(this library's exports for vLLM have it there) and set lora_alpha to r"
)

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def pack_adapter(tensors: Named, part_bytes: int = _PART_BYTES) -> list[bytes]:
    """Safetensors files as bytes, each about `part_bytes` long: what vLLM's RPC carries as it is."""
    parts: list[bytes] = []
    bucket: dict[str, Tensor] = {}
    seen: set[str] = set()
    size = 0
    for name, tensor in _pairs(tensors):
        if name in seen:
            raise KimiBridgeError(f"The adapter has {name} twice: send each tensor once.")
        seen.add(name)
        if bucket and size + tensor.nbytes > part_bytes:
            parts.append(_save(bucket))
            bucket, size = {}, 0
        # A copy, since safetensors takes no tensors that share memory.
        bucket[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    return [*parts, _save(bucket)] if bucket else parts


def unpack_adapter(tensors: Named | Sequence[bytes]) -> dict[str, Tensor]:
    """Named tensors from what `pack_adapter` made, or from named tensors themselves.

    Raises KimiBridgeError for a name that comes twice and for bytes that are no safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    found: dict[str, Tensor] = {}
    for item in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if isinstance(item, bytes | bytearray | memoryview):
            try:
                pairs = list(load(bytes(item)).items())
            except SafetensorError as error:
                raise KimiBridgeError(
                    f"A part of the adapter is damaged ({error}): send what pack_adapter made."
                ) from error
        else:
            pairs = [item]
        for name, tensor in pairs:
            if name in found:
                raise KimiBridgeError(f"The adapter has {name} twice: send each tensor once.")
            found[name] = tensor
    return found


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as adapter_config.json would have it; PEFT's own objects hold sets and enums."""
    return json.loads(json.dumps(dict(config), default=lambda value: sorted(value)))


def check_adapter(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], max_rank: int | None = None
) -> None:
    """Raises KimiBridgeError for an adapter that vLLM would serve otherwise than it was trained.

    vLLM knows one scale, `lora_alpha / r`, multiplies it into lora_B in place at every load, and ignores
    alpha_pattern and rank_pattern: every scale must be 1. Each module needs lora_A [r, in] and lora_B
    [out, r] of the rank that the config states, at most `max_rank`.
    """
    if not isinstance(config, Mapping):
        raise KimiBridgeError("The adapter's config is no dict: send the content of adapter_config.json.")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if config.get(key) is None]
    if missing:
        raise KimiBridgeError(
            f"The adapter's config lacks {', '.join(missing)}: send the content of adapter_config.json."
        )
    if not tensors:
        raise KimiBridgeError("The adapter has no tensors: send what iter_adapter_tensors yields.")
    if config.get("use_rslora"):
        # For experts vLLM computes lora_alpha / r all the same.
        raise KimiBridgeError(
            f"The adapter uses rsLoRA, which vLLM does not apply to experts: {_CURE} and use_rslora to false."
        )
    _check_scale(config["lora_alpha"], config["r"], "r and lora_alpha")
    for module, rank in _ranks(tensors).items():
        stated = _by_pattern(config.get("rank_pattern"), module, config["r"])
        if rank != stated:
            raise KimiBridgeError(
                f"{module} has rank {rank} and the config says {stated}: send both of the same adapter."
            )
        if max_rank is not None and rank > max_rank:
            raise KimiBridgeError(
                f"{module} has rank {rank}, vLLM was started for {max_rank}: set --max-lora-rank."
            )
        _check_scale(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]), rank, module)


def _pairs(tensors: Named) -> Iterable[tuple[str, Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _save(bucket: dict[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save(bucket)


def _ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Module -> rank of its pair of matrices."""
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in ("lora_A", "lora_B") or not name.endswith(".weight"):
            raise KimiBridgeError(f"{name} is no LoRA tensor: names end in .lora_A.weight or .lora_B.weight.")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise KimiBridgeError(f"{name} is {tensor.dtype}, or holds NaN or Inf: do not serve it.")
        if tensor.ndim != 2:
            raise KimiBridgeError(f"{name} has the shape {list(tensor.shape)}: a matrix is needed.")
        shapes.setdefault(module, {})[kind] = tensor.shape
    ranks = {}
    for module, pair in shapes.items():
        if len(pair) < 2:
            missing = "lora_B" if "lora_A" in pair else "lora_A"
            raise KimiBridgeError(f"{module} has no {missing}.weight: send both matrices of every module.")
        if pair["lora_A"][0] != pair["lora_B"][1]:
            raise KimiBridgeError(
                f"{module} has lora_A {list(pair['lora_A'])} and lora_B {list(pair['lora_B'])}: "
                "they are [r, in] and [out, r]."
            )
        ranks[module] = pair["lora_A"][0]
    return ranks


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """PEFT's rule: a key is a regular expression on the end of the name, and the first that fits counts."""
    fits = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fits, default)


def _check_scale(alpha: float, rank: float, where: str) -> None:
    if rank <= 0 or alpha != rank:
        raise KimiBridgeError(f"The adapter's scale is {alpha} / {rank} ({where}): {_CURE}.")
