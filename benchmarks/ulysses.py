#!/usr/bin/env python3
"""Ulysses over several GPUs beside one GPU, in one run: same logits, peak memory, tokens per second.

    torchrun --nproc_per_node 2 benchmarks/ulysses.py

A dense DeepSeek-V3 model with the attention of Kimi-VL-A3B (hidden size 2048, 16 heads of 128 + 64, values of
128, latent of 512; feed-forward 11264) and random weights, in bfloat16: forward, backward, and the sum of the
gradients over the ranks, of one sequence. `--device cpu` goes the same way with gloo and tiny sizes.
Ranks may share a GPU where NCCL lets them (NCCL_MULTI_RANK_GPU_ENABLE=1): logits and memory are those of
several GPUs then, and no times are printed.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX

from kimi_bridge.patches import transformers_ulysses
from kimi_bridge.sequence_parallel import count_traffic, gather_sequence, shard_batch, token_mean_loss

VOCABULARY = 8192
# Never the math kernel, which would hold the scores of all pairs of tokens.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass
class Step:
    seconds: float
    peak: float  # GiB, the most of all ranks
    resident: float  # GiB of weights and gradients
    sent: float  # bytes per token and layer, forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--compare-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < (1 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 2):
        print(f"skipped: needs two GPUs, not {gpus} (--device cpu runs tiny)")
        return
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % gpus)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    kernels = working_kernels(device)
    if device.type == "cuda" and not kernels:
        raise SystemExit("none of sdpa's kernels takes MLA's head widths on this GPU")
    names = ", ".join(kernel.name.lower() for kernel in kernels) or "any"
    say(f"{dist.get_world_size()} ranks, {device_name(device)}, torch {torch.__version__}; sdpa: {names}\n")
    alone = dist.new_subgroups(1)[0]
    for implementation in implementations():
        with sdpa_kernel(kernels) if kernels else nullcontext():
            report(options, implementation, device, alone)
    dist.destroy_process_group()


def report(
    options: argparse.Namespace, implementation: str, device: torch.device, one: dist.ProcessGroup
) -> None:
    ranks = dist.get_world_size()
    # A GPU's time that ranks share says nothing about several GPUs.
    shared = device.type == "cuda" and torch.cuda.device_count() < ranks
    model = build(options, implementation, device)
    say(f"{implementation}, {options.compare_tokens} tokens in bfloat16\n")
    say("| | logits, 1 rank from float32 | Ulysses from float32 | Ulysses from 1 rank | same next token |")
    say("|---|---|---|---|---|")
    for kind in ("plain", "packed"):
        compare(kind, options, model, device, one)
    say(f"\n{implementation}, {options.tokens} tokens, {options.layers} layers\n")
    say("| | ms a step | tokens/s | peak memory | of it activations | bytes sent a token and layer |")
    say("|---|---|---|---|---|---|")
    alone = measure(options, model, device, one)
    together = measure(options, model, device, None)
    for name, step in (("1 rank", alone), (f"{ranks} ranks, Ulysses", together)):
        speed = "- | -"
        if not shared:
            speed = f"{step.seconds * 1000:.0f} | {options.tokens / step.seconds:,.0f}"
        memory = f"{step.peak:.2f} GiB | {step.peak - step.resident:.2f} GiB" if step.peak else "- | -"
        say(f"| {name} | {speed} | {memory} | {step.sent:,.0f} |")
    notes = [] if shared else [f"{alone.seconds / together.seconds:.2f} times as fast"]
    if together.peak:
        share = (together.peak - together.resident) / (alone.peak - alone.resident or 1)
        notes.append(f"activations {share:.3f} of one rank's")
    expanded = expanded_bytes(model, ranks)
    notes.append(f"with the keys' rotary half sent for every head: {expanded:,.0f} bytes a token and layer")
    say(f"\n{'; '.join(notes)}\n")


def compare(
    kind: str, options: argparse.Namespace, model: nn.Module, device: torch.device, one: dist.ProcessGroup
) -> None:
    """Logits of one rank and of all against each other, and of both against one rank in float32."""
    ids, positions = batch(options.compare_tokens, device, kind)
    with torch.no_grad():
        # Lengths as numbers: flash attention 4 does not take tensors, which transformers makes of positions.
        lengths = shard_batch(ids, position_ids=positions, group=one).attention_kwargs()
        alone = model(ids, use_cache=False, **lengths).logits.float()
        reference = copy.deepcopy(model).float()
        reference.set_attn_implementation("sdpa")
        exact = reference(ids, position_ids=positions, use_cache=False).logits
        del reference
        transformers_ulysses.apply(None)
        shard = shard_batch(ids, position_ids=positions)
        own = model(shard.input_ids, use_cache=False, **shard.attention_kwargs()).logits
        together = gather_sequence(own, shard).float()
        transformers_ulysses.undo()
    same = (alone.argmax(-1) == together.argmax(-1)).float().mean()
    differences = [distance(alone, exact), distance(together, exact), distance(together, alone)]
    cells = " | ".join(f"{difference:.5f}" for difference in differences)
    say(f"| {kind} | {cells} | {100 * same:.2f}% |")


def measure(
    options: argparse.Namespace, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None
) -> Step:
    """A training step without the optimizer: of all ranks (group None), or of rank 0 while others wait."""
    ids, positions = batch(options.tokens, device, "plain")
    resident = 2 * sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    if group is not None and dist.get_rank() != 0:
        dist.barrier()
        return Step(float("nan"), 0.0, resident, 0.0)
    transformers_ulysses.apply(group)
    shard = shard_batch(ids, ids, position_ids=positions, group=group)

    def step() -> None:
        logits = model(shard.input_ids, use_cache=False, **shard.attention_kwargs()).logits
        token_mean_loss(logits, shard, group, gradients="summed").backward()
        for parameter in model.parameters() if group is None else ():
            dist.all_reduce(parameter.grad)

    model.zero_grad(set_to_none=True)
    with count_traffic() as traffic:
        step()  # warms up, and leaves the gradients that later steps add to
    reset_peak(device)
    seconds = statistics.median(timed(step, device) for _ in range(options.steps))
    peak = torch.tensor([torch.cuda.max_memory_allocated() if device.type == "cuda" else 0], device=device)
    if group is None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        transformers_ulysses.undo()
    else:
        dist.barrier()
    model.zero_grad(set_to_none=True)
    sent = traffic.forward / shard.input_ids.numel() / options.layers
    return Step(seconds, peak.item() / 2**30, resident, sent)


def build(options: argparse.Namespace, implementation: str, device: torch.device) -> nn.Module:
    """The same weights on every rank."""
    width = {"hidden_size": 2048, "intermediate_size": 11264, "num_attention_heads": 16}
    width |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if device.type == "cpu":
        width |= {"hidden_size": 128, "intermediate_size": 256, "kv_lora_rank": 64}
    config = DeepseekV3Config(
        **width,
        num_key_value_heads=16,
        q_lora_rank=None,
        num_hidden_layers=options.layers,
        first_k_dense_replace=options.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=131072,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def batch(tokens: int, device: torch.device, kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=generator)
    positions = torch.arange(tokens)[None]
    if kind == "packed":
        # Five sequences that end anywhere.
        ends = torch.tensor([tokens // 7, tokens // 3, tokens // 2 + 11, 3 * tokens // 4])
        starts = torch.cat([torch.zeros(1, dtype=torch.long), ends])
        positions = positions - starts[torch.bucketize(positions, ends, right=True)]
    return ids.to(device), positions.to(device)


def working_kernels(device: torch.device) -> list[SDPBackend]:
    """Those of KERNELS that take MLA's widths, forward and backward; none on a CPU, which has its own."""
    if device.type == "cpu":
        return []
    found = []
    for kernel in KERNELS:
        states = [
            torch.randn(1, 2, 256, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for width in (192, 192, 128)
        ]
        try:
            with sdpa_kernel(kernel):
                # As transformers calls it.
                attended = functional.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True)
                attended.sum().backward()
            found.append(kernel)
        except RuntimeError:
            continue
    return found


def implementations() -> list[str]:
    """sdpa, and flash attention's versions that are installed."""
    flash = FLASH_ATTENTION_COMPATIBILITY_MATRIX.items()
    return ["sdpa", *(f"flash_attention_{n}" for n, facts in flash if facts["general_availability_check"]())]


def expanded_bytes(model: nn.Module, ranks: int) -> float:
    config = model.config
    widths = 2 * (config.qk_nope_head_dim + config.qk_rope_head_dim) + 2 * config.v_head_dim
    return config.num_attention_heads * widths * 2 * (ranks - 1) / ranks


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def timed(step: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def device_name(device: torch.device) -> str:
    gpus = min(dist.get_world_size(), torch.cuda.device_count())
    return f"{gpus} x {torch.cuda.get_device_name()}" if device.type == "cuda" else "CPU"


def say(line: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(line, end=end, flush=True)


if __name__ == "__main__":
    main()
