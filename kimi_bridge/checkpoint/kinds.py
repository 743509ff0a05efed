"""The kinds of tensors that reports count by."""

from __future__ import annotations

import re

# The first that matches a name says its kind. Names are matched without `language_model.`.
_KINDS = (
    ("vision tower", r"vision_tower\."),
    ("projector", r"(?:mm|multi_modal)_projector\."),
    ("embeddings", r"model\.embed_tokens\."),
    ("lm_head", r"lm_head\."),
    ("norms", r"model\.norm\.|model\.layers\.\d+\.(self_attn\.)?\w+_layernorm\."),
    ("attention", r"model\.layers\.\d+\.self_attn\."),
    ("router", r"model\.layers\.\d+\.mlp\.gate\."),
    ("experts", r"model\.layers\.\d+\.mlp\.experts\."),
    ("shared experts", r"model\.layers\.\d+\.mlp\.shared_experts\."),
    ("dense mlp", r"model\.layers\.\d+\.mlp\."),
)
_PATTERNS = tuple((kind, re.compile(r"(?:language_model\.)?(?:" + pattern + ")")) for kind, pattern in _KINDS)

KINDS = (*(kind for kind, _ in _KINDS), "other")


def tensor_kind(name: str) -> str:
    """One of KINDS, for the name of a tensor or of a weight."""
    return next((kind for kind, pattern in _PATTERNS if pattern.match(name)), "other")
