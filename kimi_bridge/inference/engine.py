"""The engine's side: one call loads an adapter into every worker of a vLLM `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.inference.payload import Named, check_adapter, pack_adapter, plain_config, unpack_adapter

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest


def load_adapter(llm: LLM, name: str, lora_id: int, config: Mapping[str, Any], tensors: Named) -> LoRARequest:
    """Loads an adapter from named tensors into every worker and returns the request that uses it.

    The engine was started with `worker_extension_cls="kimi_bridge.inference.WorkerExtension"`. With an
    AsyncLLM, await the same two calls: `collective_rpc("add_adapter_from_tensors", args=(name, lora_id,
    config, pack_adapter(tensors)))` and `reset_prefix_cache()`.
    Raises KimiBridgeError for an adapter that would be served otherwise than it was trained, and where the
    prefix cache is in use and still holds what the last adapter of that name computed.
    """
    from vllm.lora.request import LoRARequest

    named = unpack_adapter(tensors)
    check_adapter(config, named)
    llm.collective_rpc(
        "add_adapter_from_tensors", args=(name, lora_id, plain_config(config), pack_adapter(named))
    )
    _reset(llm, name)
    return LoRARequest(name, lora_id, f"memory:{name}")


def unload_adapter(llm: LLM, lora_id: int) -> None:
    """Unloads an adapter from every worker and forgets it."""
    llm.collective_rpc("remove_adapter_from_memory", args=(lora_id,))


def _reset(llm: LLM, name: str) -> None:
    # The cache's keys hold the adapter's name: entries of its predecessor would be taken for its own.
    if not llm.reset_prefix_cache():
        raise KimiBridgeError(
            f"The adapter {name!r} is loaded, but running requests hold the prefix cache, and what the last "
            "adapter of that name computed is in it: let them finish, then call reset_prefix_cache()."
        )
