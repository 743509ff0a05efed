"""Kimi K2.5 checkpoint folders on disk: read, written, synthesized, compared, inspected."""

from kimi_bridge.checkpoint.config import KimiK25Config, read_quantization
from kimi_bridge.checkpoint.files import copy_artifacts
from kimi_bridge.checkpoint.reader import CheckpointReader, resolve_checkpoint
from kimi_bridge.checkpoint.synthesize import synthesize_checkpoint
from kimi_bridge.checkpoint.writer import CheckpointWriter, TensorSpec

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "KimiK25Config",
    "TensorSpec",
    "copy_artifacts",
    "read_quantization",
    "resolve_checkpoint",
    "synthesize_checkpoint",
]
