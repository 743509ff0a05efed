"""The command `kimi-bridge`. Verbs on Hugging Face folders start at once; only import, export,
export-adapter and demo need Megatron."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

import kimi_bridge
from kimi_bridge.cli_convert import Json, Overwrite, Source, dequantize, merge_adapter, quantize, truncate
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.report import (
    check_plot,
    complain,
    out,
    plot_errors,
    print_inspection,
    print_report,
    say,
)

app = typer.Typer(
    name="kimi-bridge",
    help="Kimi K2.5 and Kimi-VL checkpoints into Megatron and back, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Size(StrEnum):
    tiny = "tiny"
    small = "small"


class Family(StrEnum):
    kimi_k25 = "kimi_k25"
    kimi_vl = "kimi_vl"


class Convention(StrEnum):
    kimi = "kimi"
    rtn = "rtn"
    mixed = "mixed"


class Reader(StrEnum):
    vllm = "vllm"
    peft = "peft"


class WeightDtype(StrEnum):
    int4 = "int4"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


HfModel = Annotated[str, typer.Option(help="Folder or hub id of the checkpoint that training starts from.")]
MegatronPath = Annotated[Path, typer.Option(help="Folder of the Megatron checkpoint.")]
Tp = Annotated[int, typer.Option(min=1, help="tensor_model_parallel_size")]
Pp = Annotated[int, typer.Option(min=1, help="pipeline_model_parallel_size")]
Ep = Annotated[int, typer.Option(min=1, help="expert_model_parallel_size")]
Etp = Annotated[int | None, typer.Option(min=1, help="expert_tensor_parallel_size (default: as --tp)")]
Vp = Annotated[int | None, typer.Option(min=1, help="virtual_pipeline_model_parallel_size")]


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 the job failed, 2 wrong usage, 130 interrupted."""
    # As an exception, so that what is half written goes: torchrun ends the other ranks with it.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except KimiBridgeError as error:
        # Under torchrun every rank raises an error that they share; one copy is enough.
        if os.environ.get("RANK", "0") == "0" or not getattr(error, "shared", False):
            complain(f"error: {error}")
        sys.exit(1)


def _quiet() -> None:
    """Megatron and what it imports warn of thirty things in a healthy run; their errors still show."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _terminate(_signal: int, _frame: object) -> None:
    sys.exit(143)


def _version(value: bool) -> None:
    if value:
        say(f"kimi-bridge {kimi_bridge.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Kimi K2.5 and Kimi-VL checkpoints into Megatron and back, bit for bit."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where to work.")] = Path(".demo"),
) -> None:
    """Shows the whole way on a tiny checkpoint: into Megatron on two processes, out of another layout.

    Compares every tensor bit for bit. About two minutes on two CPU cores, most of it Megatron's start-up.

    Example: kimi-bridge demo
    """
    from kimi_bridge.demo import run_demo

    if not run_demo(folder, out):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Says which versions are here, what works, what is missing and how to get it.

    Example: kimi-bridge doctor
    """
    from kimi_bridge.doctor import examine

    table = Table("", "version", "works", "note", title="kimi-bridge doctor")
    findings = examine()
    for finding in findings:
        works = "yes" if finding.works else ("no" if finding.needed else "-")
        table.add_row(finding.name, finding.version or "not installed", works, escape(finding.note))
    out.print(table)
    if any(finding.needed and not finding.works for finding in findings):
        raise typer.Exit(1)


@app.command()
def inspect(path: Annotated[str, typer.Argument(help="Folder or hub id.")], as_json: Json = False) -> None:
    """Describes a checkpoint from its config, index and headers, and a small sample of its INT4 codes.

    Example: kimi-bridge inspect moonshotai/Kimi-K2.5
    """
    from kimi_bridge.checkpoint import inspect_checkpoint, resolve_checkpoint

    inspection = inspect_checkpoint(resolve_checkpoint(path))
    if as_json:
        print(inspection.to_json())
    else:
        print_inspection(inspection)
    if inspection.problems:
        raise typer.Exit(1)


@app.command()
def synthesize(
    dst: Annotated[Path, typer.Argument(help="The folder to make.")],
    size: Annotated[
        Size, typer.Option(help="tiny: for a CPU, seconds. small: for a GPU and vLLM.")
    ] = Size.tiny,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    convention: Annotated[
        Convention, typer.Option(help="How the INT4 codes were made; mixed: groups that fit no convention.")
    ] = Convention.kimi,
    family: Annotated[
        Family, typer.Option(help="kimi_k25: INT4 experts. kimi_vl: bf16, without query compression.")
    ] = Family.kimi_k25,
) -> None:
    """Makes a small checkpoint with the real structure and random weights, for tests.

    Example: kimi-bridge synthesize ./tiny --size tiny --seed 1
    """
    from kimi_bridge.checkpoint import synthesize_checkpoint

    synthesize_checkpoint(dst, size=size.value, seed=seed, convention=convention.value, family=family.value)
    say(f"{dst}: written")


@app.command("import")
def import_(
    hf_model: HfModel,
    megatron_path: MegatronPath,
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    vp: Vp = None,
    overwrite: Overwrite = False,
) -> None:
    """Loads a Hugging Face checkpoint into Megatron and saves a Megatron checkpoint, for any later layout.

    Example: torchrun --nproc_per_node 8 -m kimi_bridge import --hf-model moonshotai/Kimi-K2.5
    --megatron-path ./k25-megatron --ep 8
    """
    _quiet()
    from kimi_bridge.megatron.jobs import import_checkpoint
    from kimi_bridge.megatron.runtime import Layout

    import_checkpoint(hf_model, megatron_path, Layout(tp, pp, ep, etp, vp), overwrite)
    _say(f"{megatron_path}: written")


@app.command()
def export(
    hf_model: HfModel,
    megatron_path: MegatronPath,
    hf_path: Annotated[Path, typer.Option(help="The Hugging Face folder to make.")],
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    vp: Vp = None,
    weight_dtype: Annotated[
        WeightDtype, typer.Option(help="int4: as --hf-model has it. Others: plain tensors.")
    ] = WeightDtype.int4,
    overwrite: Overwrite = False,
) -> None:
    """Writes a Megatron checkpoint as a Hugging Face folder that serves.

    What training did not change comes out with the bits of --hf-model.

    Example: torchrun --nproc_per_node 8 -m kimi_bridge export --hf-model moonshotai/Kimi-K2.5
    --megatron-path ./k25-megatron --hf-path ./k25-out --tp 4 --ep 2
    """
    _quiet()
    import torch

    from kimi_bridge.megatron.jobs import export_megatron_checkpoint
    from kimi_bridge.megatron.runtime import Layout

    dtype = None if weight_dtype is WeightDtype.int4 else getattr(torch, weight_dtype.value)
    layout = Layout(tp, pp, ep, etp, vp)
    export_megatron_checkpoint(hf_model, megatron_path, hf_path, layout, dtype, overwrite)
    _say(f"{hf_path}: written")


@app.command()
def export_adapter(
    hf_model: HfModel,
    megatron_path: MegatronPath,
    adapter_path: Annotated[Path, typer.Option(help="The PEFT folder to make.")],
    reader: Annotated[
        Reader,
        typer.Option(
            "--for",
            help="vllm: each module's scale folded into lora_B, lora_alpha == r. peft: scales as patterns.",
        ),
    ] = Reader.vllm,
    expand_shared_experts: Annotated[
        bool, typer.Option(help="Of share_expert_adapters=True: per expert, for any EP size.")
    ] = False,
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    vp: Vp = None,
    overwrite: Overwrite = False,
) -> None:
    """Writes the LoRA of a Megatron-Bridge PEFT checkpoint as an adapter that vLLM and PEFT load.

    Example: torchrun --nproc_per_node 8 -m kimi_bridge export-adapter --hf-model moonshotai/Kimi-K2.5
    --megatron-path ./lora-run/checkpoints --adapter-path ./adapter --ep 8
    """
    _quiet()
    from kimi_bridge.megatron.jobs import export_adapter_checkpoint
    from kimi_bridge.megatron.runtime import Layout

    layout = Layout(tp, pp, ep, etp, vp)
    plan = export_adapter_checkpoint(
        hf_model, megatron_path, adapter_path, layout, reader.value, expand_shared_experts, overwrite
    )
    _say(f"{adapter_path}: written")
    if "expert_adapters" in plan.notes:
        size = plan.notes["expert_model_parallel_size"]
        _say(
            f"It holds {plan.notes['expert_adapters']}, of {size} EP ranks, and loads into such models at EP"
            f" {size} alone; --expand-shared-experts makes one that is per expert."
        )


for _verb in (dequantize, quantize, truncate, merge_adapter):
    app.command()(_verb)


@app.command()
def verify(
    a: Source,
    b: Source,
    plot: Annotated[Path | None, typer.Option(help="Draw the error by layer into this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Compares two checkpoints bit for bit, tensor by tensor. Exit code 1 when they differ.

    Example: kimi-bridge verify moonshotai/Kimi-K2.5 ./k25-out
    """
    from kimi_bridge.checkpoint import resolve_checkpoint, verify_checkpoints
    from kimi_bridge.progress import progress

    if plot is not None:
        check_plot(plot)
    with progress("Comparing") as advance:
        report = verify_checkpoints(resolve_checkpoint(a), resolve_checkpoint(b), progress=advance)
    if plot is not None:
        plot_errors(report, plot)
    if as_json:
        print(report.to_json())
    else:
        print_report(report)
    if not report.identical:
        raise typer.Exit(1)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say(text)
