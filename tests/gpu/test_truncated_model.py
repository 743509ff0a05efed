"""The steps of `scripts/gpu_check.py` under pytest: one run, a test for each step.

KIMI_BRIDGE_CHECK has further arguments of the script, such as "--checkpoint PATH --engine-python CMD".
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

pytest.importorskip("megatron.bridge", reason="needs the megatron extra")

from tests.gpu.check import report
from tests.gpu.check.command import parse
from tests.gpu.check.runner import STEPS, run
from tests.gpu.check.state import Check, Options, Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, Row]]:
    parsed = parse(["--time-limit", "1500", *shlex.split(os.environ.get("KIMI_BRIDGE_CHECK", ""))])
    check = Check(Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)}))
    try:
        done = run(check, parsed.names)
        report.print_tables(done, check)
        yield {row.name: row for row in done}
    finally:
        check.close()


@pytest.mark.parametrize("name", ["source", *STEPS])
def test_step(name: str, rows: dict[str, Row]) -> None:
    if name not in rows:
        pytest.skip("not asked for, or needs several GPUs (--nproc)")
    assert rows[name].passed, rows[name].failures
