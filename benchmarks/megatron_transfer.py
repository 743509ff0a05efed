#!/usr/bin/env python3
"""Loading and exporting many experts, beside Megatron-Bridge's own way, in one run.

    torchrun --nproc_per_node 2 benchmarks/megatron_transfer.py

Two MoE layers of 384 experts, hidden size 256, from INT4, at EP 2 and at TP 2. The peer is Megatron-Bridge's
default: its safetensors state source, the INT4 code of its own Kimi K2.5 bridge, its load and export loops.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.deepseek.common import get_common_mapping_list
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge
from megatron.bridge.peft.lora import LoRA

from kimi_bridge.checkpoint import synthesize_checkpoint
from kimi_bridge.megatron import export_adapter, iter_adapter_tensors, load_checkpoint
from kimi_bridge.megatron.bridge import MegatronMappingRegistry, reroot
from kimi_bridge.megatron.runtime import Layout, build_model, initialize

LINEARS = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
LINEARS += ["linear_proj", "linear_fc1", "linear_fc2"]
DIMS = {"num_hidden_layers": 3, "n_routed_experts": 384, "hidden_size": 256, "moe_intermediate_size": 64}


class PlainBridge(DeepSeekV3Bridge):
    """Megatron-Bridge as it is: upstream's loops, state source and INT4 functions."""

    _load_and_dequantize = KimiK25VLBridge._load_and_dequantize
    maybe_modify_loaded_hf_weight = KimiK25VLBridge.maybe_modify_loaded_hf_weight
    maybe_modify_converted_hf_weight = KimiK25VLBridge.maybe_modify_converted_hf_weight
    _is_quantized_expert_key = KimiK25VLBridge._is_quantized_expert_key

    def mapping_registry(self) -> MegatronMappingRegistry:
        mappings = get_common_mapping_list(hf_config=self.hf_config.text_config)
        return MegatronMappingRegistry(*(reroot(mapping, "language_model.") for mapping in mappings))

    def build_conversion_tasks(
        self, hf_pretrained: Any, megatron_model: Any, weight_dtype: Any = None
    ) -> Any:
        # As KimiK25VLBridge does: a `.weight` is invented for every triplet.
        keys = hf_pretrained.state.source.get_all_keys()
        plain = [key.removesuffix("_packed") for key in keys if key.endswith("_packed")]
        hf_pretrained.state.source._keys_cache = sorted({*keys, *plain})
        return MegatronModelBridge.build_conversion_tasks(self, hf_pretrained, megatron_model, weight_dtype)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        initialize(Layout())
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        src = Path(shared[0]) / "checkpoint"
        if dist.get_rank() == 0:
            synthesize_checkpoint(src, overrides=DIMS)
        dist.barrier()
        for name, layout in (("EP 2", Layout(ep=2, etp=1)), ("TP 2", Layout(tp=2))):
            measure(name, layout, src)
            measure_adapters(name, layout, src, Path(shared[0]) / f"adapter {name}")
        dist.barrier()


def measure(name: str, layout: Layout, src: Path) -> None:
    initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(str(src))
    ours = build_model(bridge.to_megatron_provider(load_weights=False), layout)
    theirs = build_model(bridge.to_megatron_provider(load_weights=False), layout)
    plain, pretrained = PlainBridge(), PreTrainedCausalLM.from_pretrained(str(src))
    with quiet():
        peer_load, _ = timed(lambda: plain.load_weights_hf_to_megatron(pretrained, theirs))
        # The first time opens and checks the folder, as the peer's does.
        own_load, own_load_collectives = timed(lambda: load_checkpoint(bridge, ours))
        reader = bridge.hf_pretrained.state.source.reader
        read: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(read, reader.bytes_read)
        peer_export, peer_collectives = timed(
            lambda: drain(plain.stream_weights_megatron_to_hf(theirs, pretrained, show_progress=False))
        )
        own_export, own_collectives = timed(
            lambda: drain(bridge.export_hf_weights(ours, show_progress=False))
        )
    same = all(
        torch.equal(a, b)
        for a, b in zip(ours[0].state_dict().values(), theirs[0].state_dict().values(), strict=True)
        if isinstance(a, torch.Tensor)
    )
    total = sum(reader.info(n).nbytes for n in reader.names() if n.startswith("language_model."))
    if dist.get_rank() == 0:
        print(f"{name}, two MoE layers of 384 experts:")
        print(
            f"  load    {peer_load:6.2f} s -> {own_load:5.2f} s, {peer_load / own_load:.1f} times as fast;",
            end="",
        )
        print(f" same weights: {same}; collectives: {own_load_collectives};", end="")
        print(f" each rank read {[f'{part / total:.0%}' for part in read]} of {total / 1e6:.0f} MB")
        ratio = peer_export / own_export
        print(f"  export  {peer_export:6.2f} s -> {own_export:5.2f} s, {ratio:.1f} times as fast;", end="")
        print(f" collectives: {peer_collectives} -> {own_collectives}", flush=True)


def measure_adapters(name: str, layout: Layout, src: Path, dst: Path) -> None:
    """LoRA on all linears, an adapter an expert, rank 8. Ours includes the files, the peer's does not."""
    initialize(layout)
    lora = LoRA(target_modules=LINEARS, dim=8, alpha=16, share_expert_adapters=False)
    bridge = AutoBridge.from_hf_pretrained(str(src))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    model = build_model(provider, layout)
    with quiet():
        # Both begin with what they ask of the checkpoint once.
        drain(bridge.export_adapter_weights(model, show_progress=False))
        drain(iter_adapter_tensors(bridge, model, lora))
        peer, peer_collectives = timed(
            lambda: drain(bridge.export_adapter_weights(model, show_progress=False))
        )
        stream, _ = timed(lambda: drain(iter_adapter_tensors(bridge, model, lora)))
        own, own_collectives = timed(lambda: export_adapter(bridge, model, lora, dst))
    if dist.get_rank() == 0:
        print(
            f"{name}, its adapter: {peer:.2f} s -> {own:.2f} s with the files, {stream:.2f} s as a stream;"
            f" collectives: {peer_collectives} -> {own_collectives}",
            flush=True,
        )


def timed(action: Any) -> tuple[float, int]:
    """Seconds until all ranks are done, and the collectives of this one."""
    dist.barrier()
    with counted() as count:
        begin = time.perf_counter()
        action()
        seconds = time.perf_counter() - begin
    dist.barrier()
    return seconds, count[0]


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    names = ("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "gather", "scatter")
    names += ("broadcast", "broadcast_object_list", "barrier")
    originals, count = {name: getattr(dist, name) for name in names}, [0]

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(dist, name, wrap(function))
    try:
        yield count
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def drain(stream: Any) -> None:
    for _ in stream:
        pass


def quiet() -> Any:
    return contextlib.redirect_stdout(io.StringIO())


if __name__ == "__main__":
    main()
