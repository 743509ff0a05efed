"""LoRA adapters from memory into a running vLLM: what the engine's owner calls, and the worker's side.

Only functions that run inside vLLM import it, so a trainer can pack an adapter without vLLM.
"""

from kimi_bridge.inference.engine import load_adapter, unload_adapter
from kimi_bridge.inference.payload import check_adapter, pack_adapter, unpack_adapter
from kimi_bridge.inference.worker import WorkerExtension

__all__ = [
    "WorkerExtension",
    "check_adapter",
    "load_adapter",
    "pack_adapter",
    "unload_adapter",
    "unpack_adapter",
]
