"""The command line as a user meets it: output, exit codes, one-line errors, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_bridge import cli
from kimi_bridge.checkpoint import FAMILIES, synthesize_checkpoint
from tests.megatron.conftest import needs_megatron_checkpoints

VERBS = ("demo", "doctor", "inspect", "synthesize", "import", "export", "verify")
VERBS += ("dequantize", "quantize", "truncate", "merge-adapter")


def run(
    *arguments: str | Path, module: str = "kimi_bridge", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # A narrow terminal would wrap what the tests look for.
    env = os.environ | {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)


def test_families_are_those_of_the_table() -> None:
    """Listed again in the command line, which starts without torch."""
    assert {family.value for family in cli.Family} == set(FAMILIES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    synthesize_checkpoint(folder)
    return folder


def test_help_has_every_verb_with_an_example() -> None:
    assert all(verb in run("--help").stdout for verb in VERBS)
    for verb in VERBS:
        done = run(verb, "--help")
        assert done.returncode == 0
        assert "Example:" in done.stdout, verb


def test_version() -> None:
    import kimi_bridge

    assert run("--version").stdout.split() == ["kimi-bridge", kimi_bridge.__version__]


def test_wrong_usage_is_2() -> None:
    assert run("inspect").returncode == 2
    assert run("import", "--hf-model", "x").returncode == 2
    assert run("synthesize", "x", "--size", "enormous").returncode == 2


def test_synthesize_is_deterministic_and_verify_sees_it(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("synthesize", tmp_path / name, "--seed", seed.__str__()).returncode == 0
    same, other = run("verify", tmp_path / "a", tmp_path / "b"), run("verify", tmp_path / "a", tmp_path / "c")
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "identical")
    assert (other.returncode, other.stdout.splitlines()[-1]) == (1, "DIFFERENT")
    assert json.loads(run("verify", tmp_path / "a", tmp_path / "c", "--json").stdout)["identical"] is False


def test_inspect(tiny: Path) -> None:
    done = run("inspect", tiny)
    assert done.returncode == 0
    assert "KimiK25ForConditionalGeneration" in done.stdout
    assert "kimi (/7)" in done.stdout
    assert json.loads(run("inspect", tiny, "--json").stdout)["tensors"] > 200


def test_dequantize_quantize_and_truncate(tiny: Path, tmp_path: Path) -> None:
    plain, back, small = (tmp_path / name for name in ("plain", "back", "small"))
    done = run("dequantize", tiny, plain, "--workers", "2", "--max-shard-size", "500KB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        done.stdout.splitlines()[0],
        "verified 48 INT4 weights: 0 of 12,288 groups are no fixed point of the scheme",
    ]
    done = run("quantize", plain, back, "--reference", tiny, "--require-fixed-point", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loose_groups"] == 0
    assert run("verify", tiny, back).returncode == 0

    arguments = ("truncate", tiny, small, "--layers", "2", "--experts", "4")
    done = run(*arguments, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "num_hidden_layers 2" in done.stdout
    assert not small.exists()
    assert run(*arguments).returncode == 0
    again = run("truncate", tiny, small, "--layers", "1")
    assert again.returncode == 1
    assert "already holds model.safetensors" in again.stderr
    assert run(*arguments, "--overwrite", "--no-verify").stdout.splitlines()[-1] == "not verified"


def test_kimi_vl(tmp_path: Path) -> None:
    """The verbs on a checkpoint without INT4: those that are about INT4 say so."""
    vl = tmp_path / "vl"
    assert run("synthesize", vl, "--family", "kimi_vl").returncode == 0
    done = run("inspect", vl)
    assert done.returncode == 0, done.stdout
    assert "KimiVLForConditionalGeneration" in done.stdout
    assert "not quantized: no INT4 weights" in done.stdout
    done = run("dequantize", vl, tmp_path / "plain")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.strip().endswith("holds no INT4 weights: there is nothing to dequantize.")
    done = run("truncate", vl, tmp_path / "small", "--layers", "2", "--experts", "4")
    assert done.returncode == 0, done.stderr
    assert "72 tensors" in done.stdout
    assert "INT4" not in done.stdout
    assert run("verify", vl, tmp_path / "small").stdout.splitlines()[-1] == "DIFFERENT"
    done = run("synthesize", tmp_path / "mixed", "--family", "kimi_vl", "--convention", "mixed")
    assert done.returncode == 1
    assert "published in bfloat16" in done.stderr


def test_groups_that_are_no_fixed_point_are_named(tmp_path: Path) -> None:
    synthesize_checkpoint(tmp_path / "rtn", convention="rtn")
    done = run("dequantize", tmp_path / "rtn", tmp_path / "a")
    assert done.returncode == 0
    assert ".mlp.experts." in done.stdout.splitlines()[2]
    done = run("dequantize", tmp_path / "rtn", tmp_path / "b", "--require-fixed-point")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "no fixed point of amax/7" in done.stderr


def test_verify_plots_and_names_the_worst(tiny: Path, tmp_path: Path) -> None:
    synthesize_checkpoint(tmp_path / "rtn", convention="rtn")
    done = run("verify", tiny, tmp_path / "rtn", "--plot", tmp_path / "error.png")
    assert done.returncode == 1
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")
    ratios = [
        float(line.split("SQNR ")[1].split()[0]) for line in done.stdout.splitlines() if ", SQNR " in line
    ]
    assert len(ratios) == 10
    assert ratios == sorted(ratios)
    done = run("verify", tiny, tiny, "--plot", tmp_path / "nowhere" / "error.png")
    assert done.returncode == 1
    assert "give a file in a folder that exists" in done.stderr


def test_a_missing_folder_is_one_line_and_1() -> None:
    for arguments in (("inspect", "./nowhere"), ("verify", "./nowhere", "./nowhere")):
        done = run(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr


def test_import_refuses_a_layout_that_needs_more_processes(tiny: Path, tmp_path: Path) -> None:
    done = run("import", "--hf-model", tiny, "--megatron-path", tmp_path / "m", "--tp", "2")
    assert done.returncode == 1
    assert "--nproc_per_node 2" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@needs_megatron_checkpoints
def test_a_failed_import_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    synthesize_checkpoint(broken)
    shard = next(iter(sorted(broken.glob("*.safetensors"))))
    shard.write_bytes(shard.read_bytes()[:-10])
    done = run("import", "--hf-model", broken, "--megatron-path", tmp_path / "m")
    assert done.returncode == 1
    assert shard.name in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@needs_megatron_checkpoints
def test_import_and_export_in_one_process(tiny: Path, tmp_path: Path) -> None:
    done = run("import", "--hf-model", tiny, "--megatron-path", tmp_path / "m")
    assert done.returncode == 0, done.stderr
    again = run("import", "--hf-model", tiny, "--megatron-path", tmp_path / "m")
    assert again.returncode == 1
    assert "--overwrite" in again.stderr.splitlines()[-1]
    script = Path(__file__).parents[1] / "scripts" / "convert_checkpoint.py"
    command = [sys.executable, script, "export", "--hf-model", tiny]
    command += ["--megatron-path", tmp_path / "m", "--hf-path", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert run("verify", tiny, tmp_path / "out").returncode == 0


@needs_megatron_checkpoints
def test_demo(tmp_path: Path) -> None:
    done = run("demo", "--folder", tmp_path / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("bit-identical")
    assert "DIFFERENT" not in done.stdout


def test_doctor() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    for name in ("megatron-bridge", "transformer-engine", "compressed-tensors"):
        row = next(line for line in done.stdout.splitlines() if name in line)
        assert " yes " in row
