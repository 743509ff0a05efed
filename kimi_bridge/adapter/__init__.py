"""LoRA adapters in PEFT's form: read, written, merged."""

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
    "ModuleSpec",
    "fold_scale",
    "load_adapter",
    "plan_adapter",
    "save_adapter",
]
