"""What the steps share: options, folders, models, engines; each is made when it is first asked for."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.gpu.check.divergence import Mismatch
from tests.gpu.check.engine import Engine
from tests.gpu.check.folders import source_checkpoint, work_folder

if TYPE_CHECKING:
    from tests.gpu.check.trainer import Trainer

PROMPT, CONTINUATION, BATCH = 16, 16, 64
TASK_SEQUENCES, TASK_LENGTH = 8, 64
RANK = 32


@dataclass
class Options:
    """The command line."""

    checkpoint: Path | None = None
    engine_python: str = ""
    engine_pythonpath: str | None = None
    steps: int = 20
    full_steps: int = 20
    lr: float = 2e-4
    full_lr: float = 5e-6
    layers: int = 3
    experts: int = 32
    vocabulary: int = 4096
    dense: int = 4096
    top: int = 64
    engine_memory: float = 0.25
    routing: bool = True
    nproc: int = 1
    keep: Path | None = None
    time_limit: float = 540.0
    small: bool = False


@dataclass
class Row:
    """One step's outcome. A step writes figures and expectations into it as it goes."""

    name: str
    title: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, condition: bool, message: str) -> None:
        """Fails the step, which goes on."""
        if not condition:
            self.failures.append(message)

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass
class LoraRun:
    """The training of the adapters: losses and, for each step, the adapters after it."""

    trainer: Trainer
    losses: list[float]
    seconds: float
    snapshots: list[dict[str, torch.Tensor]]

    def put(self, step: int) -> None:
        """Sets the adapters to what they were after a step."""
        with torch.no_grad():
            for name, param in self.trainer.parameters().items():
                param.copy_(self.snapshots[step][name])


class Check:
    """One run. A property that failed is tried again by the next step that needs it."""

    def __init__(self, options: Options):
        self.options = options
        self.begin = time.monotonic()
        self.folder = work_folder(options.keep)
        self.mismatches: list[dict[str, Any]] = []
        self.engines: dict[str, Engine] = {}
        self.synced_files: list[str] = []
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def left(self) -> float:
        """Seconds until the time limit."""
        return self.options.time_limit - (time.monotonic() - self.begin)

    @functools.cached_property
    def source(self) -> Path:
        """The INT4 checkpoint."""
        options = self.options
        if options.checkpoint is not None:
            return options.checkpoint.resolve()
        return source_checkpoint(
            self.folder, options.layers, options.experts, options.vocabulary, options.dense, options.small
        )

    @property
    def exported(self) -> Path:
        """Where the round trip's export lies."""
        return self.folder / "exported"

    @functools.cached_property
    def base(self) -> Trainer:
        """The model without adapters."""
        from tests.gpu.check.trainer import Trainer

        return Trainer(self.source)

    @functools.cached_property
    def lora_run(self) -> LoraRun:
        """The model with adapters under fake INT4, trained."""
        from kimi_bridge.megatron import enable_fake_int4
        from tests.gpu.check.trainer import MasterAdamW, Trainer, make_lora

        torch.manual_seed(0)
        trainer = Trainer(self.source, make_lora(RANK))
        enable_fake_int4(trainer.chunks)
        trainer.wrap()
        optimizer = MasterAdamW(trainer, self.options.lr)
        losses, snapshots, begin = [], [], time.perf_counter()
        for _ in range(self.options.steps):
            losses.append(optimizer.step(self.task))
            snapshots.append({name: p.detach().clone() for name, p in trainer.parameters().items()})
        with torch.no_grad():
            losses.append(trainer.loss(self.task).item())
        return LoraRun(trainer, losses, time.perf_counter() - begin, snapshots)

    @property
    def vocabulary(self) -> int:
        """Ordinary tokens: the special ones stand at the end."""
        content = json.loads((self.source / "config.json").read_text())
        return content["text_config"]["vocab_size"] - 300

    @functools.cached_property
    def task(self) -> torch.Tensor:
        """`[8, 65]` random tokens to learn by heart."""
        return self._random(0, TASK_SEQUENCES, TASK_LENGTH + 1)

    @functools.cached_property
    def prompts(self) -> torch.Tensor:
        """`[64, 16]`: one half begins as the task does, at several places; the other is random."""
        places = range(0, TASK_LENGTH - PROMPT, (TASK_LENGTH - PROMPT) // 4)
        known = [self.task[:, place : place + PROMPT] for place in list(places)[:4]]
        others = self._random(1, BATCH - 4 * TASK_SEQUENCES, PROMPT)
        return torch.cat([*known, others])

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocabulary, shape, generator=generator).to(self.device)

    def engine(self, name: str, model: Path | None = None, wait: bool = True) -> Engine:
        """ "lora": serves adapters on the source; "plain": without LoRA, takes new weights as it runs."""
        if name not in self.engines:
            options = self.options
            settings = {
                "model": str(model or self.source),
                "lora": name == "lora",
                "rank": RANK,
                "top": options.top,
                "memory": options.engine_memory,
                "routing": options.routing,
            }
            self.engines[name] = Engine(
                name, options.engine_python, options.engine_pythonpath, self.folder, settings
            )
            self.engines[name].start()
        if wait:
            self.engines[name].wait(max(self.left, 30))
        return self.engines[name]

    def record(self, table: str, step: int, column: str, found: Mismatch, bar: bool = True) -> None:
        """One entry of the mismatch table; `bar` says whether it must stay below it."""
        self.mismatches.append({"table": table, "step": step, "column": column, "bar": bar, **vars(found)})

    def write_int4_weights(self, trainer: Trainer, name: str) -> list[str]:
        """The trainer's weights as packed INT4, in safetensors files for `Engine.call("reload")`."""
        from safetensors.torch import save_file

        from kimi_bridge.megatron import iter_int4_weights

        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = []
        for number, bucket in enumerate(iter_int4_weights(trainer.bridge, trainer.chunks)):
            files.append(str(folder / f"bucket-{number}.safetensors"))
            save_file({key: tensor.contiguous().cpu() for key, tensor in bucket}, files[-1])
        return files

    def close(self) -> None:
        """Ends the engines, and removes the folder unless it is kept."""
        for engine in self.engines.values():
            engine.stop()
        if self.options.keep is None:
            shutil.rmtree(self.folder, ignore_errors=True)


def free() -> None:
    """Gives memory that nothing uses back to the GPU, where the engines live too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sha256s(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and digest of every file."""
    import hashlib

    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()
