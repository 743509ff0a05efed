#!/usr/bin/env python3
"""A small training run with FSDP2 and Ulysses, text and image features, beside the same run in one process.

    python benchmarks/ulysses_training.py

Four gloo processes on a CPU: two batches at a time (data parallel 2), each over two ranks (Ulysses 2), and
weights sharded over all four. A DeepSeek-V3 model with experts, and a projector from synthetic image patches,
learn packed documents whose captions only their images tell. The run in one process uses nothing of this
library.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kimi_bridge.patches import transformers_ulysses
from kimi_bridge.sequence_parallel import SequenceShard, embed, shard_batch, token_mean_loss

VOCABULARY, IMAGE = 64, 63
PATCH_WIDTH, PATCHES, CAPTION = 16, 24, 12
IMAGES = 4  # kinds of images, each with a caption of its own
BATCHES = 2  # a step


class Model(nn.Module):
    """A language model, and a projector into its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Linear(PATCH_WIDTH, 64)
        self.language = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                moe_intermediate_size=64,
                num_hidden_layers=2,
                first_k_dense_replace=1,
                num_attention_heads=4,
                num_key_value_heads=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                q_lora_rank=None,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
                attn_implementation="sdpa",
            )
        )

    def forward(self, shard: SequenceShard, patches: Tensor) -> Tensor:
        """Logits of this rank's tokens; only the patches that it holds are projected."""
        features = self.projector(patches[shard.image_rows])
        embedded = embed(shard, self.language.get_input_embeddings(), features)
        return self.language(inputs_embeds=embedded, use_cache=False, **shard.attention_kwargs()).logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of the two losses")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = train_alone(options.steps)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_rank, (folder, options.steps), nprocs=4)
        together, straddled = torch.load(Path(folder) / "losses.pt")

    print("| step | one process | FSDP2 over 4, Ulysses over 2 | difference |\n|---|---|---|---|")
    shown = {0, options.steps - 1, *range(4, options.steps, 5)}
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        if step in shown:
            print(f"| {step + 1} | {a:.4f} | {b:.4f} | {abs(a - b):.1e} |")
    largest = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    print(f"\nlargest difference {largest:.1e}; images that lay across ranks: {straddled}")
    if largest > options.tolerance or together[-1] >= together[0] or not straddled:
        print("the runs differ, or the loss did not fall, or no image lay across ranks", file=sys.stderr)
        return 1
    return 0


def train_alone(steps: int) -> list[float]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        total, tokens = torch.zeros(()), 0
        for index in range(BATCHES):
            ids, positions, labels, patches = batch(step, index)
            embedded = model.language.get_input_embeddings()(ids)
            embedded[ids == IMAGE] = model.projector(patches)
            logits = model.language(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits[0]
            total = total + functional.cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")
            tokens += int((labels[0, 1:] != -100).sum())
        loss = total / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_rank(rank: int, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (BATCHES, 4 // BATCHES), mesh_dim_names=("data", "sequence"))
    sequence, every = mesh["sequence"].get_group(), mesh._flatten()
    transformers_ulysses.apply(sequence)
    model = build()
    for layer in model.language.model.layers:
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, straddled = [], 0
    for step in range(steps):
        ids, positions, labels, patches = batch(step, mesh["data"].get_local_rank())
        shard = shard_batch(
            ids, labels, group=sequence, position_ids=positions, image_token_id=IMAGE, pad_token_id=0
        )
        loss = token_mean_loss(model(shard, patches), shard)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        part = shard.input_ids.shape[1]
        straddled += bool((ids[0, part - 1 : part + 1] == IMAGE).all())
    if rank == 0:
        torch.save((losses, straddled), Path(folder) / "losses.pt")
    dist.barrier()
    dist.destroy_process_group()


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three documents in one row: ids, positions, labels [1, tokens]; patches [rows, PATCH_WIDTH]."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    prototypes = torch.randn(IMAGES, PATCH_WIDTH, generator=torch.Generator().manual_seed(7))
    ids, positions, labels, patches = [], [], [], []
    for _ in range(3):
        kind = int(torch.randint(IMAGES, (), generator=generator))
        length = int(torch.randint(5, 30, (), generator=generator))
        prompt = torch.randint(1, 40, (length,), generator=generator)
        image = torch.full((PATCHES,), IMAGE)
        caption = 1 + (torch.arange(CAPTION) * (2 * kind + 1) + 11 * kind) % 40
        document = torch.cat([prompt, image, caption])
        ids.append(document)
        positions.append(torch.arange(len(document)))
        labels.append(torch.cat([torch.full_like(prompt, -100), torch.full_like(image, -100), caption]))
        noise = torch.randn(PATCHES, PATCH_WIDTH, generator=generator)
        patches.append(prototypes[kind] + 0.3 * noise)
    row = (torch.cat(ids)[None], torch.cat(positions)[None], torch.cat(labels)[None])
    return *row, torch.cat(patches)


if __name__ == "__main__":
    sys.exit(main())
