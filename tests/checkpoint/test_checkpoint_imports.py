"""The package can be used where neither Megatron nor vLLM nor Ray is installed, and costs nothing unasked."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("kimi_bridge", "torch transformers numpy safetensors megatron vllm ray"),
        ("kimi_bridge.checkpoint", "megatron vllm ray transformer_engine modelopt"),
    ],
)
def test_imports(module: str, forbidden: str) -> None:
    program = f"import sys, {module}; print(*(set('{forbidden}'.split()) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == ""


def test_kinds() -> None:
    from kimi_bridge.checkpoint import tensor_kind

    layer = "language_model.model.layers.10."
    kinds = {
        "language_model.model.embed_tokens.weight": "embeddings",
        "language_model.lm_head.weight": "lm_head",
        "language_model.model.norm.weight": "norms",
        layer + "post_attention_layernorm.weight": "norms",
        layer + "self_attn.q_a_layernorm.weight": "norms",
        layer + "self_attn.q_a_proj.weight": "attention",
        layer + "mlp.gate.e_score_correction_bias": "router",
        layer + "mlp.gate_proj.weight": "dense mlp",
        layer + "mlp.experts.383.gate_proj.weight_packed": "experts",
        layer + "mlp.shared_experts.up_proj.weight": "shared experts",
        "vision_tower.encoder.blocks.0.norm0.weight": "vision tower",
        "mm_projector.proj.0.bias": "projector",
        "multi_modal_projector.linear_1.bias": "projector",
        "language_model.model.layers.61.eh_proj.weight": "other",
        "something.weight": "other",
    }
    assert {name: tensor_kind(name) for name in kinds} == kinds
