"""What of the GPU check can be wrong without a GPU: its arithmetic, its report, its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kimi_bridge.checkpoint import CheckpointReader, synthesize_checkpoint, verify_checkpoints
from tests.gpu.check import divergence, report
from tests.gpu.check.command import parse
from tests.gpu.check.engine import Engine, EngineDied, EngineError
from tests.gpu.check.folders import copy_with_change, source_checkpoint
from tests.gpu.check.runner import STEPS, run
from tests.gpu.check.state import Check, Options, Row
from tests.gpu.check.trainer_types import Sampled, Scores

VOCABULARY = 50


def distributions(noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's and the trainer's log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, VOCABULARY, generator=generator, dtype=torch.float64)
    other = logits + noise * torch.randn(1, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1), other.log_softmax(-1)


def full_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_k3_estimates_the_kl() -> None:
    p, q = distributions(0.1)
    tokens = p.exp().multinomial(400_000, replacement=True, generator=torch.Generator().manual_seed(1))
    estimate = divergence.k3(p.gather(-1, tokens), q.gather(-1, tokens))
    assert (estimate >= 0).all()
    assert estimate.mean().item() == pytest.approx(full_kl(p, q), rel=0.03)
    assert divergence.k3(p, p).abs().max() == 0


def test_top_k_is_exact_for_all_but_one_and_a_lower_bound_for_fewer() -> None:
    p, q = distributions(0.3)
    bounds = []
    for k in (1, 5, 20, VOCABULARY - 1):
        ids = p.topk(k, -1).indices
        bounds.append(divergence.top_k_kl(p.gather(-1, ids), q.gather(-1, ids)).item())
    assert bounds == sorted(bounds)
    assert bounds[0] >= 0
    assert bounds[-1] == pytest.approx(full_kl(p, q), rel=1e-9)


def test_top_k_of_a_peaked_distribution_is_finite() -> None:
    logs = torch.tensor([[0.0, -40.0]])
    assert divergence.top_k_kl(logs, logs).abs().item() < 1e-12


def test_flips_are_counted_where_the_token_is_predicted() -> None:
    engine, trainer = distributions(0.1)
    n, p, t, layers, k = 2, 3, 2, 2, 4
    tokens = torch.tensor([[1, 2], [3, 4]])
    experts = torch.arange(k).expand(n, p + t - 1, layers, k).clone()
    sampled = Sampled(
        prompts=torch.zeros(n, p, dtype=torch.long),
        tokens=tokens,
        log_probabilities=engine[0][tokens],
        top_ids=torch.arange(5).expand(n, t, 5),
        top_log_probabilities=engine[0, :5].expand(n, t, 5),
        experts=experts.flip(-1),
    )
    other = experts.clone()
    # Sequence 0: a prompt token takes another expert; sequence 1: the token that predicts the last one does.
    other[0, 0, 1, 0] = 9
    other[1, 3, 0, 2] = 9
    scores = Scores(trainer.expand(n, p + t - 1, VOCABULARY), other)
    found = divergence.mismatch(sampled, scores)
    assert found.tokens == 4
    assert found.flips == 2 / (n * (p + t - 1) * layers)
    assert found.flipped_tokens == 1 / 4
    per_token = divergence.k3(engine[0][tokens], trainer[0][tokens])
    assert found.k3 == pytest.approx(per_token.mean().item())
    assert found.clean == pytest.approx(per_token[[0, 0, 1], [0, 1, 0]].mean().item())
    assert found.clean_context == pytest.approx(per_token[1, 0].item())
    assert found.entropy == pytest.approx(divergence.entropy(trainer).item())
    assert divergence.mismatch(sampled, Scores(scores.log_probabilities, None)).flips is None


def test_a_flipped_bit_of_a_scale_is_all_that_changes(tmp_path: Path) -> None:
    src = synthesize_checkpoint(tmp_path / "src")
    name = next(name for name in CheckpointReader(src).names() if name.endswith("_scale"))
    copy_with_change(src, tmp_path / "copy", name, byte=2)
    [difference] = verify_checkpoints(src, tmp_path / "copy").differences
    assert difference.name == name.removesuffix("_scale")
    assert "weight_scale has other bits" in difference.reason


def test_the_source_is_made_once(tmp_path: Path) -> None:
    arguments = {"layers": 2, "experts": 8, "vocabulary": 1280, "dense": 64, "small": True}
    first = source_checkpoint(tmp_path, **arguments)
    times = [path.stat().st_mtime_ns for path in first.iterdir()]
    source_checkpoint(tmp_path, **arguments)
    assert [path.stat().st_mtime_ns for path in first.iterdir()] == times
    source_checkpoint(tmp_path, **(arguments | {"layers": 3}))
    assert CheckpointReader(first).config.text_config.num_hidden_layers == 3


def test_steps_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).names == list(STEPS)
    assert parse(["--only", "load,dispatch"]).names == ["dispatch", "load"]
    assert parse(["--skip", "full"]).names == [name for name in STEPS if name != "full"]
    for wrong in (["--only", "lod"], ["--steps", "0"], ["--nproc", "3"]):
        with pytest.raises(SystemExit) as caught:
            parse(wrong)
        assert caught.value.code == 2
    assert "no such step: lod" in capsys.readouterr().err


def test_a_failed_step_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_check: Check, row: Row) -> None:
        row.figures["before"] = 1.5
        raise ValueError("no such thing | at all")

    def fine(check: Check, row: Row) -> None:
        row.expect(True, "not said")
        for step in (1, 2):
            for column, bar in (("QAT", True), ("not synced", False)):
                found = divergence.Mismatch(0.001 * step, 0.0005, 0.1, 6.0, 1024)
                check.record("LoRA", step, column, found, bar)

    monkeypatch.setitem(STEPS, "load", ("load INT4", broken))
    monkeypatch.setitem(STEPS, "forward", ("forward", fine))
    check = Check(Options(keep=tmp_path, layers=2, experts=8, vocabulary=1280, small=True))
    rows = run(check, ["load", "forward"])
    assert [row.passed for row in rows] == [True, False, True]
    report.print_tables(rows, check)
    report.write_json(tmp_path / "check.json", rows, check)
    report.write_markdown(tmp_path / "check.md", rows, check)
    content = json.loads((tmp_path / "check.json").read_text())
    assert not content["passed"]
    assert content["steps"][1]["failures"] == ["ValueError: no such thing | at all"]
    assert len(content["mismatch"]) == 4
    text = (tmp_path / "check.md").read_text()
    assert r"**ValueError: no such thing \| at all**" in text
    assert "| 2 | 0.00200 / 0.00050 | 0.00200 / 0.00050 |" in text
    assert "not synced *" in text


def engine(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose server is another program."""
    server = tmp_path / "server.py"
    server.write_text("import json, os, sys\n" + program)
    monkeypatch.setattr("tests.gpu.check.engine._SERVER", server)
    return Engine("lora", Options().engine_python or "python3", None, tmp_path, {})


ECHO = """
print(json.dumps({"ready": {"vllm": "1"}}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["command"] == "events":
        print(json.dumps({"event": "reading"}), flush=True)
        sys.stdin.readline()
    if command["command"] == "refuse":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
        continue
    print(json.dumps({"result": command}), flush=True)
"""


def test_the_death_of_an_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = engine(tmp_path, ECHO, monkeypatch)
    assert started.wait(30) == {"vllm": "1"}
    assert started.call("echo", value=3) == {"command": "echo", "value": 3}
    with pytest.raises(EngineError, match="engine lora, refuse: ValueError: no"):
        started.call("refuse")
    with pytest.raises(EngineDied, match="ended with signal 9 during events"):
        started.call("events", on_event=lambda _event: started.kill())
    with pytest.raises(EngineDied, match="signal 9 during echo"):
        started.call("echo")
    started.start()
    started.wait(30)
    assert started.call("echo")
    started.stop()


def test_an_engine_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = engine(tmp_path, "sys.exit('out of memory')", monkeypatch)
    with pytest.raises(EngineDied, match=r"exit code 1 during the start\nout of memory"):
        started.wait(30)
    silent = engine(tmp_path, "sys.stdin.read()", monkeypatch)
    with pytest.raises(TimeoutError, match="did not answer in time"):
        silent.wait(0.5)
    silent.stop()


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gpu.check import command

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so the check would run")
    assert command.main(["--only", "load"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
