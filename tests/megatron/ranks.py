"""Four gloo ranks that live for the whole session and run one scenario after another.

Importing Megatron takes 10 to 30 seconds, so one process imports it, the ranks are forked from that one,
and the tests share the ranks instead of starting torchrun each. A scenario is a function of
`tests.megatron.scenarios`, or MODULE.FUNCTION of `tests.megatron`; every rank runs it. Other packages of
tests have scenarios of their own.
"""

from __future__ import annotations

import importlib
import os
import traceback
from dataclasses import dataclass
from typing import Any

from tests.rank_pool import WORLD_SIZE, RankPool


class Layout(dict):
    """`kimi_bridge.megatron.runtime.Layout` by its keywords: importing that one imports Megatron."""

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in self.items()) or "one"


@dataclass
class RankError:
    """What a scenario raised on one rank."""

    kind: str
    message: str
    trace: str


class Ranks:
    def __init__(self, package: str = "tests.megatron") -> None:
        self._pool = RankPool(_serve, f"{package}.scenarios", package)
        self.close = self._pool.close
        self._jobs = 0

    def run_all(self, scenario: str, **kwargs: Any) -> list[Any]:
        """The result of each rank, or its RankError."""
        self._jobs += 1
        return self._pool.answers(scenario, (scenario, kwargs, self._jobs))

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


def join(rank: int, rendezvous: str) -> None:
    """Joins the process group through a file, which needs no free port and works any number of times."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    # A rank that fails at once must not take the store away from those that still connect.
    dist.barrier()


def _serve(rank: int, pipe: Any, folder: str, package: str) -> None:
    os.environ["RANK"] = str(rank)
    import torch

    from kimi_bridge.megatron import runtime

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        scenario, kwargs, number = job
        try:
            # A process group for each: the groups of a layout have threads that only end with it.
            join(rank, f"{folder}/rendezvous{number}")
            name, _, function = scenario.rpartition(".")
            module = importlib.import_module(f"{package}.{name or 'scenarios'}")
            layouts = {
                key: runtime.Layout(**value) for key, value in kwargs.items() if isinstance(value, Layout)
            }
            pipe.send(getattr(module, function)(**kwargs | layouts))
        except Exception as error:
            pipe.send(RankError(type(error).__name__, str(error), traceback.format_exc()))
        finally:
            runtime.shutdown()
