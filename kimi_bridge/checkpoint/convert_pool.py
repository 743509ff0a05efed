"""Who executes the pieces of a conversion: this process, and others of this machine."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

import kimi_bridge
from kimi_bridge.checkpoint.cores import usable_cores
from kimi_bridge.conversion.execute import answer
from kimi_bridge.conversion.jobs import Piece, Reply
from kimi_bridge.errors import CheckpointError

_SECONDS_TO_END = 30.0


class LocalWorkers:
    """`count` workers: a thread of this process, and processes. Each has `threads` threads for its share.

    The thread is at work while the processes still import torch. With `in_threads` all are threads of this
    process, which spares those imports; but many would wait for Python's lock. A context manager: leaving it
    ends them.
    """

    whole_shards = False

    def __init__(self, count: int, in_threads: bool = False) -> None:
        self.count = count
        self._threads_before = torch.get_num_threads()
        self.threads = max(1, usable_cores() // count)
        here = count if in_threads else 1
        self._processes = [_Process(self.threads) for _ in range(count - here)]
        self._workers: list[_Here | _Process] = [
            *(_Here(self.threads) for _ in range(here)),
            *self._processes,
        ]
        self._stopping = threading.Event()
        self._replies: queue.Queue[Reply | BaseException | None] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self, pieces: Iterator[Piece]) -> Iterator[Reply]:
        """Replies in the order they come. Raises CheckpointError for a worker that died."""
        for worker in self._workers:
            thread = threading.Thread(target=self._serve, args=(worker, pieces), daemon=True)
            self._threads.append(thread)
            thread.start()
        running = len(self._threads)
        while running:
            reply = self._replies.get()
            if reply is None:
                running -= 1
            elif isinstance(reply, BaseException):
                raise reply
            else:
                yield reply

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the workers end their pieces, which takes a moment, and waits for them."""
        self._stop()
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)
        for process in self._processes:
            process.end()
        torch.set_num_threads(self._threads_before)

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._processes:
            process.dismiss()

    def _serve(self, worker: _Here | _Process, pieces: Iterator[Piece]) -> None:
        try:
            if not worker.start():
                return
            while not self._stopping.is_set():
                with self._lock:
                    piece = next(pieces, None)
                if piece is None:
                    break
                self._replies.put(worker.ask(piece))
        except BaseException as error:
            self._replies.put(error)
        finally:
            self._stop()
            self._replies.put(None)


class _Here:
    """Answers pieces in the thread that calls."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def start(self) -> bool:
        # For this thread, and as a side effect for threads to come, which is undone at the end.
        torch.set_num_threads(self._threads)
        return True

    def ask(self, piece: Piece) -> Reply:
        return answer(piece)


class _Process:
    """Answers pieces in a process. It ends by itself when this one is gone."""

    def __init__(self, threads: int) -> None:
        root = str(Path(kimi_bridge.__file__).parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # Memory that is given back to the system comes back one page fault at a time.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kimi_bridge.conversion.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # Ctrl-C is for the caller, who lets the workers end what they are at.
            process_group=0,
        )
        self._lock = threading.Lock()
        self._ready = self._dismissed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> bool:
        """Waits until it can be asked; False when there is nothing to ask it anymore."""
        ready = self._process.stdout is not None and self._process.stdout.read(1)
        with self._lock:
            self._ready = bool(ready)
            if not ready and not self._dismissed:
                raise CheckpointError(self._death("its start"))
            return not self._dismissed

    def ask(self, piece: Piece) -> Reply:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(piece, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(self._death(piece.shard)) from error

    def dismiss(self) -> None:
        """Nothing is left to do: whoever still imports torch need not go on."""
        with self._lock:
            self._dismissed = True
            if not self._ready:
                self._process.kill()

    def end(self) -> None:
        """Waits for its end."""
        for pipe in (self._process.stdin, self._process.stdout):
            # There may be something in it that cannot be written anymore.
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _death(self, where: str) -> str:
        code = self._process.wait(_SECONDS_TO_END)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        killed = code == -signal.SIGKILL
        hint = "the system ran out of memory, or someone ended it" if killed else "see above"
        return (
            f"A worker died at {where} ({how}: {hint}): run the same command again to go on, with fewer "
            "workers if memory is short; finished shards are kept."
        )
