"""Settings under which trainer and engine would differ, on SkyRL's own configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL: make setup-skyrl")

from kimi_bridge.checkpoint import dequantize_checkpoint, synthesize_checkpoint
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.integrations.skyrl_checks import check_settings, check_targets
from tests.integrations.skyrl_worker import overrides

QAT = "trainer.policy.model.fake_int4_qat"
KIMI = (f"{QAT}.enabled=true", f"{QAT}.scale_divisor=7.0", f"{QAT}.q_min=-7")
LORA = "trainer.policy.megatron_config.lora_config"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checks")
    for convention in ("kimi", "rtn"):
        synthesize_checkpoint(folder / convention, convention=convention)
    dequantize_checkpoint(folder / "kimi", folder / "bf16")
    return {path.name: str(path) for path in folder.iterdir()}


def check(source: str, *more: str, lora: int = 8, masters: str | None = None) -> None:
    from skyrl.train.config import SkyRLTrainConfig

    settings = SkyRLTrainConfig.from_cli_overrides(overrides(source, *more, lora=lora)).trainer
    check_settings(settings, source, masters)


def test_what_fits(folders: dict[str, str]) -> None:
    check(folders["kimi"], *KIMI)
    check(folders["kimi"], *KIMI, masters=folders["bf16"])
    check(folders["kimi"])
    check(folders["rtn"])
    check(folders["kimi"], lora=0)
    check(folders["bf16"], f"{QAT}.enabled=true")


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("kimi", [f"{QAT}.scale_divisor=7.5", f"{QAT}.q_min=-8"]),
        ("kimi", [f"{QAT}.group_size=64"]),
        ("kimi", [f"{QAT}.group_size=16"]),
        ("kimi", [f"{QAT}.group_size=100000"]),
        ("kimi", [f"{QAT}.group_size=0"]),
        ("kimi", [f"{QAT}.q_min=0"]),
        ("kimi", [f"{QAT}.q_min=7"]),
        ("kimi", [f"{QAT}.q_min=-7.5"]),
        ("kimi", [f"{QAT}.scale_divisor=0"]),
        ("kimi", [f"{QAT}.scale_divisor=-7"]),
        ("kimi", [f"{QAT}.symmetric=false"]),
        ("rtn", []),
        ("rtn", [f"{QAT}.scale_divisor=7.5", f"{QAT}.q_min=-8"]),
    ],
)
def test_fake_quantization_that_changes_served_values(
    source: str, changes: list[str], folders: dict[str, str]
) -> None:
    with pytest.raises(KimiBridgeError, match=r"(trains on other values|cannot be).*enabled=false"):
        check(folders[source], *KIMI, *changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"{LORA}.merge_lora=true"], r"set .*merge_lora=false"),
        (["trainer.hf_save_interval=5"], r"hf_save_interval=-1"),
    ],
)
def test_what_fails_later(changes: list[str], message: str, folders: dict[str, str]) -> None:
    for source in ("kimi", "bf16"):
        with pytest.raises(KimiBridgeError, match=message):
            check(folders[source], *changes)


def test_plain_masters_of_an_int4_model_without_lora(folders: dict[str, str]) -> None:
    with pytest.raises(KimiBridgeError, match=r"is INT4 and .*bf16_base_path is not"):
        check(folders["kimi"], lora=0, masters=folders["bf16"])


@pytest.mark.parametrize(
    ("targets", "q_lora_rank", "message"),
    [
        ("linear_proj", 64, "is one string"),
        (["linear_proj", "linear_qkv"], 64, "target linear_qkv is no module"),
        (["*.layers.0.*.linear_q_down_proj"], None, "linear_q_down_proj is no module .*linear_q_proj,"),
        (["linear_q_proj"], 64, "linear_q_proj is no module .*linear_q_down_proj,"),
        (["linear_kv_up_proj"], 64, "does not apply LoRA on kv_b_proj"),
        (["router"], 64, r"does not apply LoRA on mlp\.gate"),
        (["linear_q"], 64, "linear_q is no module"),
    ],
)
def test_targets(targets: Any, q_lora_rank: int | None, message: str) -> None:
    config = SimpleNamespace(q_lora_rank=q_lora_rank)
    with pytest.raises(KimiBridgeError, match=message):
        check_targets(SimpleNamespace(target_modules=targets), config)


def test_targets_that_fit() -> None:
    for targets in (
        ["linear_q_down_proj", "*.layers.1.*.linear_fc1"],
        ["linear_fc1_gate", "linear_fc1_up", "linear_proj"],
    ):
        check_targets(SimpleNamespace(target_modules=targets), SimpleNamespace(q_lora_rank=64))
