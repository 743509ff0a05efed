"""A model under Ulysses gives the logits and gradients of one process: real gloo ranks, float32."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("heads", "key_value_heads"), [(8, 8), (8, 4), (8, 2), (4, 1), (12, 6), (12, 3)])
def test_grouped_heads(ranks: Ranks, size: int, heads: int, key_value_heads: int) -> None:
    """Key-value heads that divide the ranks, that they divide, and neither (6 heads on 4 ranks)."""
    arguments = {"model": "llama", "arguments": (heads, key_value_heads), "kind": "packed", "length": 43}
    for found in ranks.run("parity", size, **arguments):
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-4


def test_gradient_checkpointing(ranks: Ranks) -> None:
    arguments = {"model": "deepseek", "arguments": (24,), "kind": "packed", "length": 43}
    for found in ranks.run("parity", 4, **arguments, checkpointing=True):
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-4


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_one_rank_changes_no_bit(ranks: Ranks, kind: str) -> None:
    arguments = {"model": "deepseek", "arguments": (24,), "kind": kind, "length": 43}
    for found in ranks.run("parity", 1, **arguments):
        assert found["said"] == "One rank holds the whole sequence: transformers is left as it is."
        assert found["bits"]
        assert found["traffic"] == (0, 0)


def test_shards_do_not_see_each_other_without_it(ranks: Ranks) -> None:
    assert min(ranks.run("unsharded_attention", 2)) > 0.1


@pytest.mark.parametrize("kind", ["plain", "packed", "packed rows", "right", "left"])
def test_positions_are_enough(ranks: Ranks, kind: str) -> None:
    """Without cumulative lengths, the boundaries come from the ranks' position_ids and masks."""
    assert max(ranks.run("from_positions", 4, kind=kind)) < 1e-5


def test_kernel_loaded_later(ranks: Ranks) -> None:
    assert max(ranks.run("from_positions", 2, kind="packed", late=True)) < 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_variable_length(ranks: Ranks, size: int) -> None:
    for differences in ranks.run("variable_length", size):
        assert max(differences) < 1e-6


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent(ranks: Ranks, size: int) -> None:
    """The rotary half of the keys travels once a rank, not once a head; the gradients send as much."""
    heads, nope, rope, value, layers, float32 = 4, 16, 8, 12, 2, 4
    to_others = (size - 1) / size
    expected = heads * (nope + rope + nope + 2 * value) * to_others + rope * (size - 1)
    expanded = heads * (2 * (nope + rope) + 2 * value) * to_others
    arguments = {"model": "deepseek", "arguments": (None,), "kind": "plain", "length": 48}
    for found in ranks.run("parity", size, **arguments):
        forward, backward = (sent / found["tokens"] / layers / float32 for sent in found["traffic"])
        assert math.isclose(forward, expected)
        assert math.isclose(backward, expected)
        assert forward < expanded or size == heads


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("name", ["DeepseekV3Attention", "DeepseekV3FlashAttention2"])
def test_remote_code(ranks: Ranks, size: int, q_lora_rank: int | None, name: str) -> None:
    for padded in (False, True):
        for differences in ranks.run("remote", size, name=name, q_lora_rank=q_lora_rank, padded=padded):
            assert max(differences) < 1e-5


def test_apply_and_undo(ranks: Ranks) -> None:
    for found in ranks.run("patching", 2):
        assert found["first"] == "transformers' attention interface is sharded over 2 ranks now."
        assert found["second"] == "Attention is sharded over 2 ranks since an earlier call."
        assert found["undone"] == ["transformers' attention is as it was.", "Attention was not sharded."]
        assert found["changed"]
        assert found["idempotent"]
        assert found["restored"]
    for found in ranks.run("patching", 1):
        assert not found["changed"]
        assert found["restored"]


def test_vision_tower_is_left_alone(ranks: Ranks) -> None:
    assert all(ranks.run("encoder", 4))


REFUSED = {
    "heads": "has 6 attention heads, which 4 ranks cannot share evenly: use a sequence-parallel group of "
    "1, 2, 3, 6 ranks.",
    "cache": "got 9 keys for 1 queries: Ulysses shards whole sequences, not steps of a generation",
    "mask": r"shape (1, 32) does not fit this rank's 1 x 8 tokens",
    "four dimensions": "shape (1, 1, 8, 8) does not fit",
    "lengths": "cu_seq_lens_q ends at 8, the sharded batch has 1 x 32 tokens",
    "group": "attention over [",
    "not applied": "The batch is cut over ranks [0, 1, 2, 3], but attention is not sharded: call",
    "positions": "Every rank's position_ids count from 0, as a model makes them by itself: pass `**shard.",
    "window": "sliding windows, chunks and blocks that see ahead are not covered",
    "blocks": "blocks that see ahead are not covered",
    "eager": "Ulysses does not shard eager attention: model.set_attn_implementation('sdpa')",
    "flex_attention": "Ulysses does not shard flex_attention attention",
    "class": "LatentFreeAttention computes attention by itself and is not DeepSeek-V3's (no num_heads, ",
}


def test_rank_outside_the_group(ranks: Ranks) -> None:
    first, *others = ranks.run("outside", 4)
    assert first == []
    for rank, messages in enumerate(others, 1):
        assert len(messages) == 2
        assert all(said.startswith(f"Rank {rank} is not in the given process group") for said in messages)


def test_another_group(ranks: Ranks) -> None:
    """The last call's group holds."""
    arguments = {"model": "llama", "arguments": (4, 4), "kind": "packed", "length": 43}
    for found in ranks.run("parity", 2, **arguments, before=True):
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-4


@pytest.mark.parametrize("case", REFUSED)
def test_refused(ranks: Ranks, case: str) -> None:
    for message in ranks.run("refused", 4, case=case):
        assert REFUSED[case] in message
