"""Steps 1 to 5: the bridge, loading, a forward pass, the way back, and fake INT4 that changes nothing."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.gpu.check.folders import text_bytes
from tests.gpu.check.state import Check, Row

# Megatron's name and text_config's.
FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "layernorm_epsilon": "rms_norm_eps",
}


def dispatch(check: Check, row: Row) -> None:
    """AutoBridge finds this library's bridge, and the provider says what text_config says."""
    from kimi_bridge.megatron import assert_registered

    assert_registered()
    begin = time.perf_counter()
    bridge = check.base.bridge
    row.figures["first model built and loaded s"] = time.perf_counter() - begin
    row.figures["bridge"] = type(bridge._model_bridge).__name__
    row.expect(row.figures["bridge"] == "KimiK25TextBridge", "another bridge answers for the architecture")
    text = check.base.text_config
    for ours, theirs in FIELDS.items():
        got, wanted = getattr(check.base.provider, ours), getattr(text, theirs)
        row.expect(got == wanted, f"provider.{ours} is {got}, text_config.{theirs} {wanted}")
    row.figures["fields compared"] = len(FIELDS)
    row.figures["model"] = (
        f"{text.num_hidden_layers} layers, hidden {text.hidden_size}, {text.num_attention_heads} heads,"
        f" {text.n_routed_experts} experts of {text.moe_intermediate_size}, vocabulary {text.vocab_size}"
    )


def load(check: Check, row: Row) -> None:
    """The INT4 checkpoint into a model of NaN; the page cache is warm from building it."""
    from kimi_bridge.megatron import load_checkpoint

    with torch.no_grad():
        for chunk in check.base.chunks:
            for param in chunk.parameters():
                param.fill_(float("nan"))
    _wait()
    begin = time.perf_counter()
    load_checkpoint(check.base.bridge, check.base.chunks)
    _wait()
    seconds = time.perf_counter() - begin
    read = text_bytes(check.source)
    made = sum(p.nbytes for chunk in check.base.chunks for p in chunk.parameters())
    row.figures |= {
        "seconds": seconds,
        "GB read": read / 1e9,
        "GB/s read": read / seconds / 1e9,
        "GB/s of bf16": made / seconds / 1e9,
    }
    finite = all(p.isfinite().all() for chunk in check.base.chunks for p in chunk.parameters())
    row.expect(finite, "a parameter was not loaded, or is not finite")


def forward(check: Check, row: Row) -> None:
    """Log-probabilities of random tokens."""
    logits = check.base.logits(check.task[:, :-1]).float()
    row.expect(bool(logits.isfinite().all()), "the logits are not finite")
    logs = logits.log_softmax(-1)
    row.figures["loss"] = -logs.gather(-1, check.task[:, 1:, None]).mean().item()
    row.figures["entropy"] = torch.special.entr(logs.exp()).sum(-1).mean().item()
    row.figures["std of logits"] = logits.std().item()
    row.expect(row.figures["loss"] < 40, "the loss is far beyond that of a guess")


def roundtrip(check: Check, row: Row) -> None:
    """Export of the untouched model: the source's bits."""
    from kimi_bridge.checkpoint import verify_checkpoints
    from kimi_bridge.megatron import export_checkpoint

    begin = time.perf_counter()
    export_checkpoint(check.base.bridge, check.base.chunks, check.exported, overwrite=True)
    row.figures["export s"] = time.perf_counter() - begin
    report = verify_checkpoints(check.source, check.exported)
    row.figures["verify s"] = report.seconds
    row.figures["tensors"] = sum(kind.count for kind in report.rows)
    row.figures["identical"] = sum(kind.identical for kind in report.rows)
    row.expect(report.identical, f"{len(report.differences)} weights differ: {report.differences[:1]}")


def qat(check: Check, row: Row) -> None:
    """Fake INT4 on an untouched model computes the same bits, frozen and trained."""
    from kimi_bridge.megatron import disable_fake_int4, enable_fake_int4

    base, tokens = check.base, check.task[:, :-1]
    plain = base.logits(tokens)
    again = base.logits(tokens)
    row.figures["a second forward is the same"] = torch.equal(plain, again)
    for name, required in (("frozen", False), ("trained", True)):
        base.require_grad(required)
        report = enable_fake_int4(base.chunks)
        try:
            got = base.logits(tokens)
        finally:
            disable_fake_int4(base.chunks)
            base.require_grad(True)
        same = torch.equal(got, plain)
        row.figures[f"{name}: identical logits"] = same
        row.figures[f"{name}: weights"] = report.frozen + report.trained
        gap = (got.float() - plain.float()).abs().max().item()
        row.expect(same, f"{name}: logits differ by up to {gap:.3g} with fake INT4")
        row.expect(report.snapped == 0, f"{name}: {report.snapped} weights were not served values")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


STEPS: dict[str, tuple[str, Any]] = {
    "dispatch": ("dispatch and provider", dispatch),
    "load": ("load INT4", load),
    "forward": ("forward", forward),
    "roundtrip": ("weights round trip", roundtrip),
    "qat": ("QAT identity", qat),
}
