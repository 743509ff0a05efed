"""Steps 6 to 9: LoRA training with QAT, the adapter's export, vLLM, and the mismatch at every step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.check.divergence import mismatch
from tests.gpu.check.state import BATCH, CONTINUATION, RANK, Check, Row
from tests.gpu.check.trainer_types import Sampled

BAR, AIM = 0.015, 0.002


def lora(check: Check, row: Row) -> None:
    """AdamW on the adapters learns a few random sequences by heart."""
    run = check.lora_run
    losses = run.losses
    row.figures |= {
        "first loss": losses[0],
        "last loss": losses[-1],
        "steps": len(losses) - 1,
        "s a step": run.seconds / max(len(losses) - 1, 1),
        "trained parameters": sum(p.numel() for p in run.trainer.parameters().values()),
        "losses": [round(loss, 3) for loss in losses],
    }
    row.expect(losses[-1] < 0.7 * losses[0], "the loss did not fall below 0.7 of the first")


def export(check: Check, row: Row) -> None:
    """To disk for vLLM and for PEFT, and as a stream: the same bytes; experts have rank / top-k."""
    from safetensors.torch import load_file

    from kimi_bridge.adapter import load_adapter
    from kimi_bridge.megatron import export_adapter, iter_adapter_tensors

    run, folder = check.lora_run, check.folder / "adapters"
    run.put(-1)
    arguments = run.trainer.bridge, run.trainer.chunks, run.trainer.lora
    begin = time.perf_counter()
    export_adapter(*arguments, folder / "vllm", overwrite=True)
    row.figures["to disk s"] = time.perf_counter() - begin
    export_adapter(*arguments, folder / "peft", target="peft", overwrite=True)
    begin = time.perf_counter()
    stream = iter_adapter_tensors(*arguments)
    config, tensors = stream.config, {name: tensor.cpu() for name, tensor in stream}
    row.figures["stream s"] = time.perf_counter() - begin
    on_disk = load_file(folder / "vllm" / "adapter_model.safetensors")
    row.figures["tensors"] = len(tensors)
    row.figures["MB"] = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    same = on_disk.keys() == tensors.keys() and all(
        torch.equal(on_disk[name], tensor) for name, tensor in tensors.items()
    )
    row.expect(same, "the stream is not what is on the disk")
    written = json.loads((folder / "vllm" / "adapter_config.json").read_text())
    row.expect(written == config, "the stream's config is not what is on the disk")
    adapter = load_adapter(folder / "vllm")
    ranks = {
        kind: sorted({spec.rank for module, spec in adapter.modules.items() if kind in module})
        for kind in (".experts.", ".self_attn.")
    }
    expected = max(RANK // run.trainer.provider.moe_router_topk, 1)
    row.figures["rank of experts"], row.figures["rank of attention"] = (
        ranks[".experts."],
        ranks[".self_attn."],
    )
    row.expect(ranks[".experts."] == [expected], f"experts should have rank {expected}")
    row.expect({spec.scale for spec in adapter.modules.values()} == {1.0}, "a scale is not 1 for vLLM")


def serve(check: Check, row: Row) -> None:
    """vLLM with the INT4 base, the adapter from disk and from memory, and the exported checkpoint."""
    if not (check.folder / "adapters" / "vllm").exists():
        export(check, Row("export", ""))
    path = check.folder / "adapters" / "vllm"
    engine = check.engine("lora")
    ready = engine.wait(30)
    row.figures |= {"vllm": ready["vllm"], "start s": ready["seconds"]}
    if ready["without_routing"]:
        row.figures["no routing from the engine"] = ready["without_routing"]

    def greedy(server: Any, adapter: str | None = None) -> Sampled:
        return server.sample(check.prompts, CONTINUATION, check.options.top, temperature=0, adapter=adapter)

    base = greedy(engine)
    row.expect(tuple(base.tokens.shape) == (BATCH, CONTINUATION), "tokens are missing")
    row.expect(bool(base.log_probabilities.isfinite().all()), "a log-probability is not finite")
    engine.call("adapter_from_disk", name="disk", number=901, path=str(path))
    # Under another name, so that it does not begin with cached prefixes, which round otherwise.
    engine.call("adapter_from_disk", name="disk-again", number=903, path=str(path))
    disk, again = greedy(engine, "disk"), greedy(engine, "disk-again")
    engine.call("drop_adapter", name="disk-again")
    config = json.loads((path / "adapter_config.json").read_text())
    file = str(path / "adapter_model.safetensors")
    engine.call("adapter_from_memory", name="memory", number=902, config=config, file=file)
    memory = greedy(engine, "memory")
    for name in ("disk", "memory"):
        engine.call("drop_adapter", name=name)

    noise = _difference(disk, again)
    row.figures |= {
        "memory against disk: same tokens": _agreement(disk, memory),
        "memory against disk: mean |d logp|": _difference(disk, memory),
        "a second run: same tokens": _agreement(disk, again),
        "a second run: mean |d logp|": noise,
        "adapter against base: same tokens": _agreement(disk, base),
    }
    # Where two tokens tie, a second run of the very same samples the other.
    ties = min(0.95, _agreement(disk, again) - 0.1)
    row.expect(_agreement(disk, memory) >= ties, "the adapter from memory samples other tokens")
    row.expect(_difference(disk, memory) <= max(2 * noise, 0.002), "from memory: other log-probabilities")
    row.expect(_agreement(disk, base) < 0.9, "the adapter changes nothing")

    plain = check.engine("plain", check.exported if check.exported.exists() else None)
    other = greedy(plain)
    row.figures["exported checkpoint"] = Path(plain.settings["model"]).name
    row.figures["exported against source: first tokens"] = _agreement(base, other, 1)
    row.figures["exported against source: mean |d logp|"] = _difference(base, other)
    row.expect(_difference(base, other) <= 0.02, "the exported checkpoint is served otherwise")


def mismatches(check: Check, row: Row) -> None:
    """For each step of the training: sync the adapters from memory, sample, and score the same tokens."""
    from kimi_bridge.megatron import disable_fake_int4, enable_fake_int4, iter_adapter_tensors

    run, engine, base = check.lora_run, check.engine("lora"), check.base
    sync_seconds = []
    # Frozen, as under LoRA: compared once.
    base.require_grad(False)
    try:
        for step in range(len(run.snapshots)):
            run.put(step)
            begin = time.perf_counter()
            name = f"policy-{step}"
            _sync(
                check,
                iter_adapter_tensors(run.trainer.bridge, run.trainer.chunks, run.trainer.lora),
                name,
                step,
            )
            sync_seconds.append(time.perf_counter() - begin)
            adapted = _sample(check, engine, step, name)
            engine.call("drop_adapter", name=name)
            plain = _sample(check, engine, step)
            sequences = plain.sequences

            check.record("LoRA", step + 1, "bf16", mismatch(plain, base.score(sequences)))
            enable_fake_int4(base.chunks)
            check.record("LoRA", step + 1, "QAT", mismatch(plain, base.score(sequences)))
            disable_fake_int4(base.chunks)
            scores = run.trainer.score(adapted.sequences)
            check.record("LoRA", step + 1, "QAT + LoRA, synced", mismatch(adapted, scores))
            stale = mismatch(plain, run.trainer.score(sequences))
            check.record("LoRA", step + 1, "not synced", stale, bar=False)
    finally:
        disable_fake_int4(base.chunks)
        base.require_grad(True)
    row.figures["mean s to sync an adapter"] = sum(sync_seconds) / len(sync_seconds)
    summarize(check, row, "LoRA")


def summarize(check: Check, row: Row, table: str) -> None:
    """The largest entries of a mismatch table into a step's row, and the bar."""
    entries = [entry for entry in check.mismatches if entry["table"] == table]
    for column in dict.fromkeys(entry["column"] for entry in entries):
        chosen = [entry for entry in entries if entry["column"] == column]
        row.figures[f"{column}: largest k3"] = max(entry["k3"] for entry in chosen)
        row.figures[f"{column}: largest top-k"] = max(entry["top_k"] for entry in chosen)
        for entry in chosen:
            worst = max(entry["k3"], entry["top_k"])
            row.expect(
                not entry["bar"] or worst < BAR,
                f"{column}, step {entry['step']}: mean KL {worst:.4f}, the bar is {BAR}",
            )
    within = [max(e["k3"], e["top_k"]) < AIM for e in entries if e["bar"]]
    row.figures[f"entries below {AIM}"] = f"{sum(within)} of {len(within)}"


def _sync(check: Check, stream: Any, name: str, step: int) -> None:
    from safetensors.torch import save_file

    file = check.folder / "adapter-in-memory.safetensors"
    config = stream.config
    # gate_proj and up_proj share their A, and a file must not hold one tensor under two names.
    save_file({key: tensor.cpu().clone() for key, tensor in stream}, file)
    check.engine("lora").call(
        "adapter_from_memory", name=name, number=step + 1, config=config, file=str(file)
    )


def _sample(check: Check, engine: Any, step: int, adapter: str | None = None) -> Sampled:
    sampled = engine.sample(
        check.prompts,
        CONTINUATION,
        check.options.top,
        seed=step + 1,
        adapter=adapter,
        moe_layers=check.base.moe_layers,
    )
    return sampled.to(check.device)


def _agreement(left: Sampled, right: Sampled, count: int = CONTINUATION) -> float:
    return (left.tokens[:, :count] == right.tokens[:, :count]).float().mean().item()


def _difference(left: Sampled, right: Sampled) -> float:
    """Mean |difference| of log-probabilities where both chose the same tokens so far."""
    same = (left.tokens == right.tokens).cumprod(dim=1).bool()
    gap = (left.log_probabilities - right.log_probabilities).abs()[same]
    return gap.mean().item() if gap.numel() else float("nan")


STEPS: dict[str, tuple[str, Any]] = {
    "lora": ("LoRA steps with QAT", lora),
    "export": ("adapter export", export),
    "serve": ("vLLM serves base, adapters, export", serve),
    "mismatch": ("train/inference mismatch, LoRA", mismatches),
}
