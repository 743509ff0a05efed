"""Multimodal rollouts that carry their images inline, and become pixels only in the trainer."""

from __future__ import annotations

from kimi_bridge.multimodal.engines import refs_from_render, samples_from_generate, samples_from_output
from kimi_bridge.multimodal.images import ImagePolicy, load_image
from kimi_bridge.multimodal.kimi_k25 import KimiK25
from kimi_bridge.multimodal.materializer import Materializer, materialize
from kimi_bridge.multimodal.packing import PackedBatch, pack, share_out, truncate
from kimi_bridge.multimodal.processors import ForwardPolicy, Processor, load_processor
from kimi_bridge.multimodal.qwen_vl import QwenVL
from kimi_bridge.multimodal.refs import MMRef, Sample, build_mm_refs, collapse, expand
from kimi_bridge.multimodal.wire import decode, encode

__all__ = [
    "ForwardPolicy",
    "ImagePolicy",
    "KimiK25",
    "MMRef",
    "Materializer",
    "PackedBatch",
    "Processor",
    "QwenVL",
    "Sample",
    "build_mm_refs",
    "collapse",
    "decode",
    "encode",
    "expand",
    "load_image",
    "load_processor",
    "materialize",
    "pack",
    "refs_from_render",
    "samples_from_generate",
    "samples_from_output",
    "share_out",
    "truncate",
]
