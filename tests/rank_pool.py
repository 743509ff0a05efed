"""Four processes that live for the whole session and do one job after another, each as a rank."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

WORLD_SIZE = 4
SECONDS = 180


class RankPool:
    """`serve(rank, pipe, folder, *arguments)` answers every job it receives, until that is None.

    The processes are forked from one that has imported `preload`.
    """

    def __init__(self, serve: Callable[..., None], preload: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            # Not daemons: Megatron's checkpoint writer starts processes of its own.
            process = context.Process(target=serve, args=(rank, theirs, self._folder.name, *arguments))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def answers(self, name: str, job: Any) -> list[Any]:
        """What each rank says of the job; `name` is for the message if one says nothing."""
        for pipe in self._pipes:
            pipe.send(job)
        return [self._receive(rank, name) for rank in range(WORLD_SIZE)]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def _receive(self, rank: int, name: str) -> Any:
        if not self._pipes[rank].poll(SECONDS):
            for process in self._processes:
                process.kill()
            raise AssertionError(f"{name}: rank {rank} gave no answer within {SECONDS} s")
        return self._pipes[rank].recv()
