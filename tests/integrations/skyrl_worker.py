"""SkyRL's own Megatron policy worker in this process, on a CPU or a GPU, as Ray would make it in another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

ALL_LINEAR = "[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_proj,linear_fc1,linear_fc2]"


def overrides(src: str, *more: str, tp: int = 1, ep: int = 1, pp: int = 1, lora: int = 0) -> list[str]:
    """A user's command line for a Kimi K2.5-family checkpoint."""
    parallel = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
    }
    policy = "trainer.policy"
    return [
        "trainer.strategy=megatron",
        f"{policy}.model.path={src}",
        *(f"trainer.{role}.language_model_only=true" for role in ("policy", "ref")),
        "generator.inference_engine.language_model_only=true",
        f"{policy}.model.lora.rank={lora}",
        f"{policy}.model.lora.alpha={lora * 3}",
        f"{policy}.model.lora.target_modules={ALL_LINEAR}",
        f"{policy}.megatron_config.lora_config.merge_lora=false",
        *(f"{policy}.megatron_config.{name}={size}" for name, size in parallel.items()),
        *more,
    ]


def training(src: str, *more: str, rank: int = 8, **sizes: int) -> list[str]:
    """The same for a few steps of QAT with LoRA on all linears."""
    settings = {
        "policy.model.fake_int4_qat.enabled": "true",
        "policy.model.fake_int4_qat.scale_divisor": "7.0",
        "policy.model.fake_int4_qat.q_min": "-7",
        "policy.optimizer_config.lr": "1e-3",
        "policy.megatron_config.transformer_config_kwargs.gradient_accumulation_fusion": "false",
        "algorithm.use_kl_loss": "false",
        "remove_microbatch_padding": "false",
        "flash_attn": "false",
        "micro_forward_batch_size_per_gpu": "2",
        "micro_train_batch_size_per_gpu": "2",
    }
    return overrides(
        src, *(f"trainer.{name}={value}" for name, value in settings.items()), *more, lora=rank, **sizes
    )


def make(arguments: Sequence[str], rank: int = 0, world_size: int = 1) -> Any:
    """The worker with its process groups, before its model: torch.distributed is initialized already."""
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase
    from skyrl.train.config import SkyRLTrainConfig

    if not torch.cuda.is_available():
        from kimi_bridge.megatron import runtime

        runtime.enable_cpu()
        torch.cuda.set_device = lambda *_args: None
    config = SkyRLTrainConfig.from_cli_overrides(list(arguments))
    environment = dict(os.environ)
    worker = MegatronPolicyWorkerBase(
        cfg=config.trainer,
        world_size=world_size,
        rank=rank,
        local_rank=0,
        master_addr="127.0.0.1",
        master_port=1,
        sequence_parallel_size=1,
    )
    worker.init_worker_process_group()
    # The worker writes its place into the environment, which later scenarios of these processes would read.
    os.environ.clear()
    os.environ.update(environment)
    return worker


def build(worker: Any, language_model_only: bool = True) -> Any:
    """`init_configs` and `make_megatron_module` as `init_model` calls them, without an optimizer."""
    policy = worker.cfg.policy
    worker.init_configs(
        policy.model.path,
        policy.megatron_config,
        policy.megatron_config.model_config_kwargs,
        policy.megatron_config.transformer_config_kwargs,
        bf16=worker.cfg.bf16,
        flash_attn=worker.cfg.flash_attn,
        language_model_only=language_model_only,
        bridge_weights_path=worker._maybe_setup_fake_int4_qat(),
    )
    worker.actor_module = worker.make_megatron_module(
        wrap_with_ddp=False,
        lora_config=policy.model.lora if worker._is_lora else None,
        lora_type=policy.megatron_config.lora_config.lora_type,
        bf16=worker.cfg.bf16,
    )
    return worker


def batch(sequences: torch.Tensor, responses: int) -> Any:
    """What SkyRL's trainer hands to a worker: `[n, length]` tokens, the last `responses` of them sampled."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    count = len(sequences)
    signs = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)[:, None]
    data = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": torch.ones_like(sequences),
            "response_mask": torch.ones(count, responses, dtype=torch.long),
            "loss_mask": torch.full((count, responses), 1.0 / (count * responses)),
            "advantages": signs.expand(count, responses).contiguous(),
            "action_log_probs": torch.zeros(count, responses),
            "base_action_log_probs": torch.zeros(count, responses),
        }
    )
    data.metadata = {"response_length": responses}
    return data


def log_probabilities(worker: Any, data: Any) -> torch.Tensor:
    """SkyRL's forward: `[n, responses]`."""
    outputs = worker.forward(data).loss_fn_outputs
    return torch.tensor([each["logprobs"] for each in outputs])


def train(worker: Any, data: Any, steps: int) -> list[dict[str, float]]:
    """SkyRL's policy update: forward and backward of its loss, clipping, the optimizer's step."""
    found = []
    for _ in range(steps):
        data["action_log_probs"] = log_probabilities(worker, data)
        metrics = worker.forward_backward(data).metrics
        found.append({"loss": metrics["policy_loss"], "grad_norm": worker.optim_step()})
    return found
