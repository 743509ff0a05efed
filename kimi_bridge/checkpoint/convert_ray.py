"""Who executes the pieces of a conversion: tasks on a Ray cluster whose nodes share the file system."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

from kimi_bridge.conversion.execute import answer
from kimi_bridge.conversion.jobs import Piece, Reply
from kimi_bridge.conversion.storage import RESUME
from kimi_bridge.errors import CheckpointError

# A node that dies takes its tasks along: each starts again elsewhere.
_RETRIES = 5
_SECONDS_TO_CONNECT = 10.0


class RayWorkers:
    """At most `count` shards at a time as tasks of one CPU each; by default as many as there are CPUs.

    A context manager: leaving it cancels what still runs, and disconnects where it had connected.
    Raises CheckpointError where Ray is not installed or the cluster does not answer.
    """

    whole_shards = True

    def __init__(self, address: str, count: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise CheckpointError(
                "Ray is not installed: pip install 'kimi-megatron-bridge[ray]', or leave out the address."
            ) from error
        self._ray = ray
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                _check_port(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            # Ray raises several kinds, some of them plain.
            except Exception as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"No Ray cluster answers at {address} ({reason}): check the address, and `ray status`."
                ) from error
        self.count = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._task = ray.remote(num_cpus=1, max_retries=_RETRIES)(answer)
        self._running: list[ray.ObjectRef] = []

    def run(self, pieces: Iterator[Piece]) -> Iterator[Reply]:
        """Replies in the order they come. Raises CheckpointError for a task that Ray gave up."""
        while True:
            while len(self._running) < self.count and (piece := next(pieces, None)) is not None:
                self._running.append(self._task.remote(piece))
            if not self._running:
                return
            (done,), self._running = self._ray.wait(self._running, num_returns=1)
            try:
                yield self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(f"Ray lost a shard ({reason}): {RESUME}.") from error

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._running:
            self._ray.cancel(task, force=True)
        if self._connected:
            self._ray.shutdown()


def _check_port(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself would go on trying for many minutes."""
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
