"""Conversions in processes of their own, for tests that kill them or measure them."""

import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from checkpoint_folders import contents

from kimi_bridge.checkpoint import convert
from kimi_bridge.checkpoint.convert_plan import Plan
from kimi_bridge.checkpoint.convert_pool import LocalWorkers
from kimi_bridge.checkpoint.convert_staging import Staging

# Forked from a process that has imported everything and done nothing else: the start takes no time.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["kimi_bridge.checkpoint.convert", "compressed_tensors.quantization", "compressed_tensors.utils.match"]
)


def start(job: Callable[..., Any], *arguments: Any, **options: Any) -> BaseProcess:
    process = CONTEXT.Process(target=job, args=arguments, kwargs=options)
    process.start()
    return process


def finish(job: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    process = start(job, *arguments, **options)
    process.join(120)
    assert process.exitcode == 0


def staging(dst: Path) -> Path:
    return dst / ".unfinished-conversion"


def manifest(dst: Path) -> dict[str, Any]:
    return json.loads((staging(dst) / "manifest.json").read_text())


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def run_with_a_process(plan: Plan, dst: Path) -> int:
    """Writes a plan by a thread and a process that is there before anything is cut; what the latter did."""
    staging = Staging(dst, plan, True, False)
    answered = []
    with LocalWorkers(2) as workers:
        pieces = convert._OpenShards(plan, staging, list(plan.shards), workers, True)
        (process,) = workers._processes
        assert process.start()
        ask = process.ask
        process.start = lambda: True  # type: ignore[method-assign]
        process.ask = lambda piece: answered.append(piece) or ask(piece)  # type: ignore[method-assign,func-returns-value]
        for reply in workers.run(pieces.pieces()):
            assert not reply.error
            if (complete := pieces.take(reply)) is not None:
                staging.finish(reply.shard, complete, sealed=False)
    staging.publish()
    staging.close()
    return len(answered)


def assert_nothing_partial(dst: Path, expected: dict[str, bytes]) -> None:
    """Whatever is there under a final name has its final bytes, in the staging folder too."""
    for path in (*dst.glob("*.safetensors"), *staging(dst).glob("*.safetensors")):
        assert path.read_bytes() == expected[path.name], path


def assert_same(dst: Path, expected: dict[str, bytes], same_source: bool = True) -> None:
    """The same files with the same bytes; from a copy of the source the record of the conversion differs."""
    found = contents(dst)
    assert found.keys() == expected.keys()
    different = [name for name in found if found[name] != expected[name]]
    assert different == ([] if same_source else [".kimi-bridge-conversion.json"])
