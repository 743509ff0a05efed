"""Conversions of the published size: what they plan, what memory they take, and on a Ray cluster."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_folders import DATA, INDEX, contents, real_inventory
from convert_runs import assert_same, staging, wait_for

from kimi_bridge.checkpoint import CheckpointReader, TensorSpec, dequantize_checkpoint, synthesize_checkpoint
from kimi_bridge.checkpoint.synthetic_config import checkpoint_specs, synthetic_config
from kimi_bridge.checkpoint.writer import plan_shards, shard_header
from kimi_bridge.errors import CheckpointError


def write_sparse(folder: Path, specs: list[TensorSpec], size: str) -> None:
    """Headers and index; of the data only weight_shape, the rest is holes."""
    by_name = {spec.name: spec for spec in specs}
    plan = plan_shards(specs, size)
    for filename, names in plan.items():
        header, offsets, nbytes = shard_header([by_name[name] for name in names])
        with (folder / filename).open("wb") as file:
            file.write(header)
            file.truncate(nbytes)
            for name in names:
                if name.endswith("weight_shape") and len(names) < 1000:
                    rows, words = by_name[name.replace("_shape", "_packed")].shape
                    file.seek(offsets[name])
                    file.write(torch.tensor([rows, words * 8], dtype=torch.int32).numpy().tobytes())
    weight_map = {name: filename for filename, names in plan.items() for name in names}
    if len(plan) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real config, index and headers; the shards have their full size, but the data is holes."""
    folder = tmp_path_factory.mktemp("published")
    specs = [TensorSpec(n, getattr(torch, dtype), shape) for n, (dtype, shape) in real_inventory().items()]
    write_sparse(folder, specs, "9.4GB")
    shutil.copy(DATA / "config.json", folder)
    yield folder
    shutil.rmtree(folder)


PLANS = """
import json, resource, sys, time
import compressed_tensors.quantization
from kimi_bridge.checkpoint.convert_plan import plan_dequantize, plan_truncate
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
for plan_it in (lambda: plan_truncate(sys.argv[1], 2, 8), lambda: plan_dequantize(sys.argv[1])):
    begin = time.perf_counter()
    plan = plan_it()
    seconds = time.perf_counter() - begin
    print(json.dumps({
        "seconds": seconds, "peak": peak() - before, "tensors": plan.tensors, "bytes": plan.nbytes,
        "largest": max(plan.layout(name)[2] for name in plan.shards), "int4": plan.int4_weights,
        "sources": len(set().union(*(plan.sources_of(name) for name in plan.shards))),
    }))
"""


def test_plans_of_the_published_checkpoint(published: Path) -> None:
    """In a process of its own, for its peak memory over that of the imports."""
    command = [sys.executable, "-c", PLANS, published]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    truncated, whole = map(json.loads, done.stdout.splitlines())
    assert truncated["seconds"] < 30
    assert whole["seconds"] < 60
    assert whole["peak"] < 700_000
    assert whole["int4"] == 60 * 384 * 3
    assert whole["tensors"] == 208_550 - 2 * 60 * 384 * 3
    assert whole["bytes"] > 2.05e12
    assert whole["sources"] == 64
    assert 5e9 * 0.9 < whole["largest"] < 5.01e9
    assert truncated["int4"] == 8 * 3
    assert truncated["bytes"] < 12e9


HUGE = {
    "first_k_dense_replace": 0,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 8,
    "num_hidden_layers": 1,
    "vocab_size": 40960,
}
LIMITED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (1400 << 20, 1400 << 20))
from kimi_bridge.checkpoint import convert, dequantize_checkpoint
convert._PROCESSES_FROM = int(sys.argv[3])
if __name__ == "__main__":
    summary = dequantize_checkpoint(sys.argv[1], sys.argv[2], workers=2)
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"peaks": peaks, "bytes": summary.bytes, "groups": summary.groups}))
"""


@pytest.mark.parametrize("processes_from", [0, 1 << 40])
def test_memory_does_not_grow_with_the_shard(processes_from: int, tmp_path: Path) -> None:
    """One shard of 1.5 GB in, one of 2 GB out, under a limit of 1.4 GiB for each process's data."""
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("needs 6 GB of disk")
    config = synthetic_config("tiny", HUGE)
    src = tmp_path / "src"
    src.mkdir()
    write_sparse(src, checkpoint_specs(config), "50GB")
    (src / "config.json").write_text(json.dumps(config))
    (shard,) = src.glob("*.safetensors")
    assert shard.stat().st_size > 1.4e9
    command = [sys.executable, "-c", LIMITED, src, tmp_path / "dst", str(processes_from)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    mine, worker = found["peaks"]
    assert mine < 1.5 * 2**20
    assert (worker == 0) == (processes_from > 0)
    assert worker < 1.0 * 2**20
    assert found["bytes"] > 1.9e9
    assert found["groups"] == 8 * 3 * 2048 * 7168 // 32
    CheckpointReader(tmp_path / "dst").check()
    shutil.rmtree(tmp_path / "dst")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A head without CPUs and two nodes of one CPU each, in processes of their own."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_DASHBOARD", "1")
    # What a node that dies takes along is noticed at once.
    system = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
    system |= {"health_check_failure_threshold": 2}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": system})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_on_a_ray_cluster_one_node_of_which_dies(cluster: object, tmp_path: Path) -> None:
    overrides = {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 16}
    src = synthesize_checkpoint(tmp_path / "src", overrides=overrides, convention="mixed")
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]  # type: ignore[attr-defined]
    cluster.wait_for_nodes()  # type: ignore[attr-defined]
    done: list[int] = []
    killed = threading.Event()

    def kill_one_node() -> None:
        # As soon as a task has begun to write, and nothing asks the node first.
        wait_for(lambda: len(list(staging(tmp_path / "ray").glob("*.safetensors"))) > 3)
        cluster.remove_node(nodes[0], allow_graceful=False)  # type: ignore[attr-defined]
        killed.set()

    killer = threading.Thread(target=kill_one_node)
    killer.start()
    summary = dequantize_checkpoint(
        src,
        tmp_path / "ray",
        ray_address=cluster.address,  # type: ignore[attr-defined]
        max_shard_size="1MB",
        progress=lambda now, _total: done.append(now),
    )
    killer.join()
    assert killed.is_set()
    assert len(done) == summary.shards > 50
    dequantize_checkpoint(src, tmp_path / "local", max_shard_size="1MB")
    assert_same(tmp_path / "ray", contents(tmp_path / "local"))


def test_a_ray_cluster_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(CheckpointError, match=r"No Ray cluster answers at 127\.0\.0\.1:1 "):
        dequantize_checkpoint(tiny, tmp_path / "out", ray_address="127.0.0.1:1")
    assert not (tmp_path / "out").exists()
