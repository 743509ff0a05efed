"""Step 11: what goes wrong must be found and named."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.check.divergence import mismatch
from tests.gpu.check.engine import EngineDied
from tests.gpu.check.folders import copy_with_change
from tests.gpu.check.state import Check, Row
from tests.gpu.check.steps_full import sample
from tests.gpu.check.steps_lora import BAR, export


def killed(check: Check, row: Row) -> None:
    """The engine is killed while it reads new weights; a new one takes the same sync."""
    files = check.synced_files or check.write_int4_weights(check.base, "int4-weights")
    engine = check.engine("plain", check.exported if check.exported.exists() else None)
    try:
        engine.call("reload", files=files, on_event=lambda _event: engine.kill())
    except EngineDied as error:
        row.figures["named"] = str(error)
        row.expect("signal 9" in str(error) and "reload" in str(error), f"the message says little: {error}")
    else:
        row.expect(False, "the death of the engine was not noticed")
    engine.start()
    ready = engine.wait(max(check.left, 30))
    row.figures["restart s"] = ready["seconds"]
    engine.call("reload", files=files, timeout=max(check.left, 60))
    sampled = sample(check, engine, 1)
    found = mismatch(sampled, check.base.score(sampled.sequences))
    row.figures["k3 after restart and sync"] = found.k3
    row.expect(max(found.k3, found.top_k) < BAR, "the restarted engine is not in sync")


def another_base(check: Check, row: Row) -> None:
    """The adapter is loaded into a model of a checkpoint with one other norm, all shapes the same."""
    from megatron.bridge import AutoBridge

    from kimi_bridge.errors import CheckpointError
    from kimi_bridge.megatron import load_adapter_into

    path = check.folder / "adapters" / "peft"
    if not path.exists():
        export(check, Row("export", ""))
    run = check.lora_run
    other = copy_with_change(check.source, check.folder / "another-base", "language_model.model.norm.weight")
    before = {name: param.detach().clone() for name, param in run.trainer.parameters().items()}
    try:
        load_adapter_into(AutoBridge.from_hf_pretrained(str(other)), run.trainer.chunks, path)
    except CheckpointError as error:
        row.figures["named"] = str(error)
        row.expect(str(other) in str(error) and "base" in str(error), f"the message says little: {error}")
    else:
        row.expect(False, "an adapter of another base was loaded")
    same = all(torch.equal(param, before[name]) for name, param in run.trainer.parameters().items())
    row.expect(same, "the refused adapter changed the model")
    loaded = load_adapter_into(run.trainer.bridge, run.trainer.chunks, path)
    row.figures["modules loaded on its own base"] = loaded.loaded


def flipped_scale(check: Check, row: Row) -> None:
    """One bit of one scale of one expert."""
    from kimi_bridge.checkpoint import CheckpointReader, verify_checkpoints

    names = [name for name in CheckpointReader(check.source).names() if name.endswith("_scale")]
    victim = names[len(names) // 2]
    middle = CheckpointReader(check.source).info(victim).nbytes // 4 * 2
    copy = copy_with_change(check.source, check.folder / "flipped", victim, middle)
    report = verify_checkpoints(check.source, copy)
    weight = victim.removesuffix("_scale")
    found = [difference.name for difference in report.differences]
    row.figures["flipped"], row.figures["found"] = victim, found
    row.expect(found == [weight], f"verify names {found}")
    row.expect("scale" in "".join(d.reason for d in report.differences), "verify does not say what differs")


STEPS: dict[str, tuple[str, Any]] = {
    "fault-scale": ("fault: a flipped scale", flipped_scale),
    "fault-base": ("fault: an adapter of another base", another_base),
    "fault-kill": ("fault: engine killed in mid-sync", killed),
}
