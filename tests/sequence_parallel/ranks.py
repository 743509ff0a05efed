"""Four gloo ranks that live for the whole session and run one scenario after another, on 1, 2 or 4 of them.

A scenario is a function of `tests.sequence_parallel.scenarios`, or MODULE.FUNCTION of
`tests.sequence_parallel`, whose first argument is the process group; all ranks run it, in groups of the size
that was asked for.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from tests.rank_pool import WORLD_SIZE, RankPool


class Ranks:
    def __init__(self) -> None:
        self._pool = RankPool(_serve, "tests.sequence_parallel.scenarios")
        self.close = self._pool.close

    def run(self, scenario: str, size: int, **kwargs: Any) -> list[Any]:
        """Each rank's result; an error on any rank fails the test with its traceback."""
        results = self._pool.answers(scenario, (scenario, size, kwargs))
        for rank, (failed, result) in enumerate(results):
            assert not failed, f"{scenario} failed on rank {rank}:\n{result}"
        return [result for _, result in results]


def _serve(rank: int, pipe: Any, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from kimi_bridge.patches import transformers_ulysses

    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE)
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
