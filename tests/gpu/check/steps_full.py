"""Step 10: all text weights trained with QAT, and the INT4 weights synced into the running vLLM."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.gpu.check.divergence import mismatch
from tests.gpu.check.engine import Engine, EngineDied, EngineError
from tests.gpu.check.state import CONTINUATION, Check, Row, free
from tests.gpu.check.steps_lora import summarize
from tests.gpu.check.trainer_types import Sampled

TABLE = "full"


def full(check: Check, row: Row) -> None:
    """A step, a sync, a batch; with QAT and, for comparison, without it and before the sync."""
    from kimi_bridge.megatron import disable_fake_int4, enable_fake_int4
    from tests.gpu.check.trainer import MasterAdamW

    base = check.base
    engine = check.engine("plain", check.exported if check.exported.exists() else None)
    base.require_grad(True)
    before = _experts(base)
    report = enable_fake_int4(base.chunks)
    row.figures["QAT"] = str(report)
    base.wrap()
    optimizer = MasterAdamW(base, check.options.full_lr)
    losses, train_seconds, export_seconds, load_seconds = [], [], [], []
    try:
        for step in range(1, check.options.full_steps + 1):
            begin = time.perf_counter()
            losses.append(optimizer.step(check.task))
            train_seconds.append(time.perf_counter() - begin)
            if step == 1:
                # One synced engine suffices to show what is lost without a sync.
                stale = sample(check, engine, step)
                check.record(
                    TABLE, step, "not synced", mismatch(stale, base.score(stale.sequences)), bar=False
                )
            begin = time.perf_counter()
            check.synced_files = check.write_int4_weights(base, "int4-weights")
            export_seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            if not _reload(check, row, engine, last=step == check.options.full_steps):
                continue
            load_seconds.append(time.perf_counter() - begin)
            sampled = sample(check, engine, step)
            check.record(TABLE, step, "QAT, synced", mismatch(sampled, base.score(sampled.sequences)))
            disable_fake_int4(base.chunks)
            plain = mismatch(sampled, base.score(sampled.sequences))
            check.record(TABLE, step, "bf16 without QAT, synced", plain, bar=False)
            enable_fake_int4(base.chunks)
        with torch.no_grad():
            losses.append(base.loss(check.task).item())
    finally:
        del optimizer
        free()
    changed = sum(int((now != then).sum()) for now, then in zip(_experts(base), before, strict=True))
    total = sum(then.numel() for then in before)
    row.figures |= {
        "losses": [round(loss, 3) for loss in losses],
        "expert values changed": changed / total,
        "s a step": sum(train_seconds) / len(train_seconds),
        "s to export INT4": sum(export_seconds) / len(export_seconds),
        "s to reload in vLLM": sum(load_seconds) / max(len(load_seconds), 1),
    }
    row.expect(losses[-1] < losses[0], "the loss did not fall")
    row.expect(changed > 0, "no expert changed")
    summarize(check, row, TABLE)


def _reload(check: Check, row: Row, engine: Engine, last: bool) -> bool:
    """Whether the engine has the new weights. One that cannot take them is started anew, after the last step.

    That is a failure of the step all the same.
    """
    if "engine restarted" not in row.figures:
        try:
            engine.call("reload", files=check.synced_files, timeout=max(check.left, 60))
            return True
        except (EngineError, EngineDied) as error:
            row.figures["engine restarted"] = "on an export, after the last step"
            row.expect(False, f"the running vLLM did not take the weights: {error}")
    if not last:
        return False
    from kimi_bridge.megatron import export_checkpoint

    trained = check.folder / "trained"
    export_checkpoint(check.base.bridge, check.base.chunks, trained, overwrite=True)
    engine.stop()
    engine.settings["model"] = str(trained)
    engine.start()
    engine.wait(max(check.left, 30))
    return True


def sample(check: Check, engine: Any, step: int) -> Sampled:
    """A batch from the engine without an adapter."""
    sampled = engine.sample(
        check.prompts, CONTINUATION, check.options.top, seed=step, moe_layers=check.base.moe_layers
    )
    return sampled.to(check.device)


def _experts(trainer: Any) -> list[torch.Tensor]:
    """A few of the experts' masters, copied."""
    params = [p for c in trainer.chunks for name, p in c.named_parameters() if ".mlp.experts." in name]
    return [param.detach().clone() for param in params[:8]]


STEPS: dict[str, tuple[str, Any]] = {
    "full": ("full fine-tuning with QAT, INT4 sync into the running vLLM", full),
}
