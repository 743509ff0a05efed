"""What the ranks run: each compares a sharded model with the same model in one process, on every rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    MistralConfig,
    MistralForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.patches import transformers_ulysses
from kimi_bridge.sequence_parallel import (
    SequenceShard,
    count_traffic,
    gather_sequence,
    shard_batch,
    token_mean_loss,
)
from kimi_bridge.sequence_parallel.attention import ulysses_attention
from tests.sequence_parallel import models, remote_code


def parity(
    group: Any,
    model: str,
    kind: str,
    length: int,
    arguments: tuple = (),
    checkpointing: bool = False,
    before: bool = False,
) -> dict:
    """Largest differences of logits, loss and gradients (relative) from the model in one process."""
    single = getattr(models, model)(*arguments)
    batch = models.batch(kind, length)
    logits, loss = whole(single, batch)
    expected = gradients(single, loss)

    if before:
        transformers_ulysses.apply(None)
    said = transformers_ulysses.apply(group)
    sharded = getattr(models, model)(*arguments)
    if checkpointing:
        sharded.train().gradient_checkpointing_enable()
    shard = cut(batch, group)
    with count_traffic() as traffic:
        own = sharded(shard.input_ids, use_cache=False, **shard.attention_kwargs()).logits
        own_loss = token_mean_loss(own, shard, group, gradients="summed")
        own_gradients = gradients(sharded, own_loss)
    for gradient in own_gradients.values():
        dist.all_reduce(gradient, group=group)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    gathered = gather_sequence(own.detach(), shard)
    return {
        "said": said,
        "logits": (gathered - logits)[real].abs().max().item(),
        "scale": logits[real].abs().max().item(),
        "loss": abs(own_loss.item() - loss.item()),
        "gradients": max(relative(own_gradients[name], expected[name]) for name in expected),
        "bits": all(torch.equal(own_gradients[name], expected[name]) for name in expected)
        and torch.equal(gathered[real], logits[real]),
        "tokens": shard.input_ids.numel(),
        "traffic": (traffic.forward, traffic.backward),
    }


def half_precision(group: Any, kind: str, length: int, implementation: str, device: str) -> dict:
    """How far bfloat16 logits and gradients of one rank and of all are from one rank's in float32.

    A dense model with MLA's real head widths: with experts, near ties would send tokens elsewhere.
    """
    widths = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    widths |= {"kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    # Depth and range keep the softmax far from both uniform and one-hot.
    exact = models.deepseek(None, **widths, first_k_dense_replace=2, initializer_range=0.05).to(device)
    half = models.deepseek(None, **widths, first_k_dense_replace=2, initializer_range=0.05).to(device)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    exact.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    half.set_attn_implementation(implementation)
    batch = {name: tensor.to(device) for name, tensor in models.batch(kind, length).items()}
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    alone = dist.new_subgroups(1)[0]
    # Lengths as numbers: flash attention 4 does not take the tensors that transformers makes of positions.
    lengths = shard_batch(**batch, group=alone).attention_kwargs() if "position_ids" in batch else {}

    results = {}
    for name, model in (("exact", exact), ("alone", half)):
        logits, loss = whole(model, batch | lengths)
        results[name] = logits[real].float(), flat(gradients(model, loss))
    half.zero_grad(set_to_none=True)
    transformers_ulysses.apply(group)
    shard = cut(batch, group)
    logits = half(shard.input_ids, use_cache=False, **shard.attention_kwargs()).logits
    found = flat(gradients(half, token_mean_loss(logits, shard, group, gradients="summed")))
    dist.all_reduce(found, group=group)
    results["ulysses"] = gather_sequence(logits.detach(), shard)[real].float(), found
    expected = results.pop("exact")
    return {name: [relative(a, b) for a, b in zip(r, expected, strict=True)] for name, r in results.items()}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def whole(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and transformers' own loss of the whole batch, in one process."""
    output = model(**batch, use_cache=False)
    return output.logits.detach(), output.loss


def cut(batch: dict[str, Tensor], group: Any) -> SequenceShard:
    return shard_batch(**batch, group=group)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def unsharded_attention(group: Any) -> float:
    """The same shards without the patch: every part sees itself alone."""
    model, batch = models.deepseek(None), models.batch("plain", 48)
    expected, _ = whole(model, batch)
    shard = cut(batch, group)
    own = model(shard.input_ids, use_cache=False, position_ids=shard.position_ids).logits
    return (gather_sequence(own.detach(), shard) - expected).abs().max().item()


def from_positions(group: Any, kind: str, late: bool = False) -> float:
    """A trainer that gives nothing but its part of position_ids and of the mask, and loads a kernel late."""
    model, batch = models.deepseek(None), models.batch(kind, 48)
    expected, _ = whole(model, batch)
    transformers_ulysses.apply(group)
    if late:
        # As transformers does when it loads one: a name of its own, and the mask function of another.
        AttentionInterface.register("late_kernel", sdpa_attention_forward)
        AttentionMaskInterface.register("late_kernel", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation("late_kernel")
    shard = cut(batch, group)
    mask = batch.get("attention_mask")
    if mask is not None:
        mask = mask.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
    own = model(shard.input_ids, position_ids=shard.position_ids, attention_mask=mask, use_cache=False).logits
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return (gather_sequence(own.detach(), shard) - expected)[real].abs().max().item()


def variable_length(group: Any) -> list[float]:
    """Flash attention's way (cumulative lengths, equal widths) against sdpa's, forward and backward.

    The kernel here is a plain loop with the contract of flash attention; the real ones need a GPU.
    """

    def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any) -> Any:
        assert query.shape[0] == 1
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert kwargs["cu_seq_lens_q"].dtype == torch.int32
        assert "position_ids" not in kwargs
        bounds = kwargs["cu_seq_lens_q"].tolist()
        assert kwargs["max_length_k"] == max(b - a for a, b in pairwise(bounds))
        pieces = [
            functional.scaled_dot_product_attention(
                *(x[:, :, a:b] for x in (query, key, value)), scale=kwargs["scaling"], is_causal=True
            )
            for a, b in pairwise(bounds)
        ]
        return torch.cat(pieces, dim=2).transpose(1, 2), None

    module = models.deepseek(None).model.layers[0].self_attn
    batch = models.batch("packed rows", 48)
    shard = cut(batch, group)
    transformers_ulysses.apply(group)
    arguments = shard.attention_kwargs()
    transformers_ulysses.undo()
    states = [
        torch.randn(2, 4, 48 // dist.get_world_size(group), w, requires_grad=True) for w in (24, 24, 24)
    ]
    results = []
    for inner, varlen in ((sdpa_attention_forward, False), (kernel, True)):
        output = ulysses_attention(inner, module, *states, None, group, varlen, scaling=0.3, **arguments)
        results.append([output, *torch.autograd.grad(output.square().sum(), states)])
    assert results[0][0].shape[-1] == module.v_head_dim
    return [relative(b, a) for a, b in zip(*results, strict=True)]


def remote(group: Any, name: str, q_lora_rank: int | None, padded: bool) -> list[float]:
    """Layers of a checkpoint's own attention class: output and gradients against its own forward."""
    config = models.deepseek(q_lora_rank).config
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    layers = remote_code.Layers(getattr(remote_code, name), config)
    states, positions = torch.randn(2, 48, 64), torch.arange(48).expand(2, -1)
    padding = torch.ones(2, 48)
    if padded:
        padding[0, 20:] = 0
    weights = torch.randn(2, 48, 64) * padding[..., None]

    expected = layers(states, positions, padding)
    (expected * weights).sum().backward()
    reference = {key: p.grad.clone() for key, p in layers.named_parameters()}
    layers.zero_grad()
    original = type(layers.layers[0]).forward
    said = transformers_ulysses.apply(group, layers)
    assert name in said
    assert "earlier" in transformers_ulysses.apply(group, layers)
    parts = [
        x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        for x in (states, positions, padding, weights)
    ]
    output = layers(*parts[:3])
    (output * parts[3]).sum().backward()
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad, group=group)
    transformers_ulysses.undo()
    assert type(layers.layers[0]).forward is original
    own = expected.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
    differences = [(p.grad, reference[key]) for key, p in layers.named_parameters()]
    real = parts[2].bool()
    return [relative(output[real], own[real]), max(relative(a, b) for a, b in differences)]


def patching(group: Any) -> dict:
    """What apply and undo say and leave behind; the same for all group sizes."""
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    masks = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()}
    first = transformers_ulysses.apply(group)
    wrapped = dict(ALL_ATTENTION_FUNCTIONS.items())
    second = transformers_ulysses.apply(group)
    same = wrapped == dict(ALL_ATTENTION_FUNCTIONS.items())
    undone = transformers_ulysses.undo()
    restored = before == dict(ALL_ATTENTION_FUNCTIONS.items())
    restored &= masks == dict(ALL_MASK_ATTENTION_FUNCTIONS.items())
    return {
        "first": first,
        "second": second,
        "undone": [undone, transformers_ulysses.undo()],
        "idempotent": same,
        "restored": restored,
        "changed": wrapped["sdpa"] is not before["sdpa"],
    }


def encoder(group: Any) -> bool:
    """A vision tower is not causal, so each rank computes its own images as ever: the same bits."""
    torch.manual_seed(dist.get_rank())
    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3 + 1, image_size=28
    )
    pixels = torch.randn(1, 3, 28, 28)
    same = []
    for implementation in ("sdpa", "eager"):
        config._attn_implementation = implementation
        model = SiglipVisionModel(config).eval()
        expected = model(pixels).last_hidden_state
        transformers_ulysses.apply(group)
        same.append(torch.equal(model(pixels).last_hidden_state, expected))
        transformers_ulysses.undo()
    return all(same)


def refused(group: Any, case: str) -> str:
    """The message of what must not run sharded."""
    model = models.llama(6, 6) if case == "heads" else models.deepseek(None)
    if case == "window":
        torch.manual_seed(0)
        model = MistralForCausalLM(
            MistralConfig(**models.SMALL, sliding_window=8, attn_implementation="sdpa")
        )
    if case in ("eager", "flex_attention"):
        model.config._attn_implementation = case
    layers = nn.ModuleList([remote_code.LatentFreeAttention()])
    ids = torch.ones(1, 8, dtype=torch.long)
    kwargs: dict[str, Any] = {"position_ids": 8 * dist.get_rank(group) + torch.arange(8)[None]}
    if case == "mask":
        kwargs["attention_mask"] = torch.ones(1, 32, dtype=torch.long)
    if case == "four dimensions":
        kwargs["attention_mask"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    if case == "lengths":
        kwargs |= dict.fromkeys(
            ["cu_seq_lens_q", "cu_seq_lens_k"], torch.tensor([0, 4, 8], dtype=torch.int32)
        )
    try:
        if case == "not applied":
            shard_batch(ids, group=group).attention_kwargs()
        transformers_ulysses.apply(group, layers if case == "class" else None)
        if case == "cache":
            cache = model(ids, use_cache=True, **kwargs).past_key_values
            model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[8]]))
        if case == "blocks":
            # What models do whose image tokens see each other.
            blocks, embeds = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1]]), torch.zeros(1, 8, 4)
            create_causal_mask(model.config, embeds, None, None, block_sequence_ids=blocks)
        if case == "group":
            # Of the same size: shapes alone would not tell.
            transformers_ulysses.apply(dist.new_subgroups(2)[0])
            crossed = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
            shard_batch(ids, group=crossed).attention_kwargs()
        if case == "positions":
            kwargs = {}
        model(ids, use_cache=False, **kwargs)
    except KimiBridgeError as error:
        return str(error)
    return "nothing was refused"


def outside(group: Any) -> list[str]:
    """What the first rank alone, and then all others, are told about a group of the first rank."""
    alone, said = dist.new_group([0]), []
    ids = torch.ones(1, 8, dtype=torch.long)
    for call in (transformers_ulysses.apply, lambda group: shard_batch(ids, group=group)):
        try:
            call(alone)
        except KimiBridgeError as error:
            said.append(str(error))
    return said
