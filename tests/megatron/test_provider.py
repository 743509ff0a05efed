"""Every setting that matters, as the config implies it, for both forms of the real config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_bridge.errors import KimiBridgeError
from tests.megatron.ranks import Ranks

DATA = Path(__file__).parents[1] / "data"

EXPECTED: dict[str, Any] = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "seq_length": 262144,
    "layernorm_epsilon": 1e-5,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "share_embeddings_and_output_weights": False,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    # MLA
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    # YaRN
    "position_embedding_type": "rope",
    "rope_type": "yarn",
    "rotary_base": 50000,
    "rotary_scaling_factor": 64,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1,
    "mscale_all_dim": 1,
    # MoE
    "num_moe_experts": 384,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] + [1] * 60,
    "moe_grouped_gemm": True,
    # Router
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.827,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_aux_loss_coeff": 0.001,
    "mtp_num_layers": None,
}


KIMI_VL = EXPECTED | {
    "num_layers": 27,
    "hidden_size": 2048,
    "ffn_hidden_size": 11264,
    "num_attention_heads": 16,
    "seq_length": 131072,
    "q_lora_rank": None,
    # YaRN with a factor of 1 is plain rotary embedding, and scales no logit.
    "rotary_base": 800000,
    "rotary_scaling_factor": 1,
    "num_moe_experts": 64,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2 * 1408,
    "moe_layer_freq": [0] + [1] * 26,
    "moe_router_topk": 6,
    "moe_router_topk_scaling_factor": 2.446,
}


def write_config(tmp_path: Path, file: str, **changes: Any) -> None:
    config = json.loads((DATA / file).read_text())
    top = changes.pop("top", {})
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config | top))


def fields(ranks: Ranks, tmp_path: Path, file: str, **changes: Any) -> dict[str, Any]:
    write_config(tmp_path, file, **changes)
    return ranks.run("provider_fields", src=str(tmp_path), names=list(EXPECTED))


@pytest.mark.parametrize("file", ["config.json", "config.transformers5.json"])
def test_both_forms_of_the_real_config(file: str, ranks: Ranks, tmp_path: Path) -> None:
    assert fields(ranks, tmp_path, file) == EXPECTED


def test_kimi_vl(ranks: Ranks, tmp_path: Path) -> None:
    assert fields(ranks, tmp_path, "config.kimi_vl.json") == KIMI_VL
    got = fields(ranks, tmp_path, "config.kimi_vl.json", top={"tie_word_embeddings": True})
    assert got == KIMI_VL | {"share_embeddings_and_output_weights": True}


def test_q_lora_rank_null(ranks: Ranks, tmp_path: Path) -> None:
    assert fields(ranks, tmp_path, "config.json", q_lora_rank=None) == EXPECTED | {"q_lora_rank": None}


def test_tying_is_read_from_the_top_level(ranks: Ranks, tmp_path: Path) -> None:
    got = fields(ranks, tmp_path, "config.json", top={"tie_word_embeddings": True})
    assert got == EXPECTED | {"share_embeddings_and_output_weights": True}


def test_registration_survives_a_later_one(ranks: Ranks) -> None:
    seen = ranks.run("registration")
    assert seen["first"] == seen["last"] == "KimiK25TextBridge"
    assert seen["kimi_vl"] == "KimiVLTextBridge"
    assert "KimiK25VLBridge" in seen["error"]
    assert "kimi_bridge.megatron.register()" in seen["error"]


def test_a_rank_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_bridge.megatron import runtime

    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert [runtime.gpu_of(rank, gpus=2) for rank in (0, 1)] == [0, 1]
    with pytest.raises(KimiBridgeError, match=r"Local rank 2 has no GPU of its own: 2 visible .*_node 2 at"):
        runtime.gpu_of(2, gpus=2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [runtime.gpu_of(rank, gpus=1) for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("moe_layer_freq", 2),
        ("attention_bias", True),
        ("num_experts_per_tok", 0),
        ("num_hidden_layers", 0),
        ("n_routed_experts", 0),
        ("n_shared_experts", 0),
        ("first_k_dense_replace", None),
        ("first_k_dense_replace", 99),
        ("n_group", 5),
        ("topk_group", 2),
        ("routed_scaling_factor", float("nan")),
        ("rope_theta", 0),
        ("rope_scaling", {"type": "linear", "factor": 4.0}),
    ],
)
def test_settings_that_cannot_be(key: str, value: Any, ranks: Ranks, tmp_path: Path) -> None:
    write_config(tmp_path, "config.json", **{key: value})
    errors = ranks.errors("provider_fields", src=str(tmp_path), names=[])
    assert {error.kind for error in errors} == {"CheckpointError"}
    assert "in config.json" in errors[0].message
    assert key in errors[0].message or key == "topk_group"


def test_dtype_stated_on_the_top_level_alone(ranks: Ranks, tmp_path: Path) -> None:
    content = json.loads((DATA / "config.kimi_vl.json").read_text())
    for level in (content, content["text_config"]):
        for key in ("torch_dtype", "dtype"):
            level.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(content | {"torch_dtype": "bfloat16"}))
    found = ranks.run("provider_fields", src=str(tmp_path), names=["params_dtype", "bf16"])
    assert found == {"params_dtype": torch.bfloat16, "bf16": True}


def test_a_config_without_key_value_heads(ranks: Ranks, tmp_path: Path) -> None:
    """MLA has none; transformers' default for the key is another model's."""
    content = json.loads((DATA / "config.kimi_vl.json").read_text())
    del content["text_config"]["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert ranks.run("provider_fields", src=str(tmp_path), names=list(EXPECTED)) == KIMI_VL
