"""The trainer's end of `engine_server.py`: starts it in the background, talks to it, notices its death."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu.check.trainer_types import Sampled

_SERVER = Path(__file__).with_name("engine_server.py")
_TAIL = 3000


class EngineError(RuntimeError):
    """The engine refused a command; it still runs."""


class EngineDied(RuntimeError):
    """The engine's process is gone."""


class Engine:
    """One engine process. `settings` go to `engine_server.Server`."""

    def __init__(
        self, name: str, python: str, pythonpath: str | None, folder: Path, settings: dict[str, Any]
    ):
        self.name, self.python, self.pythonpath = name, python, pythonpath
        self.settings = settings
        self.log = folder / f"engine-{name}.log"
        self.process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] | None = None

    def start(self) -> None:
        """Returns at once; `wait` waits until it serves."""
        environment = os.environ.copy()
        if self.pythonpath is not None:
            environment["PYTHONPATH"] = self.pythonpath
        elif shlex.split(self.python)[0] != sys.executable:
            environment.pop("PYTHONPATH", None)
        self.ready = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*shlex.split(self.python), "-P", str(_SERVER), json.dumps(self.settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()

    def wait(self, timeout: float) -> dict[str, Any]:
        """What the engine says of itself when it is ready to serve."""
        if self.process is None:
            self.start()
        if self.ready is None:
            try:
                self.ready = self._receive("the start", time.monotonic() + timeout, None)["ready"]
            except EngineError as error:
                raise EngineError(f"{error}\n{self.tail()}") from None
        return self.ready

    def call(
        self,
        command: str,
        timeout: float = 120,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **arguments: Any,
    ) -> Any:
        """Runs a command and returns its result.

        Raises EngineError for what the engine refuses, EngineDied where its process has ended,
        TimeoutError where it does not answer.
        """
        assert self.process is not None, "start it first"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died(command) from None
        return self._receive(command, time.monotonic() + timeout, on_event)["result"]

    def sample(
        self,
        prompts: torch.Tensor,
        tokens: int,
        top: int,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        adapter: str | None = None,
        moe_layers: list[int] | None = None,
    ) -> Sampled:
        """Continues `[n, p]` prompts. On the CPU."""
        answer = self.call(
            "generate",
            prompts=prompts.tolist(),
            tokens=tokens,
            temperature=temperature,
            top=top,
            seed=seed,
            adapter=adapter,
        )
        experts = None
        if answer["experts"] is not None:
            experts = torch.tensor(answer["experts"])
            # For every layer of the model; dense ones have none.
            experts = experts[:, : prompts.shape[1] + tokens - 1, moe_layers]
        return Sampled(
            prompts.cpu(),
            torch.tensor(answer["tokens"]),
            torch.tensor(answer["logprobs"], dtype=torch.float64),
            torch.tensor(answer["top_ids"]),
            torch.tensor(answer["top_logprobs"], dtype=torch.float64),
            experts,
        )

    def kill(self) -> None:
        """As a crash would: SIGKILL, no farewell."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def stop(self) -> None:
        """Never raises."""
        if self.process is None:
            return
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)

    def tail(self) -> str:
        """The end of what the engine printed."""
        return self.log.read_text(errors="replace")[-_TAIL:] if self.log.exists() else ""

    def _receive(
        self, what: str, deadline: float, on_event: Callable[[dict[str, Any]], None] | None
    ) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise TimeoutError(
                    f"engine {self.name} did not answer in time ({what})\n{self.tail()}"
                ) from None
            if line is None:
                raise self._died(what)
            message = json.loads(line)
            if "event" in message:
                if on_event is not None:
                    on_event(message)
                continue
            if "error" in message:
                raise EngineError(f"engine {self.name}, {what}: {message['error']}")
            return message

    def _died(self, what: str) -> EngineDied:
        assert self.process is not None
        code = self.process.wait(30)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        tail = "" if code == -9 else f"\n{self.tail()}"
        return EngineDied(
            f"engine {self.name} (process {self.process.pid}) ended with {how} during {what}{tail}"
        )

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)
