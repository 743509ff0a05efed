"""Synthesized checkpoints: the published structure, by seed, with what each convention leaves behind."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import DATA, EXPERT, INDEX, contents, real_inventory, same_bits
from transformers import AutoConfig, AutoTokenizer, DeepseekV3ForCausalLM, GenerationConfig

from kimi_bridge.checkpoint import (
    FAMILIES,
    CheckpointReader,
    CheckpointWriter,
    TensorSpec,
    synthesize_checkpoint,
    tensor_kind,
)
from kimi_bridge.checkpoint.synthetic_config import checkpoint_specs, synthetic_config
from kimi_bridge.checkpoint.synthetic_values import VALUES
from kimi_bridge.checkpoint.triplets import part_names
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import KIMI_QAT, dequantize, quantize, unpack

PUBLISHED = json.loads((DATA / "config.json").read_text())


def test_the_published_config_implies_the_published_tensors() -> None:
    specs = {spec.name: spec for spec in checkpoint_specs(PUBLISHED)}
    inventory = real_inventory()
    assert specs.keys() == inventory.keys()
    for name, (dtype, shape) in inventory.items():
        assert (str(specs[name].dtype), specs[name].shape) == (f"torch.{dtype}", shape)


KIMI_VL = json.loads((DATA / "config.kimi_vl.json").read_text())


def test_kimi_vl_a3b_implies_its_tensors() -> None:
    """Kimi-VL-A3B has 16.4 billion parameters: the names and shapes of vLLM's model and of its projector."""
    specs = {spec.name: spec for spec in checkpoint_specs(KIMI_VL)}
    assert {spec.dtype for spec in specs.values()} == {torch.bfloat16}
    text = "language_model.model.layers.26."
    shapes = {
        text + "self_attn.q_proj.weight": (16 * 192, 2048),
        text + "self_attn.kv_b_proj.weight": (16 * 256, 512),
        text + "mlp.gate.e_score_correction_bias": (64,),
        text + "mlp.experts.63.down_proj.weight": (2048, 1408),
        text + "mlp.shared_experts.up_proj.weight": (2816, 2048),
        "language_model.model.layers.0.mlp.gate_proj.weight": (11264, 2048),
        "vision_tower.encoder.blocks.26.wqkv.bias": (3456,),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1152),
        "multi_modal_projector.pre_norm.bias": (1152,),
        "multi_modal_projector.linear_1.weight": (4608, 4608),
        "multi_modal_projector.linear_2.weight": (2048, 4608),
    }
    assert {name: specs[name].shape for name in shapes} == shapes
    assert 16.3e9 < sum(math.prod(spec.shape) for spec in specs.values()) < 16.5e9


def test_kimi_vl_config_has_every_published_key_but_auto_map(kimi_vl: Path) -> None:
    config = json.loads((kimi_vl / "config.json").read_text())
    assert config.keys() == KIMI_VL.keys() - {"auto_map"}
    for part in ("text_config", "vision_config"):
        assert config[part].keys() == KIMI_VL[part].keys()
    scaled = set(VALUES["kimi_vl"].sizes["tiny"][0]) | {"bos_token_id", "eos_token_id", "pad_token_id"}
    for key in KIMI_VL["text_config"].keys() - scaled:
        assert config["text_config"][key] == KIMI_VL["text_config"][key], key
    assert AutoConfig.from_pretrained(kimi_vl, trust_remote_code=False).to_dict() == config


def test_every_published_kind_of_tensor_is_there_and_no_other(tiny: Path) -> None:
    reader = CheckpointReader(tiny)
    entries = json.loads((DATA / "tensors.json").read_text())["tensors"]
    patterns = {re.sub(r"\\{\w+\\}", r"\\d+", re.escape(entry["name"])): entry for entry in entries}
    counts = dict.fromkeys(patterns, 0)
    for name in reader.names():
        (pattern,) = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
        counts[pattern] += 1
        info, entry = reader.info(name), patterns[pattern]
        assert (str(info.dtype), len(info.shape)) == (f"torch.{entry['dtype']}", len(entry["shape"]))
        assert tensor_kind(name) != "other"
    assert all(counts.values())


def test_config_has_every_published_key_but_auto_map(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert config.keys() == PUBLISHED.keys() - {"auto_map"}
    assert config["text_config"].keys() == PUBLISHED["text_config"].keys() - {"auto_map"}
    assert config["vision_config"].keys() == PUBLISHED["vision_config"].keys()
    scaled = set(VALUES["kimi_k25"].sizes["tiny"][0]) | {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "auto_map",
    }
    for key in PUBLISHED["text_config"].keys() - scaled:
        assert config["text_config"][key] == PUBLISHED["text_config"][key], key
    loaded = AutoConfig.from_pretrained(tiny, trust_remote_code=False)
    assert loaded.to_dict() == config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_bytes(family: str, tiny: Path, kimi_vl: Path, tmp_path: Path) -> None:
    first = contents(synthesize_checkpoint(tmp_path / "again", family=family))
    assert first == contents(kimi_vl if family == "kimi_vl" else tiny)
    other = contents(synthesize_checkpoint(tmp_path / "other", seed=1, family=family))
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith(".safetensors")
    }
    assert sum(map(len, first.values())) < 5_000_000


@pytest.mark.parametrize("overrides", [{}, {"n_routed_experts": 4}, {"num_hidden_layers": 2}])
def test_a_triplet_lies_in_two_shards(tmp_path: Path, overrides: dict[str, Any]) -> None:
    synthesize_checkpoint(tmp_path / "new", overrides=overrides)
    reader = CheckpointReader(tmp_path / "new")
    reader.check()
    assert len(set(reader.weight_map.values())) > 1
    files = [
        {reader.info(part).filename for part in part_names(name)}
        for name, is_triplet in reader.weights().items()
        if is_triplet
    ]
    assert any(len(names) == 2 for names in files)


@pytest.mark.parametrize("size", list(VALUES["kimi_k25"].sizes))
def test_tensor_parallel_halves_are_whole_groups(size: str) -> None:
    for spec in checkpoint_specs(synthetic_config(size)):
        if spec.name.endswith("weight_scale"):
            assert spec.shape[0] % 2 == spec.shape[1] % 2 == 0
    text = synthetic_config(size)["text_config"]
    assert text["vocab_size"] % 1280 == 0
    assert text["qk_rope_head_dim"] % 2 == 0


def test_the_small_size_is_some_hundred_megabytes() -> None:
    for family in FAMILIES:
        specs = checkpoint_specs(synthetic_config("small", family=family))
        assert 2e8 < sum(spec.nbytes for spec in specs) < 8e8


def codes_and_scales(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [groups, 32] and scales [groups] of all INT4 weights."""
    reader = CheckpointReader(folder)
    weights = [reader.int4(name) for name, is_triplet in reader.weights().items() if is_triplet]
    codes = torch.cat([unpack(w.packed, w.shape).reshape(-1, 32) for w in weights])
    return codes.int(), torch.cat([w.scale.flatten() for w in weights])


def test_kimi_groups_reach_7_and_never_minus_8(checkpoints: Path) -> None:
    codes, scales = codes_and_scales(checkpoints / "kimi")
    assert codes.abs().amax(1).eq(7).all()
    assert codes.min() == -7
    assert scales.gt(0).all()


def test_rtn_groups_reach_7_and_half_of_them_minus_8(checkpoints: Path) -> None:
    codes, _ = codes_and_scales(checkpoints / "rtn")
    assert 0.25 < codes.eq(-8).any(1).float().mean() < 0.75
    assert codes.abs().amax(1).ge(7).all()


def test_mixed_groups_hold_every_trap(checkpoints: Path) -> None:
    codes, scales = codes_and_scales(checkpoints / "mixed")
    zero, largest = codes.eq(0).all(1), codes.abs().amax(1)
    smallest_normal = torch.finfo(torch.bfloat16).tiny
    traps = {
        "zero scale and zero codes": zero & scales.eq(0),
        "zero codes under a scale": zero & scales.ne(0),
        "codes of -8": codes.eq(-8).any(1),
        "largest code below 7": largest.lt(7) & ~zero,
        "denormal scale": scales.gt(0) & scales.lt(smallest_normal),
        "normal scale": scales.ge(smallest_normal),
    }
    assert {name for name, groups in traps.items() if groups.float().mean() < 0.03} == set()
    assert not (scales.eq(0) & ~zero).any()
    reader = CheckpointReader(checkpoints / "mixed")
    weight = reader.int4(EXPERT)
    again = quantize(dequantize(weight), KIMI_QAT)
    reaches_7 = unpack(weight.packed, weight.shape).unflatten(1, (-1, 32)).abs().amax(-1).eq(7)
    assert (again.scale.ne(weight.scale) & reaches_7).any()


@pytest.mark.parametrize("convention", ["kimi", "mixed"])
def test_bf16_checkpoints_are_the_int4_ones_dequantized(checkpoints: Path, convention: str) -> None:
    int4 = CheckpointReader(checkpoints / convention)
    plain = CheckpointReader(checkpoints / f"{convention}_bf16")
    plain.check()
    assert plain.quantization is None
    assert plain.weight_names() == plain.names()
    assert set(plain.names()) == set(int4.weight_names())
    assert all(same_bits(plain.weight(name), int4.weight(name)) for name in plain.names())


def test_without_q_lora_rank(tmp_path: Path) -> None:
    synthesize_checkpoint(tmp_path / "new", overrides={"q_lora_rank": None})
    reader = CheckpointReader(tmp_path / "new")
    reader.check()
    assert reader.config.text_config.q_lora_rank is None
    prefix = "language_model.model.layers.0.self_attn."
    assert reader.info(prefix + "q_proj.weight").shape == (4 * 24, 128)
    assert not any("q_a_" in name or "q_b_" in name for name in reader.names())


@pytest.mark.parametrize("name", ["kimi", "kimi_vl"])
def test_tokenizer(name: str, checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    config = json.loads((checkpoints / name / "config.json").read_text())
    assert len(tokenizer) == config["text_config"]["vocab_size"] == 1280
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert (
            getattr(tokenizer, key) == config["text_config"][key] == config.get(key, getattr(tokenizer, key))
        )
        # As far from the end of the vocabulary as published.
        assert 1280 - config["text_config"][key] == 163840 - PUBLISHED[key]
    assert tokenizer.convert_tokens_to_ids("<|media_pad|>") == config["media_placeholder_token_id"]
    text = "Grüße, the quick brown fox!\n\t你好 \U0001f600"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 1024
    assert len(ids) < len(text.encode())


def test_chat_template(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    parts = [{"type": "image_url"}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
        "What is it?<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )


def test_generation_config(tiny: Path) -> None:
    assert GenerationConfig.from_pretrained(tiny).eos_token_id == 1025


@pytest.mark.parametrize("name", ["kimi", "kimi_vl"])
def test_a_forward_gives_a_distribution_that_is_neither_uniform_nor_one_hot(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    reader = CheckpointReader(checkpoints / name)
    weights = {
        name.removeprefix("language_model."): reader.weight(name)
        for name in reader.weight_names()
        if name.startswith("language_model.")
    }
    specs = [TensorSpec(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()]
    with CheckpointWriter(tmp_path / "text", specs) as writer:
        for name, weight in weights.items():
            writer.write(name, weight)
    config = reader.config.text_config
    if reader.quantization is not None:
        del config.quantization_config
    config.save_pretrained(tmp_path / "text")
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "text", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(128).reshape(2, 64) * 7 % 1024
    with torch.no_grad():
        logits = model(tokens).logits
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert 0.4 * math.log(1280) < entropy.mean() < 0.9 * math.log(1280)
    assert logits.argmax(-1).unique().numel() > 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "Unknown size 'huge': choose from tiny, small"),
        ({"family": "llama"}, "Unknown family 'llama': choose from kimi_k25, kimi_vl"),
        ({"family": "kimi_vl", "int4": True}, "Kimi-VL is published in bfloat16"),
        ({"family": "kimi_vl", "convention": "rtn"}, "Kimi-VL is published in bfloat16"),
        ({"convention": "gptq"}, "Unknown convention 'gptq'"),
        ({"overrides": {"vocab_size": 100}}, "vocab_size is 100"),
        ({"overrides": {"moe_intermediate_size": 48}}, "rows of 48, which are not whole groups of 32"),
        ({"overrides": {"hidden_act": 3}}, "text_config in config.json has a value that cannot be"),
    ],
)
def test_unusable_arguments_leave_nothing(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        synthesize_checkpoint(tmp_path / "new", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_old_checkpoint_is_only_replaced_on_request(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "new")
    with pytest.raises(CheckpointError, match="already holds model-00001"):
        synthesize_checkpoint(tmp_path / "new", seed=1)
    assert contents(tmp_path / "new") == contents(tiny)
    synthesize_checkpoint(tmp_path / "new", int4=False, overwrite=True)
    CheckpointReader(tmp_path / "new").check()
    assert "weight_packed" not in (tmp_path / "new" / INDEX).read_text()
