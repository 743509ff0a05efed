"""A batch cut over the ranks: nothing lost at a boundary, images where they belong, the loss of the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.sequence_parallel import embed, gather_sequence, shard_batch, token_mean_loss
from tests.sequence_parallel import models
from tests.sequence_parallel.ranks import Ranks


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "packed", "packed rows", "right", "left"])
@pytest.mark.parametrize("length", [41, 43, 44])
def test_parts_make_up_the_batch(ranks: Ranks, size: int, kind: str, length: int) -> None:
    batch = models.batch(kind, length)
    shards = ranks.run("batches.shards", size, kind=kind, length=length)[:size]

    def whole(name: str) -> Tensor:
        return torch.cat([shard[name] for shard in shards], dim=1)

    padding = -length % size
    assert {shard["input_ids"].shape[1] for shard in shards} == {(length + padding) // size}
    assert torch.equal(whole("input_ids")[:, :length], batch["input_ids"])
    assert (whole("input_ids")[:, length:] == 3).all()
    targets, weights = whole("targets"), whole("weights")
    # Every label but a sequence's first is some token's target, also across a boundary.
    assert torch.equal(targets[:, : length - 1], batch["labels"][:, 1:])
    assert (targets[:, length - 1 :] == -100).all()
    loss_mask = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(5))
    kept = batch["labels"][:, 1:] != -100
    assert torch.equal(weights[:, : length - 1], loss_mask[:, 1:] * kept)
    assert not weights[:, length - 1 :].any()
    positions = whole("position_ids")
    assert torch.equal(positions[:, length:], torch.arange(padding).expand(len(positions), -1))
    if "position_ids" in batch:
        assert torch.equal(positions[:, :length], batch["position_ids"])
    bounds = shards[0]["cu_seqlens"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == positions.numel()
    assert shards[0]["max_length"] == max(b - a for a, b in pairwise(bounds))
    assert all(torch.equal(shard["cu_seqlens"], shards[0]["cu_seqlens"]) for shard in shards)
    if kind == "packed":
        assert bounds[:-1] == [0, 7, 8, 23] + [length] * bool(padding)


def test_a_sequence_does_not_predict_the_next() -> None:
    ids = torch.arange(1, 8)[None]
    shard = shard_batch(ids, ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1]]))
    assert shard.targets.tolist() == [[2, 3, -100, 5, -100, 7, -100]]
    assert shard.weights.tolist() == [[1, 1, 0, 1, 0, 1, 0]]


def test_padding_is_one_run() -> None:
    """Whatever positions it was given: attention then meets it once, not token by token."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    assert shard_batch(torch.ones_like(mask), attention_mask=mask).cu_seqlens.tolist() == [0, 3, 6, 8, 12]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("needed_only", [False, True])
def test_images_across_boundaries(ranks: Ranks, size: int, needed_only: bool) -> None:
    found = ranks.run("batches.images", size, needed_only=needed_only)[:size]
    part = 2 * -(-45 // size)
    for rank in found:
        assert rank["embedded"]
        assert rank["table"] < 1e-5
        assert rank["features"] < 1e-5
        # Only this rank's tokens are embedded, and nothing as large as the whole sequence is made.
        assert rank["looked_up"] == [part]
        assert rank["largest"] == part * 64
        assert rank["straddles"]
    assert sorted(row for rank in found for row in rank["rows"]) == list(range(34))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (None, "0 image features for 34 placeholders in the batch"),
        (33, "33 image features for 34 placeholders in the batch"),
    ],
)
def test_wrong_number_of_images(ranks: Ranks, count: int | None, message: str) -> None:
    for said in ranks.run("batches.wrong_images", 2, count=count):
        assert said.startswith(message)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("gradients", ["averaged", "summed"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_loss_and_gradient(ranks: Ranks, size: int, gradients: str, masked: bool, gathered: bool) -> None:
    """Averaged as FSDP does, or summed: the gradient is the one of the whole batch's token mean."""
    found = ranks.run("batches.losses", size, gradients=gradients, masked=masked, gathered=gathered)
    for rank in found:
        assert rank["value"] > 1
        assert rank["loss"] < 1e-5
        assert rank["gradient"] < 1e-5


def test_without_process_groups() -> None:
    """In one process the same calls do the plain thing."""
    batch = models.batch("plain", 9)
    shard = shard_batch(**batch)
    logits = torch.randn(1, 9, models.VOCABULARY, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])
    assert torch.allclose(token_mean_loss(logits, shard), expected)
    assert torch.equal(gather_sequence(logits, shard), logits)
    assert torch.equal(shard.input_ids, batch["input_ids"])
    table = torch.nn.Embedding(models.VOCABULARY, 4)
    assert torch.equal(embed(shard, table), table(batch["input_ids"]))


def test_batch_without_targets_has_no_loss() -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = token_mean_loss(logits, shard_batch(ids, torch.full_like(ids, -100)))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.ones(1, 5)}, "labels is (1, 5), input_ids (1, 4)"),
        ({"position_ids": torch.arange(4)}, "position_ids is (4,), input_ids (1, 4)"),
        ({"loss_mask": torch.ones(2, 4)}, "loss_mask is (2, 4), input_ids (1, 4)"),
    ],
)
def test_wrong_shapes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KimiBridgeError, match="give all of the batch") as error:
        shard_batch(torch.ones(1, 4, dtype=torch.long), **changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        (torch.ones(1, 0, dtype=torch.long), {}, r"input_ids is \(1, 0\): give \[batch, sequence\] of one"),
        (torch.ones(0, 4, dtype=torch.long), {}, r"input_ids is \(0, 4\)"),
        (torch.ones(4, dtype=torch.long), {}, r"input_ids is \(4,\)"),
        (torch.ones(1, 4), {}, "input_ids is of torch.float32: give int64"),
        (torch.ones(1, 4, dtype=torch.long), {"labels": torch.ones(1, 4)}, "labels is of torch.float32"),
        (torch.ones(1, 4, dtype=torch.long), {"position_ids": torch.ones(1, 4)}, "position_ids is of"),
    ],
)
def test_no_batch(ids: Tensor, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KimiBridgeError, match=message):
        shard_batch(ids, **changes)


@pytest.mark.parametrize("shape", [(2, 8), (2, 2), (2, 3, 4), (2,)])
def test_features_of_another_width(shape: tuple[int, ...]) -> None:
    """Too many elements would be read row over row, and too few fail on some ranks alone."""
    shard = shard_batch(torch.tensor([[1, 200, 200, 2]]), image_token_id=200)
    with pytest.raises(KimiBridgeError, match=r"embeddings of width 4: give .rows, hidden\]"):
        embed(shard, torch.nn.Embedding(8, 4), torch.zeros(shape))


def test_labels_of_32_bits() -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    assert token_mean_loss(torch.zeros(1, 4, 8), shard_batch(ids, ids.int())) > 2


@pytest.mark.parametrize("shape", [(1, 5, 8), (4, 1, 8), (4, 8)])
def test_not_this_shards_logits(shape: tuple[int, ...]) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    shard = shard_batch(ids, ids)
    for function in (token_mean_loss, gather_sequence):
        with pytest.raises(KimiBridgeError, match=r"for this rank's \(1, 4\) tokens: give .batch, part"):
            function(torch.zeros(shape), shard)


def test_wrong_arguments() -> None:
    shard = shard_batch(torch.ones(1, 4, dtype=torch.long))
    logits = torch.zeros(1, 4, 8)
    with pytest.raises(KimiBridgeError, match="give `labels` to shard_batch"):
        token_mean_loss(logits, shard)
    with pytest.raises(KimiBridgeError, match='say "averaged"'):
        gather_sequence(logits, shard, "mean")
