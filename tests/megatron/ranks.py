"""Four gloo ranks that live for the whole session and run one scenario after another.

Importing Megatron takes a rank 10 to 30 seconds, so the tests share the ranks instead of starting
torchrun each. A scenario is a function of `tests.megatron.scenarios`; every rank runs it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import traceback
from dataclasses import dataclass
from typing import Any

WORLD_SIZE = 4
SECONDS = 600


@dataclass
class RankError:
    """What a scenario raised on one rank."""

    kind: str
    message: str
    trace: str


class Ranks:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            # Not daemons: Megatron's checkpoint writer starts processes of its own.
            process = context.Process(target=_serve, args=(rank, port, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run_all(self, scenario: str, **kwargs: Any) -> list[Any]:
        """The result of each rank, or its RankError."""
        for pipe in self.pipes:
            pipe.send((scenario, kwargs))
        return [self._receive(rank, scenario) for rank in range(WORLD_SIZE)]

    def run(self, scenario: str, **kwargs: Any) -> Any:
        """Rank 0's result; an error on any rank fails the test with its traceback."""
        results = self.run_all(scenario, **kwargs)
        for rank, result in enumerate(results):
            if isinstance(result, RankError):
                raise AssertionError(f"{scenario} failed on rank {rank}:\n{result.trace}")
        return results[0]

    def errors(self, scenario: str, **kwargs: Any) -> list[RankError]:
        """The errors of a scenario that must fail on every rank."""
        results = self.run_all(scenario, **kwargs)
        assert all(isinstance(result, RankError) for result in results), results
        return results

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()

    def _receive(self, rank: int, scenario: str) -> Any:
        if not self.pipes[rank].poll(SECONDS):
            for process in self.processes:
                process.kill()
            raise AssertionError(f"{scenario}: rank {rank} gave no answer within {SECONDS} s")
        return self.pipes[rank].recv()


def _serve(rank: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",
    )
    import torch

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        scenario, kwargs = job
        try:
            module = importlib.import_module("tests.megatron.scenarios")
            pipe.send(getattr(module, scenario)(**kwargs))
        except Exception as error:
            pipe.send(RankError(type(error).__name__, str(error), traceback.format_exc()))
