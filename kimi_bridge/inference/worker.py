"""The worker's side: methods for `--worker-extension-cls kimi_bridge.inference.WorkerExtension`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_bridge.inference.memory import AdapterMemory
from kimi_bridge.inference.payload import Named, unpack_adapter


class WorkerExtension:
    """Becomes a base class of vLLM's worker; `collective_rpc` calls its methods on every rank.

    A worker extension of your own can inherit from it.
    """

    model_runner: Any

    def add_adapter_from_tensors(
        self, name: str, lora_id: int, config: Mapping[str, Any], tensors: Named | Sequence[bytes]
    ) -> bool:
        """Loads an adapter from named tensors or from what `pack_adapter` made of them. Returns True.

        `config` is the content of adapter_config.json. Every rank gets the whole adapter and keeps what its
        experts need. Requests with LoRARequest(name, lora_id, any path) use it from then on, also after vLLM
        evicted it. The caller resets the prefix cache: its keys know the adapter's name, not its values.
        Raises KimiBridgeError.
        """
        self._adapter_memory().add(name, lora_id, config, unpack_adapter(tensors))
        return True

    def remove_adapter_from_memory(self, lora_id: int) -> bool:
        """Unloads and forgets an adapter. False where vLLM's cache did not hold it."""
        return self._adapter_memory().remove(lora_id)

    def list_adapters_in_memory(self) -> dict[str, int]:
        """Name -> id of the adapters that were loaded from memory."""
        return self._adapter_memory().names()

    def _adapter_memory(self) -> AdapterMemory:
        return AdapterMemory.of(getattr(self.model_runner, "lora_manager", None))
