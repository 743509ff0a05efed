"""Several processes: adapters and INT4 exports of TP 2, EP 2 and PP 2 are those of one process.

`torchrun --nproc_per_node 2 tests/gpu/check/layouts.py PLAN.json` does the work; the step starts it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
if __name__ == "__main__":
    # Behind the installed package, which has what the folder alone lacks.
    sys.path.append(str(ROOT))

import torch  # noqa: E402

from tests.gpu.check.state import RANK, Check, Row, free, sha256s  # noqa: E402

# Of any even number of processes: what the layout does not take is data parallel.
LAYOUTS = {"TP 2": {"tp": 2, "etp": 1}, "EP 2": {"ep": 2, "etp": 1}, "PP 2": {"pp": 2}}


def layouts(check: Check, row: Row) -> None:
    """Loads the source and the trained adapter in each layout, and exports both."""
    from tests.gpu.check.steps_lora import export

    if not (check.folder / "adapters" / "peft").exists():
        export(check, Row("export", ""))
    plan = {
        "source": str(check.source),
        "adapter": str(check.folder / "adapters" / "peft"),
        "folder": str(check.folder / "layouts"),
        "tokens": check.task.tolist(),
    }
    file = check.folder / "layouts.json"
    file.write_text(json.dumps(plan))
    one = check.lora_run.losses[-1]
    row.figures["one GPU: loss"] = one
    # The trainer's own models leave the first GPU.
    for name in ("base", "lora_run"):
        check.__dict__.pop(name, None)
    free()
    gpus = torch.cuda.device_count()
    if gpus < check.options.nproc:
        row.figures["processes"] = f"{check.options.nproc} on {gpus} GPU"
    log = check.folder / "layouts.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(check.options.nproc), str(Path(__file__)), str(file)]
    with log.open("w") as out:
        code = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, check=False, timeout=max(check.left, 60)
        ).returncode
    row.expect(code == 0, f"torchrun ended with {code}: {log.read_text()[-3000:]}")
    expected = dict(sha256s(check.folder / "adapters" / "vllm"))
    for name, found in json.loads((check.folder / "layouts" / "found.json").read_text()).items():
        row.figures[f"{name}: loss"] = found["loss"]
        row.expect(abs(found["loss"] - one) < 0.02 * one, f"{name}: another loss than on one GPU")
        row.expect(found["identical"], f"{name}: the export differs from the source: {found['differences']}")
        row.expect(found["adapter"] == expected, f"{name}: the adapter's files differ from those of one GPU")


def main(plan: dict[str, Any]) -> None:
    """What every rank runs."""
    from kimi_bridge.checkpoint import verify_checkpoints
    from kimi_bridge.megatron import export_adapter, export_checkpoint, load_adapter_into, runtime
    from kimi_bridge.megatron.collective import rank
    from kimi_bridge.megatron.runtime import Layout
    from tests.gpu.check.trainer import Trainer, make_lora

    folder = Path(plan["folder"])
    tokens = torch.tensor(plan["tokens"])
    found: dict[str, Any] = {}
    for name, numbers in LAYOUTS.items():
        trainer = Trainer(Path(plan["source"]), layout=Layout(**numbers))
        dst = folder / name.replace(" ", "")
        export_checkpoint(trainer.bridge, trainer.chunks, dst, overwrite=True)
        del trainer
        free()
        trainer = Trainer(Path(plan["source"]), make_lora(RANK), Layout(**numbers))
        load_adapter_into(trainer.bridge, trainer.chunks, plan["adapter"])
        adapter = folder / f"{dst.name}-adapter"
        export_adapter(trainer.bridge, trainer.chunks, trainer.lora, adapter, overwrite=True)
        loss = _loss(trainer, tokens)
        if rank() == 0:
            report = verify_checkpoints(plan["source"], dst)
            found[name] = {
                "loss": loss,
                "identical": report.identical,
                "differences": [difference.name for difference in report.differences[:3]],
                "adapter": dict(sha256s(adapter)),
            }
            shutil.rmtree(dst)
        del trainer
        free()
    if rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    runtime.shutdown()


@torch.no_grad()
def _loss(trainer: Any, tokens: torch.Tensor) -> float:
    """The mean loss through Megatron's schedule, which passes activations between stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch = tokens.to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
    inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape).contiguous()

    def step(_iterator: Any, model: Any) -> Any:
        def reduce(output: torch.Tensor) -> Any:
            return output.float().mean(), {"loss": output.float().mean()}

        return model(inputs, positions, None, labels=labels), reduce

    # Megatron asks for sequence parallelism in training with TP and experts.
    for chunk in trainer.chunks:
        chunk.eval()
    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(()),
        model=trainer.chunks if len(trainer.chunks) > 1 else trainer.chunks[0],
        num_microbatches=1,
        seq_length=inputs.shape[1],
        micro_batch_size=inputs.shape[0],
        forward_only=True,
    )
    value = torch.tensor([sum(float(entry["loss"]) for entry in losses)], dtype=torch.float32).to(
        batch.device
    )
    # Only the last stage has it.
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return value.item()


STEPS: dict[str, tuple[str, Any]] = {"layouts": ("TP 2, EP 2 and PP 2 on several GPUs", layouts)}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(json.loads(Path(sys.argv[1]).read_text()))
