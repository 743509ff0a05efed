"""What the four ranks run. Each function runs on every rank; its result must pickle."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge

import kimi_bridge.megatron as kimi
from kimi_bridge.checkpoint import CheckpointReader
from kimi_bridge.megatron import jobs, runtime
from kimi_bridge.megatron.runtime import Layout
from tests.megatron.forward import local_spec_provider


def build(src: str | Path, layout: Layout, spec: str = "te", load: bool = True) -> tuple[AutoBridge, list[Any]]:
    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(str(src))
    provider = bridge.to_megatron_provider(load_weights=load)
    if spec == "local":
        local_spec_provider(provider)
    return bridge, runtime.build_model(provider, layout)


def poison(model: list[Any]) -> None:
    """Whatever a load leaves alone becomes visible."""
    for chunk in model:
        for tensor in [*chunk.parameters(), *chunk.buffers()]:
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))


def round_trip(src: str, dst: str, layout: Layout, spec: str = "te") -> None:
    bridge, model = build(src, layout, spec, load=False)
    poison(model)
    kimi.load_checkpoint(bridge, model)
    kimi.export_checkpoint(bridge, model, dst)


def through_megatron_checkpoint(src: str, megatron: str, dst: str, first: Layout, second: Layout) -> None:
    jobs.import_checkpoint(src, Path(megatron), first)
    jobs.export_megatron_checkpoint(src, Path(megatron), Path(dst), second)


def provider_fields(src: str, names: list[str]) -> dict[str, Any]:
    provider = AutoBridge.from_hf_pretrained(src).to_megatron_provider(load_weights=False)
    return {name: getattr(provider, name) for name in names}


def registration() -> dict[str, Any]:
    """Upstream's bridge registers last, then ours again."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, get_model_bridge
    from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge
    from megatron.bridge.models.kimi_vl.modeling_kimi_k25_vl import KimiK25VLModel

    seen = {"first": type(get_model_bridge("KimiK25ForConditionalGeneration")).__name__}
    kimi.assert_registered()
    MegatronModelBridge.register_bridge(source="KimiK25ForConditionalGeneration", target=KimiK25VLModel)(KimiK25VLBridge)
    try:
        kimi.assert_registered()
    except kimi.KimiBridgeError as error:
        seen["error"] = str(error)
    kimi.register()
    kimi.assert_registered()
    seen["last"] = type(get_model_bridge("KimiK25ForConditionalGeneration")).__name__
    return seen
