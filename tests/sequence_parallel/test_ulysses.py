"""A model under Ulysses gives the logits and gradients of one process: real gloo ranks, float32."""

from __future__ import annotations

import pytest

from tests.sequence_parallel.ranks import Ranks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize(
    ("kind", "length"),
    [("plain", 48), ("plain", 43), ("packed", 43), ("packed rows", 43), ("right", 40), ("left", 41)],
)
def test_mla_parity(ranks: Ranks, size: int, q_lora_rank: int | None, kind: str, length: int) -> None:
    arguments = {"model": "deepseek", "arguments": (q_lora_rank,), "kind": kind, "length": length}
    for found in ranks.run("parity", size, **arguments):
        assert found["said"].startswith("transformers' attention interface is sharded")
        assert found["scale"] > 1
        assert found["logits"] < 1e-5
        assert found["loss"] < 1e-5
        assert found["gradients"] < 1e-4


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_half_precision(ranks: Ranks, kind: str) -> None:
    """bfloat16 is as far from float32 on two ranks as on one."""
    found = ranks.run("half_precision", 2, kind=kind, length=43, implementation="sdpa", device="cpu")
    for rank in found:
        for alone, together in zip(rank["alone"], rank["ulysses"], strict=True):
            assert 0 < together < 1.1 * alone < 0.1, found
