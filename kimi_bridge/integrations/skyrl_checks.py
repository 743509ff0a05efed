"""Settings of SkyRL that would train a Kimi model on other values than the engine serves, found at the start.

SkyRL itself takes them, and fails at the first sync or save, or never.
"""

from __future__ import annotations

from contextlib import ExitStack
from fnmatch import fnmatch
from typing import Any

from kimi_bridge.errors import KimiBridgeError

_POLICY = "trainer.policy"
_QAT = f"{_POLICY}.model.fake_int4_qat"
# Of a tensor's values: a few groups may fit no scheme.
_ODD_GROUPS = 0.01
# What vLLM accepts and does not apply.
_IGNORED = {"linear_kv_up_proj": "kv_b_proj", "router": "mlp.gate"}


def check_settings(settings: Any, model_path: str, weights_path: str | None) -> None:
    """Raises KimiBridgeError for what `trainer` settings cannot do with a Kimi checkpoint.

    `model_path` is what the engine serves, `weights_path` what the trainer loads if it is another.
    """
    from kimi_bridge.checkpoint import CheckpointReader, resolve_checkpoint

    lora = settings.policy.model.lora.rank > 0
    if lora and settings.policy.megatron_config.lora_config.merge_lora:
        raise KimiBridgeError(
            "merge_lora would merge the adapter into every sync, which neither an INT4 nor a bf16 export here"
            f" does: set {_POLICY}.megatron_config.lora_config.merge_lora=false to sync the adapter itself."
        )
    if lora and settings.hf_save_interval > 0:
        raise KimiBridgeError(
            "trainer.hf_save_interval would save the model with the adapter merged, which is not done here:"
            " set trainer.hf_save_interval=-1. The adapter that is synced (lora_sync_path) is in PEFT's"
            " format; `kimi-bridge merge-adapter` makes a checkpoint of it."
        )
    with ExitStack() as opened:
        served = opened.enter_context(CheckpointReader(resolve_checkpoint(model_path)))
        if served.quantization is None:
            return
        masters = served
        if weights_path is not None:
            masters = opened.enter_context(CheckpointReader(resolve_checkpoint(weights_path)))
        if not lora and masters.quantization is None:
            raise KimiBridgeError(
                f"{_POLICY}.model.path is INT4 and {_QAT}.bf16_base_path is not: without LoRA SkyRL would"
                " sync and save plain weights under an INT4 config. Train LoRA"
                f" ({_POLICY}.model.lora.rank=32), or serve the bf16 checkpoint."
            )
        if settings.policy.model.fake_int4_qat.enabled:
            _check_qat(settings.policy.model.fake_int4_qat, served, masters)


def _check_qat(settings: Any, served: Any, masters: Any) -> None:
    """Fake quantization must give the frozen experts' served values; shown for one of them."""
    from kimi_bridge.int4 import Int4Scheme, fake_quantize

    said = (
        f"{_QAT}: group_size={settings.group_size} scale_divisor={settings.scale_divisor}"
        f" q_min={settings.q_min}"
    )
    cure = (
        f"Moonshot's checkpoints have group_size=32 scale_divisor=7.0 q_min=-7. Or set {_QAT}.enabled=false:"
        " frozen experts are loaded from INT4 as the values that the engine serves."
    )
    name = next(name for name, is_int4 in served.weights().items() if is_int4)
    values = served.weight(name)
    if name not in masters.weights() or masters.shape(name) != values.shape:
        raise KimiBridgeError(
            f"{_QAT}.bf16_base_path has no {name} of {tuple(values.shape)}, as model.path has."
        )
    try:
        scheme = Int4Scheme(settings.group_size, float(settings.scale_divisor), int(settings.q_min))
        trained = fake_quantize(masters.weight(name).to(values.dtype), scheme)
    except (ValueError, TypeError, OverflowError) as error:
        raise KimiBridgeError(f"{said} cannot be ({error}) {cure}") from error
    other = (trained != values).float().mean().item()
    if other > _ODD_GROUPS or scheme.q_min != settings.q_min or not settings.symmetric:
        raise KimiBridgeError(
            f"{said} symmetric={settings.symmetric} trains on other values than {served.path} serves:"
            f" {100 * other:.0f}% of {name} differ. {cure}"
        )


def check_targets(lora: Any, config: Any) -> None:
    """Raises KimiBridgeError for names of a Megatron-Bridge LoRA that no module here has, or vLLM ignores."""
    queries = ["linear_q_proj"] if config.q_lora_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
    # CanonicalLoRA has them apart.
    apart = any("linear_fc1_" in name for name in lora.target_modules)
    gate_up = ["linear_fc1_gate", "linear_fc1_up"] if apart else ["linear_fc1"]
    useful = [*queries, "linear_kv_down_proj", "linear_proj", *gate_up, "linear_fc2"]
    cure = f'set "{_POLICY}.model.lora.target_modules=[{",".join(useful)}]", or some of these.'
    if isinstance(lora.target_modules, str):
        raise KimiBridgeError(
            f"target_modules={lora.target_modules} is one string, not a list of names: {cure}"
        )
    for target in lora.target_modules:
        name = target.rpartition(".")[2]
        if not any(fnmatch(known, name) for known in [*useful, *_IGNORED]):
            raise KimiBridgeError(f"LoRA's target {target} is no module of this model: {cure}")
        if name in _IGNORED:
            raise KimiBridgeError(f"vLLM does not apply LoRA on {_IGNORED[name]} ({target}): {cure}")
