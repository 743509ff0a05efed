"""inspect: real dimensions in seconds, conventions told apart, damage listed instead of raised."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_folders import (
    DATA,
    EXPERT,
    INDEX,
    PREFIX,
    edit_json,
    real_inventory,
    remove_tensor,
    replace_tensor,
)
from safetensors.torch import load_file, save_file

from kimi_bridge.checkpoint import CheckpointReader, TensorSpec, inspect_checkpoint
from kimi_bridge.checkpoint.writer import plan_shards, shard_header
from kimi_bridge.errors import CheckpointError

TENSORS = 208_550
BYTES = 595_148_192_736
SHARDS = 64


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real config, index and headers; the shards have their full size, but the data is holes."""
    folder = tmp_path_factory.mktemp("published")
    specs = {
        name: TensorSpec(name, getattr(torch, dtype), shape)
        for name, (dtype, shape) in real_inventory().items()
    }
    plan = plan_shards(list(specs.values()), "9.4GB")
    assert len(plan) == SHARDS
    for filename, names in plan.items():
        header, _, size = shard_header([specs[name] for name in names])
        with (folder / filename).open("wb") as file:
            file.write(header)
            file.truncate(size)
    weight_map = {name: filename for filename, names in plan.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": BYTES}, "weight_map": weight_map}))
    shutil.copy(DATA / "config.json", folder)
    yield folder
    # pytest keeps folders of past sessions, and 595 GB confuse whoever adds up sizes.
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def published_headers(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but the shards end after their headers, as after a download of the headers alone."""
    folder = tmp_path_factory.mktemp("headers")
    for path in published.iterdir():
        with path.open("rb") as file:
            length = 8 + int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else None
            file.seek(0)
            (folder / path.name).write_bytes(file.read(length))
    return folder


def test_the_published_inventory_as_sparse_files(published: Path) -> None:
    """In a process of its own, for its peak memory over that of the imports."""
    program = (
        "import json, resource, sys, time\n"
        "import compressed_tensors.quantization\n"
        "from kimi_bridge.checkpoint import inspect_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "result = inspect_checkpoint(sys.argv[1])\n"
        "print(json.dumps(result.to_dict() | {'peak': peak() - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(published)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    result = json.loads(done.stdout)
    assert (result["tensors"], result["bytes"], result["shards"]) == (TENSORS, BYTES, SHARDS)
    assert result["problems"] == []
    model = result["model"]
    assert model["architecture"] == "KimiK25ForConditionalGeneration"
    assert (model["layers"], model["dense_layers"], model["moe_layers"]) == (61, 1, 60)
    assert (model["experts"], model["experts_per_token"], model["hidden_size"]) == (384, 8, 7168)
    assert (result["quantization"]["group_size"], result["quantization"]["weights"]) == (32, 60 * 384 * 3)
    assert {kind["kind"]: kind["tensors"] for kind in result["kinds"]}["experts"] == 60 * 384 * 9
    assert sum(kind["bytes"] for kind in result["kinds"]) == BYTES
    assert result["convention"]["verdict"].startswith("no data")
    # About 6 s and 350 MB here, for 208,550 names; the limits leave room for a busy machine.
    assert result["seconds"] < 60
    assert result["peak"] < 800_000


def test_the_published_inventory_as_headers_alone(published_headers: Path) -> None:
    result = inspect_checkpoint(published_headers)
    assert (result.tensors, result.bytes, result.shards) == (TENSORS, BYTES, SHARDS)
    assert result.model["layers"] == 61
    assert result.convention.verdict.startswith("no data")
    assert result.problems[0].startswith("model-00001-of-00064.safetensors is truncated: expected 9,")
    assert result.problems[-1] == f"... and {SHARDS - 20} more problems."
    with pytest.raises(CheckpointError, match=r"model-00001-of-00064\.safetensors is truncated"):
        CheckpointReader(published_headers)


@pytest.mark.parametrize(
    ("convention", "verdict"),
    [
        ("kimi", "kimi (/7)"),
        ("rtn", "rtn (/7.5)"),
        ("mixed", "neither"),
        ("kimi_bf16", "not quantized"),
        ("kimi_vl", "not quantized"),
    ],
)
def test_conventions_are_told_apart(checkpoints: Path, convention: str, verdict: str) -> None:
    result = inspect_checkpoint(checkpoints / convention)
    found = result.convention
    assert found.verdict.startswith(verdict)
    assert result.problems == []
    if convention == "kimi":
        assert (found.kimi_share, found.minus_8_share, found.below_7_share) == (1.0, 0.0, 0.0)
        assert (found.weights, found.zero_groups) == (16, 0)
    elif convention == "rtn":
        assert found.kimi_share < 0.75
        assert found.minus_8_share > 0.25
    elif convention == "mixed":
        assert min(found.minus_8_share, found.below_7_share, found.zero_groups / found.groups) > 0.05
    else:
        assert found.weights == 0
        assert result.quantization == {}


def test_real_kimi_weights_are_recognised(tiny: Path, tmp_path: Path) -> None:
    """Eight rows of Kimi-K2.6's first expert, under the tiny checkpoint's config."""
    (golden,) = DATA.glob("kimi_k26_*.safetensors")
    tensors = load_file(golden)
    packed = next(tensor for name, tensor in tensors.items() if name.endswith("packed"))
    scale = next(tensor for name, tensor in tensors.items() if name.endswith("scale"))
    parts = {
        EXPERT + "_packed": packed,
        EXPERT + "_scale": scale,
        EXPERT + "_shape": torch.tensor([packed.shape[0], packed.shape[1] * 8], dtype=torch.int32),
    }
    save_file(parts, tmp_path / "model.safetensors")
    shutil.copy(tiny / "config.json", tmp_path)
    found = inspect_checkpoint(tmp_path).convention
    assert (found.weights, found.groups) == (1, scale.numel())
    assert found.verdict == "kimi (/7)"
    assert found.minus_8_share == 0


def test_what_the_tiny_checkpoint_holds(tiny: Path) -> None:
    result = inspect_checkpoint(tiny)
    reader = CheckpointReader(tiny)
    assert result.model["model_type"] == "kimi_k25 (kimi_k2)"
    assert (result.model["layers"], result.model["dense_layers"], result.model["moe_layers"]) == (3, 1, 2)
    assert (result.model["experts"], result.model["experts_per_token"]) == (8, 2)
    assert result.quantization["targets"] == ["Linear"]
    assert (result.tensors, result.shards) == (len(reader.names()), 3)
    assert result.bytes == sum(reader.info(name).nbytes for name in reader.names())
    assert json.loads(result.to_json()) == result.to_dict()


def test_what_the_tiny_kimi_vl_holds(kimi_vl: Path) -> None:
    result = inspect_checkpoint(kimi_vl)
    assert result.model["architecture"] == "KimiVLForConditionalGeneration"
    assert result.model["model_type"] == "kimi_vl (deepseek_v3)"
    assert (result.model["q_lora_rank"], result.model["shared_experts"]) == (None, 2)
    assert result.model["vision_layers"] == 2
    assert {kind.kind: kind.tensors for kind in result.kinds} == {
        "vision tower": 3 + 2 * 12 + 2,
        "projector": 6,
        "embeddings": 1,
        "lm_head": 1,
        "norms": 1 + 3 * 3,
        "attention": 3 * 4,
        "router": 2 * 2,
        "experts": 2 * 8 * 3,
        "shared experts": 2 * 3,
        "dense mlp": 3,
    }


def test_damage_is_listed(spoiled: Path) -> None:
    """One shard is gone, one is cut, and one holds a NaN: the rest of that one is still sampled."""
    broken = PREFIX + "2.mlp.experts.3.down_proj.weight"
    scale = CheckpointReader(spoiled).tensor(broken + "_scale")
    replace_tensor(spoiled, broken + "_scale", scale * float("nan"))
    first, second, third = sorted(spoiled.glob("*.safetensors"))
    assert CheckpointReader(spoiled).info(broken + "_scale").filename == second.name
    third.unlink()
    first.write_bytes(first.read_bytes()[:-1])
    result = inspect_checkpoint(spoiled, sample=1000)
    for fault in (f"{third.name}, which the index names", f"{first.name} is truncated", "holds NaN or Inf"):
        assert sum(fault in problem for problem in result.problems) == 1, fault
    assert result.convention.verdict == "kimi (/7)"
    assert result.convention.weights > 10


def test_a_config_that_is_missing_or_wrong_is_listed(spoiled: Path) -> None:
    edit_json(spoiled / "config.json", lambda config: config.update(model_type="llama", architectures=["X"]))
    result = inspect_checkpoint(spoiled)
    assert result.model == {"architectures": ["X"], "model_type": "llama"}
    assert any("model_type 'llama'" in problem for problem in result.problems)
    assert result.tensors == 222
    (spoiled / "config.json").unlink()
    result = inspect_checkpoint(spoiled)
    assert (result.model, result.quantization) == ({}, {})
    assert len(result.problems) == 1
    assert "has no config.json" in result.problems[0]


def test_nothing_to_inspect(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        inspect_checkpoint(tmp_path)


def test_the_sample_is_small(tiny: Path) -> None:
    assert inspect_checkpoint(tiny, sample=3).convention.weights == 3
    assert inspect_checkpoint(tiny, sample=0).convention.weights == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 5}, "missing, by config.json"),
        ({"num_hidden_layers": 2}, "not in the model that config.json describes"),
        ({"n_routed_experts": 4}, "not in the model that config.json describes"),
        ({"hidden_size": 256}, "of another shape than config.json says"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"n_routed_experts": 0}, "0 experts"),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_a_problem(
    change: dict[str, int], problem: str, tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    assert any(problem in found for found in inspect_checkpoint(folder).problems)
    assert inspect_checkpoint(tiny).problems == []


def test_a_vision_side_that_is_not_the_configs(spoiled: Path) -> None:
    names = [name for name in CheckpointReader(spoiled).names() if not name.startswith("language_model.")]
    remove_tensor(spoiled, names[3])
    assert any(names[3] in problem for problem in inspect_checkpoint(spoiled).problems)
    edit_json(spoiled / "config.json", lambda config: config.pop("vision_config"))
    assert inspect_checkpoint(spoiled).problems == []
