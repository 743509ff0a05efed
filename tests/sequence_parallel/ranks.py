"""Four gloo ranks that live for the whole session and run one scenario after another, on 1, 2 or 4 of them.

A scenario is a function of `tests.sequence_parallel.scenarios`, or MODULE.FUNCTION of
`tests.sequence_parallel`, whose first argument is the process group; all ranks run it, in groups of the size
that was asked for.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from typing import Any

WORLD_SIZE = 4
SECONDS = 180


class Ranks:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.sequence_parallel.scenarios"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, f"{self.folder.name}/rendezvous", theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, scenario: str, size: int, **kwargs: Any) -> list[Any]:
        """Each rank's result; an error on any rank fails the test with its traceback."""
        for pipe in self.pipes:
            pipe.send((scenario, size, kwargs))
        results = [self._receive(rank, scenario) for rank in range(WORLD_SIZE)]
        for rank, (failed, result) in enumerate(results):
            assert not failed, f"{scenario} failed on rank {rank}:\n{result}"
        return [result for _, result in results]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()

    def _receive(self, rank: int, scenario: str) -> Any:
        if not self.pipes[rank].poll(SECONDS):
            for process in self.processes:
                process.kill()
            raise AssertionError(f"{scenario}: rank {rank} gave no answer within {SECONDS} s")
        return self.pipes[rank].recv()


def _serve(rank: int, rendezvous: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from kimi_bridge.patches import transformers_ulysses

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    groups = {size: dist.new_subgroups(size)[0] for size in (1, 2, WORLD_SIZE)}
    while (job := pipe.recv()) is not None:
        scenario, size, kwargs = job
        torch.manual_seed(0)
        try:
            name, _, function = scenario.rpartition(".")
            module = importlib.import_module(f"tests.sequence_parallel.{name or 'scenarios'}")
            pipe.send((False, getattr(module, function)(groups[size], **kwargs)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
        finally:
            transformers_ulysses.undo()
    dist.destroy_process_group()
