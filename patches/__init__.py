"""Changes to classes of other libraries: one file per class, each with an idempotent `apply()`.

Installed as `kimi_bridge.patches`. Importing it changes nothing and imports nothing; importing
`kimi_bridge.patches.auto` applies everything.
"""

from __future__ import annotations

from . import vllm_kimi_k25_lora

__all__ = ["apply_all"]


def apply_all() -> dict[str, str]:
    """Applies every patch whose library is installed. Returns file name -> what it did, one sentence each."""
    return {"vllm_kimi_k25_lora": vllm_kimi_k25_lora.apply()}
