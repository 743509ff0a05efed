"""The trainer's model on this process's GPU: built by the bridge, trained, and asked for its scores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

import kimi_bridge.megatron as kimi
from kimi_bridge.megatron import runtime
from kimi_bridge.megatron.runtime import Layout
from tests.gpu.check.trainer_types import Scores

# Without linear_kv_up_proj: vLLM does not apply LoRA on kv_b_proj.
TARGETS = [
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
]
# Sequences are filled up to a multiple of this, on the right, where causal attention does not look.
_MULTIPLE = 64


def make_lora(rank: int) -> LoRA:
    return LoRA(
        target_modules=TARGETS,
        dim=rank,
        alpha=rank,
        normalize_moe_lora=True,
        share_expert_adapters=False,
    )


class Trainer:
    """One model. `chunks` are its bare parts, `model` the same under Megatron's DDP once it is trained.

    Args:
        src: the INT4 checkpoint.
        lora: adapters to put into it, if any; everything else is frozen then.
        layout: how it is spread over ranks.
        load: whether to load the weights at once.
    """

    def __init__(self, src: Path, lora: LoRA | None = None, layout: Layout | None = None, load: bool = True):
        layout = layout or Layout()
        runtime.initialize(layout)
        self.src, self.lora = src, lora
        self.bridge = AutoBridge.from_hf_pretrained(str(src))
        self.text_config = self.bridge.hf_pretrained.config.text_config
        self.provider = self.bridge.to_megatron_provider(load_weights=False)
        self.provider.gradient_accumulation_fusion = False
        if lora is not None:
            self.provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
        self.chunks = runtime.build_model(self.provider, layout)
        self.model: list[Any] = self.chunks
        if load:
            kimi.load_checkpoint(self.bridge, self.chunks)

    def wrap(self) -> None:
        """Puts the model under Megatron's DDP, which gives parameters their main_grad."""
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = [DistributedDataParallel(self.provider, settings, chunk) for chunk in self.chunks]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {
            f"{place}.{name}": param
            for place, chunk in enumerate(self.chunks)
            for name, param in chunk.named_parameters()
            if param.requires_grad
        }

    def require_grad(self, required: bool) -> None:
        for chunk in self.chunks:
            chunk.requires_grad_(required)

    def loss(self, sequences: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of `[n, s + 1]` tokens, for one pipeline stage."""
        inputs, labels = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        return self.model[0](inputs, _positions(inputs), None, labels=labels).float().mean()

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[n, s]` -> `[n, s, vocabulary]`"""
        self.chunks[0].eval()
        try:
            length = tokens.shape[1]
            padded = torch.nn.functional.pad(tokens, (0, -length % _MULTIPLE))
            result = self.chunks[0](padded, _positions(padded), None)
            return result[:, :length, : self.text_config.vocab_size]
        finally:
            self.chunks[0].train()

    def score(self, sequences: torch.Tensor, batch: int = 64) -> Scores:
        """What the model predicts at every token but the last, and which experts each goes to."""
        logs, experts = [], []
        for part in sequences.split(batch):
            with self._routing(part.shape[0]) as taken:
                logs.append(self.logits(part[:, :-1]).float().log_softmax(-1))
            experts.append(torch.stack([layer[:, : part.shape[1] - 1] for layer in taken], 2))
        return Scores(torch.cat(logs), torch.cat(experts))

    @property
    def moe_layers(self) -> list[int]:
        return list(range(self.text_config.first_k_dense_replace, self.text_config.num_hidden_layers))

    @contextlib.contextmanager
    def _routing(self, batch: int) -> Iterator[list[torch.Tensor]]:
        """While open, each MoE layer's router adds its `[batch, s, top-k]`."""
        taken: list[torch.Tensor] = []
        top_k = self.provider.moe_router_topk

        def note(_module: Any, _inputs: Any, output: Any) -> None:
            # Tokens are [s, batch] in Megatron, flattened; the map is one row of booleans a token.
            chosen = output[1].view(-1, batch, output[1].shape[-1]).to(torch.uint8)
            taken.append(chosen.topk(top_k, dim=-1).indices.transpose(0, 1))

        routers = [module for name, module in self.chunks[0].named_modules() if name.endswith(".mlp.router")]
        handles = [router.register_forward_hook(note) for router in routers]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()


class MasterAdamW:
    """AdamW on float32 copies of parameters that have Megatron's main_grad, without weight decay."""

    def __init__(self, trainer: Trainer, lr: float):
        self.trainer = trainer
        self.params = list(trainer.parameters().values())
        self.masters = [param.detach().float().clone() for param in self.params]
        fused = self.masters[0].is_cuda
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=fused
        )

    def step(self, sequences: torch.Tensor) -> float:
        """One step on `[n, s + 1]` tokens; the loss before it."""
        for chunk in self.trainer.model:
            chunk.zero_grad_buffer()
        loss = self.trainer.loss(sequences)
        loss.backward()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad = param.main_grad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
                master.grad = None
        return loss.item()


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape).contiguous()
