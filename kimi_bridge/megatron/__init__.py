"""The Megatron side. Importing it registers the bridges of Kimi K2.5 and Kimi-VL with Megatron-Bridge.

import kimi_bridge.megatron
bridge = AutoBridge.from_hf_pretrained("moonshotai/Kimi-K2.5")
"""

from kimi_bridge.megatron.bridge import (
    KimiK25TextBridge,
    KimiVLTextBridge,
    assert_registered,
    ensure_text_only,
    is_registered,
    register,
    unregister,
)
from kimi_bridge.megatron.lora import (
    AdapterStream,
    LoadedAdapter,
    export_adapter,
    iter_adapter_tensors,
    load_adapter_into,
)
from kimi_bridge.megatron.qat import FakeInt4Report, disable_fake_int4, enable_fake_int4
from kimi_bridge.megatron.transfer import export_checkpoint, iter_int4_weights, load_checkpoint

register()

__all__ = [
    "AdapterStream",
    "FakeInt4Report",
    "KimiK25TextBridge",
    "KimiVLTextBridge",
    "LoadedAdapter",
    "assert_registered",
    "disable_fake_int4",
    "enable_fake_int4",
    "ensure_text_only",
    "export_adapter",
    "export_checkpoint",
    "is_registered",
    "iter_adapter_tensors",
    "iter_int4_weights",
    "load_adapter_into",
    "load_checkpoint",
    "register",
    "unregister",
]
