"""Training steps of a small MoE model of Kimi K2.5's widths on one GPU, with fake INT4 and without.

Called by `qat.py`. Random weights; forward and backward of one sequence, without an optimizer's step.
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from transformers import AutoConfig

from kimi_bridge.megatron import disable_fake_int4, enable_fake_int4
from kimi_bridge.megatron.runtime import Layout, build_model, initialize

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "config.json"
LAYERS, EXPERTS, TOKENS = 3, 32, 4096


def training_steps() -> None:
    """Prints the table."""
    initialize(Layout())
    print(f"\n{LAYERS} layers (1 dense), {EXPERTS} experts of [2048, 7168], {TOKENS} tokens: ms a step")
    print(f"{'':36} {'without':>9} {'with':>9} {'overhead':>9} {'peak memory':>22}")
    for title, frozen in (("LoRA, frozen experts", True), ("full fine-tuning", False)):
        model = build(frozen)
        report = enable_fake_int4(model)
        with_qat, with_memory = step_time(model)
        disable_fake_int4(model)
        without, memory = step_time(model)
        # Once more, so that a clock that drifts shows in the first number.
        enable_fake_int4(model)
        with_qat = min(with_qat, step_time(model)[0])
        print(
            f"{title:36} {without:9.2f} {with_qat:9.2f} {with_qat / without - 1:9.1%}"
            f" {memory / 2**30:9.2f} -> {with_memory / 2**30:.2f} GiB"
        )
        print(f"  {report}")
        del model
        gc.collect()
        torch.cuda.empty_cache()


def build(frozen: bool) -> list[Any]:
    """A model on the GPU under Megatron's DDP, with adapters if `frozen`."""
    config = json.loads(CONFIG.read_text())
    config["text_config"] |= {"num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS, "vocab_size": 12800}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.seq_length = TOKENS
    provider.gradient_accumulation_fusion = False
    if frozen:
        lora = LoRA(
            target_modules=["linear_proj", "linear_fc1", "linear_fc2"], dim=32, normalize_moe_lora=True
        )
        provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    model = build_model(provider, Layout())
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(provider, settings, chunk) for chunk in model]


def step_time(model: list[Any], steps: int = 12) -> tuple[float, int]:
    """Median milliseconds of forward and backward, and the peak of allocated bytes."""
    ids = torch.randint(
        0, 12800, (1, TOKENS + 1), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    positions = torch.arange(TOKENS, device="cuda")[None]
    times = []
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps + 4):
        model[0].zero_grad_buffer()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        model[0](ids[:, :-1], positions, None, labels=ids[:, 1:]).mean().backward()
        end.record()
        torch.cuda.synchronize()
        if step >= 4:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated()
