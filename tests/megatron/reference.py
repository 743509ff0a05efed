"""transformers' own DeepseekV3ForCausalLM with the text weights of a checkpoint, in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

from kimi_bridge.checkpoint import CheckpointReader

PREFIX = "language_model."


def reference_model(src: str | Path, deltas: dict[str, torch.Tensor] | None = None) -> DeepseekV3ForCausalLM:
    """`deltas` are added to the weights, by their modules' names in the checkpoint, in float32."""
    reader = CheckpointReader(src)
    config = reader.config.text_config
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).to(torch.float32).eval()
    names = [name for name in reader.weight_names() if name.startswith(PREFIX)]
    weights = {name.removeprefix(PREFIX): reader.weight(name).to(torch.float32) for name in names}
    for module, delta in (deltas or {}).items():
        weights[f"{module.removeprefix(PREFIX)}.weight"] += delta
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        _fuse_experts(weights, f"model.layers.{layer}.mlp.experts", config.n_routed_experts)
    model.load_state_dict(weights, strict=True)
    return model


def _fuse_experts(weights: dict[str, torch.Tensor], prefix: str, experts: int) -> None:
    """transformers 5 keeps all experts of a layer in two tensors."""

    def take(part: str) -> list[torch.Tensor]:
        return [weights.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(experts)]

    gate_up = zip(take("gate"), take("up"), strict=True)
    weights[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gate_up])
    weights[f"{prefix}.down_proj"] = torch.stack(take("down"))
