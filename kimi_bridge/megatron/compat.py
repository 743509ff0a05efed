"""What differs between the Megatron stacks that this library runs on.

Tested: megatron-core 0.18.2 with megatron-bridge 0.6.0 and transformers 5.8 (what SkyRL 0.3.0 installs), and
megatron-core 0.19.2 with megatron-bridge 0.6.2 and transformers 5.12. Names, providers, layer specs, adapters
and the conversion API are the same to this library. One thing is not: `megatron.bridge.training`, behind
Megatron checkpoints, needs modules that megatron-core has from 0.19 on (`megatron.training.models.gpt`), so
Megatron-Bridge 0.6.0 cannot import its own on 0.18.2.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron.collective import on_every_rank


def require_megatron_checkpoints() -> None:
    """For jobs that read or write Megatron checkpoints, before they begin.

    Raises:
        KimiBridgeError: on every rank, where Megatron-Bridge's checkpoint code does not import.
    """
    try:
        import megatron.bridge.training.checkpointing  # noqa: F401
    except ImportError as error:
        fault = (
            f"Megatron checkpoints need megatron-core 0.19 or newer, and {version('megatron-core')} with"
            f" megatron-bridge {version('megatron-bridge')} is installed ({error}). Loading, training and"
            " exporting Hugging Face checkpoints and adapters work without."
        )
        raise on_every_rank(KimiBridgeError(fault)) from error


def grouped_linear() -> Any:
    """The class of Transformer Engine's grouped experts in Megatron-Core, the same on both stacks."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    return TEGroupedLinear
