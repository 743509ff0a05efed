"""An adapter out of Megatron's shards, for test_vllm_lora.py, which runs where Megatron is not.

    torchrun --nproc_per_node 4 -m tests.gpu.megatron_adapter CHECKPOINT ADAPTER [kimi_vl]  # on a CPU or GPUs
    KIMI_BRIDGE_MEGATRON_ADAPTER=ADAPTER python -m pytest tests/gpu/test_vllm_lora.py -k kimi_k25
    KIMI_BRIDGE_MEGATRON_ADAPTER=ADAPTER python -m pytest tests/gpu/test_vllm_lora.py -k kimi_vl

CHECKPOINT is made where it does not exist: the one that the test makes. Its values are random, of a size
that changes what the model says.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from kimi_bridge.checkpoint import synthesize_checkpoint

# Of the first three Kimi-VL has the last, and Kimi K2.5 the others.
TARGETS = ["linear_q_down_proj", "linear_q_up_proj", "linear_q_proj", "linear_kv_down_proj", "linear_proj"]
TARGETS += ["linear_fc1", "linear_fc2"]
SIZE = 0.3


def main(checkpoint: Path, adapter: Path, family: str) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.lora import LoRA

    from kimi_bridge.megatron import export_adapter
    from kimi_bridge.megatron.runtime import Layout, build_model, initialize, shutdown

    layout = Layout(tp=2, ep=2, etp=1) if dist.is_torchelastic_launched() else Layout()
    initialize(layout)
    if dist.get_rank() == 0 and not checkpoint.exists():
        synthesize_checkpoint(checkpoint, size="small", family=family)
    dist.barrier()
    lora = LoRA(
        target_modules=TARGETS, dim=16, alpha=24, normalize_moe_lora=True, share_expert_adapters=False
    )
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    model = build_model(provider, layout)
    randomize(bridge, model)
    plan = export_adapter(bridge, model, lora, adapter)
    if dist.get_rank() == 0:
        print(f"{adapter}: {len(plan.specs)} tensors from {layout}")
    shutdown()


def randomize(bridge: object, model: list[torch.nn.Module]) -> None:
    from kimi_bridge.megatron.adapters import local_pairs
    from kimi_bridge.megatron.lora import _registry

    for pair in local_pairs(_registry(bridge), model):
        rank, width = pair.a.full_shape
        for half in (pair.a, *pair.bs):
            rows, columns = half.full_shape
            scale = pair.adapter.alpha / pair.adapter.dim
            std = width**-0.5 if half.part == "A" else SIZE * (width / rank / rows) ** 0.5 / scale
            for place, modules in zip(half.tensor, half.modules, strict=True):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{modules[0]} {half.part}".encode()))
                whole = torch.randn(rows, columns, generator=generator) * std
                place.copy_(half.local(whole))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "kimi_k25")
