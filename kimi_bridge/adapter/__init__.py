"""LoRA adapters in PEFT's form: read, written, merged."""

from kimi_bridge.adapter.merge import MergedKind, MergeSummary, merge_adapter
from kimi_bridge.adapter.peft_format import (
    Adapter,
    AdapterPlan,
    ModuleSpec,
    fold_scale,
    load_adapter,
    plan_adapter,
    save_adapter,
)

__all__ = [
    "Adapter",
    "AdapterPlan",
    "MergeSummary",
    "MergedKind",
    "ModuleSpec",
    "fold_scale",
    "load_adapter",
    "merge_adapter",
    "plan_adapter",
    "save_adapter",
]
