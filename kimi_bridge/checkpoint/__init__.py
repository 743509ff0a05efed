"""Kimi K2.5 and Kimi-VL checkpoint folders on disk: read, written, synthesized, compared, inspected."""

from kimi_bridge.checkpoint.config import KimiK25Config, KimiVLConfig, read_quantization
from kimi_bridge.checkpoint.convert import (
    Summary,
    dequantize_checkpoint,
    quantize_checkpoint,
    truncate_checkpoint,
)
from kimi_bridge.checkpoint.families import FAMILIES
from kimi_bridge.checkpoint.files import copy_artifacts
from kimi_bridge.checkpoint.inspect import Inspection, inspect_checkpoint
from kimi_bridge.checkpoint.kinds import KINDS, tensor_kind
from kimi_bridge.checkpoint.reader import CheckpointReader, resolve_checkpoint
from kimi_bridge.checkpoint.synthesize import synthesize_checkpoint
from kimi_bridge.checkpoint.verify import Report, verify_checkpoints
from kimi_bridge.checkpoint.writer import CheckpointWriter, TensorSpec

__all__ = [
    "FAMILIES",
    "KINDS",
    "CheckpointReader",
    "CheckpointWriter",
    "Inspection",
    "KimiK25Config",
    "KimiVLConfig",
    "Report",
    "Summary",
    "TensorSpec",
    "copy_artifacts",
    "dequantize_checkpoint",
    "inspect_checkpoint",
    "quantize_checkpoint",
    "read_quantization",
    "resolve_checkpoint",
    "synthesize_checkpoint",
    "tensor_kind",
    "truncate_checkpoint",
    "verify_checkpoints",
]
