"""Adapters that a vLLM worker holds without a file.

vLLM's own reading of an adapter does the work, whatever its version checks and filters: it is given a folder
in memory with the adapter's config and the names of its tensors, all of them empty, and the values are put in
where vLLM makes its LoRA weights of the tensors that it kept. The result stays here, so that the adapter
comes back after vLLM's cache evicted it, although there is no file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.inference.payload import check_adapter, plain_config

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

_ATTRIBUTE = "kimi_bridge_memory"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class _Kept:
    name: str
    adapter: LoRAModel


class AdapterMemory:
    """What one worker's LoRA manager holds from memory. `AdapterMemory.of(manager)` makes or finds it.

    It stands in front of two methods of that manager: loading, where a request of a kept name and id gets the
    kept adapter, and removing, which forgets it. Everything else goes to vLLM unchanged.
    """

    def __init__(self, manager: LRUCacheWorkerLoRAManager) -> None:
        self._manager = manager
        self._kept: dict[int, _Kept] = {}
        self._load_from_disk = manager._load_adapter
        self._remove = manager.remove_adapter
        manager._load_adapter = self._load  # type: ignore[method-assign]
        manager.remove_adapter = self.remove  # type: ignore[method-assign]

    @classmethod
    def of(cls, manager: Any) -> AdapterMemory:
        """Raises KimiBridgeError where vLLM was started without LoRA."""
        if manager is None or not hasattr(manager, "_load_adapter"):
            raise KimiBridgeError("This vLLM runs without LoRA: start it with --enable-lora.")
        if (memory := getattr(manager, _ATTRIBUTE, None)) is None:
            memory = cls(manager)
            setattr(manager, _ATTRIBUTE, memory)
        return memory

    def add(self, name: str, lora_id: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Loads the adapter and makes it ready; the last one of that name gives way.

        What is refused before the model's layers are touched leaves the last one in place.
        Raises KimiBridgeError.
        """
        from vllm.lora.request import LoRARequest

        if (taken := self._kept.get(lora_id)) is not None and taken.name != name:
            raise KimiBridgeError(f"Id {lora_id} belongs to the adapter {taken.name!r}: choose another.")
        check_adapter(config, tensors, self._manager.lora_config.max_lora_rank)
        self._check_applied(tensors)
        adapter = self._read(name, lora_id, config, tensors)
        for other in [key for key, kept in self._kept.items() if kept.name == name and key != lora_id]:
            self.remove(other)
        self._kept[lora_id] = _Kept(name, adapter)
        try:
            self._manager.add_adapter(LoRARequest(name, lora_id, f"memory:{name}", load_inplace=True))
        except Exception as error:
            # Half of the layers may hold it: nobody must be served by that.
            self.remove(lora_id)
            raise KimiBridgeError(
                f"vLLM could not take the adapter {name!r} and no longer has it ({error}): "
                "its shapes must be those of the model that is served."
            ) from error

    def remove(self, lora_id: int) -> bool:
        """Forgets the adapter; False where vLLM's cache did not hold it."""
        self._kept.pop(lora_id, None)
        return self._remove(lora_id)

    def names(self) -> dict[str, int]:
        """Name -> id of what is kept here."""
        return {kept.name: lora_id for lora_id, kept in self._kept.items()}

    def _load(self, request: LoRARequest) -> LoRAModel:
        kept = self._kept.get(request.lora_int_id)
        if kept is not None and kept.name == request.lora_name:
            return kept.adapter
        adapter = self._load_from_disk(request)
        # Its id now means another adapter.
        self._kept.pop(request.lora_int_id, None)
        return adapter

    def _check_applied(self, tensors: Mapping[str, Tensor]) -> None:
        # The LoRA patch took them from the list, since vLLM would ignore them; its message does not say that.
        supported = self._manager._adapter_manager.supported_lora_modules
        for module, in_megatron in (("kv_b_proj", "linear_kv_up_proj"), ("gate", "router")):
            named = [name for name in tensors if f".{module}." in name]
            if named and module not in supported:
                raise KimiBridgeError(
                    f"{named[0]}: vLLM does not apply LoRA on {module}: train without it ({in_megatron} in "
                    "Megatron), or merge the adapter and serve the merged checkpoint."
                )

    def _read(
        self, name: str, lora_id: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> LoRAModel:
        from vllm.lora.request import LoRARequest

        with _folder_of_names(config, tensors) as folder, self._values(tensors):
            try:
                adapter = self._load_from_disk(LoRARequest(name, lora_id, str(folder)))
                # vLLM joins what its layers have joined; done here, a fault leaves the last adapter in place.
                self._manager._adapter_manager._create_merged_loras_inplace(adapter)
            except (ValueError, AssertionError, RuntimeError, StopIteration) as error:
                reason = str(error).replace(str(folder), repr(name))
                reason = reason or "an expert lacks a matrix, or nothing in it belongs to this worker"
                raise KimiBridgeError(f"vLLM refuses the adapter {name!r}: {reason}") from error
        return adapter

    @contextmanager
    def _values(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, LoRA weights are made of `tensors` instead of what a file holds under their names."""
        plain = self._manager._lora_model_cls

        class FromMemory(plain):  # type: ignore[misc, valid-type]
            @classmethod
            def from_lora_tensors(cls, lora_model_id: int, tensors: Any, *args: Any, **kwargs: Any) -> Any:
                values = {name: _own(name, source[name]) for name in tensors}
                return plain.from_lora_tensors(lora_model_id, values, *args, **kwargs)

        source = tensors
        self._manager._lora_model_cls = FromMemory
        try:
            yield
        finally:
            self._manager._lora_model_cls = plain


def _own(name: str, tensor: Tensor) -> Tensor:
    """A tensor that the caller cannot change any more. vLLM stacks those of experts, which copies them."""
    return tensor.detach() if ".experts." in name else tensor.detach().clone()


@contextmanager
def _folder_of_names(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Path]:
    """An adapter's folder whose tensors have no elements: names and config are all that vLLM checks."""
    from safetensors.torch import save_file

    memory = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kimi-bridge-", dir=memory) as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(json.dumps(plain_config(config)))
        empty = {tensor: torch.empty(0) for tensor in tensors}
        save_file(empty, folder / "adapter_model.safetensors")
        yield folder
