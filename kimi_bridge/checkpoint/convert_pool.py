"""Who executes the pieces of a conversion: processes of this machine."""

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

import kimi_bridge
from kimi_bridge.conversion.jobs import Piece, Reply
from kimi_bridge.errors import CheckpointError

_SECONDS_TO_END = 30.0


class LocalWorkers:
    """`count` worker processes, each with its share of the cores. A context manager: leaving it ends them."""

    whole_shards = False

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes = [_start(count) for _ in range(count)]
        self._stopping = threading.Event()
        self._replies: queue.Queue[Reply | BaseException | None] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self, pieces: Iterator[Piece]) -> Iterator[Reply]:
        """Replies in the order they come. Raises CheckpointError for a worker that died."""
        for process in self._processes:
            thread = threading.Thread(target=self._serve, args=(process, pieces), daemon=True)
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
        self._stopping.set()
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)
        for process in self._processes:
            _end(process)

    def _serve(self, process: subprocess.Popen[bytes], pieces: Iterator[Piece]) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    piece = next(pieces, None)
                if piece is None:
                    break
                self._replies.put(_ask(process, piece))
        except BaseException as error:
            self._stopping.set()
            self._replies.put(error)
        finally:
            self._replies.put(None)


def _start(count: int) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // count)
    root = str(Path(kimi_bridge.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Memory that is given back to the system comes back one page fault at a time.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_bridge.conversion.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        # Ctrl-C is for the caller, who lets the workers end what they are at.
        process_group=0,
    )


def _ask(process: subprocess.Popen[bytes], piece: Piece) -> Reply:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(piece, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(_death(process, piece)) from error


def _death(process: subprocess.Popen[bytes], piece: Piece) -> str:
    code = process.wait(_SECONDS_TO_END)
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    hint = "the system ran out of memory, or someone ended it" if code == -signal.SIGKILL else "see above"
    return (
        f"A worker died at {piece.shard} ({how}: {hint}): run the same command again to go on, with fewer "
        "workers if memory is short; finished shards are kept."
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # There may be something in it that cannot be written anymore.
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
