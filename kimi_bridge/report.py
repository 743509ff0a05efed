"""What the command line prints: tables, summaries, and the plot of verify."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kimi_bridge.errors import KimiBridgeError

if TYPE_CHECKING:
    from kimi_bridge.adapter import MergeSummary
    from kimi_bridge.checkpoint import Inspection, Report, Summary
    from kimi_bridge.checkpoint.convert_plan import Plan
    from kimi_bridge.checkpoint.verify import Difference

_LINES_SHOWN = 10

out = Console()
err = Console(stderr=True)


def say(text: str) -> None:
    """One line on stdout, as it is."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def complain(text: str) -> None:
    """One line on stderr, in red. What cannot be printed, names in a damaged file say, is escaped."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    err.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def print_report(report: Report) -> None:
    """What verify found; the worst differences first."""
    table = Table("kind", "tensors", "identical", "bytes", "largest difference", "SQNR dB")
    for row in report.rows:
        noise = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
        largest = f"{row.largest_difference:.3g}" if row.largest_difference else ""
        table.add_row(row.kind, f"{row.count:,}", f"{row.identical:,}", f"{row.bytes:,}", largest, noise)
    out.print(table)
    for title, lines in (
        ("different", [_describe(difference) for difference in sorted(report.differences, key=_badness)]),
        (f"only in {report.a}", report.missing),
        (f"only in {report.b}", report.extra),
    ):
        for line in lines[:_LINES_SHOWN]:
            say(f"{title}: {line}")
        if len(lines) > _LINES_SHOWN:
            say(f"{title}: {len(lines) - _LINES_SHOWN} more (--json lists all)")
    say(f"config.json: {report.config}")
    say("identical" if report.identical else "DIFFERENT")


def _badness(difference: Difference) -> tuple[bool, float, float]:
    """What cannot be compared first, then the worst ratio of signal to noise, then the largest difference."""
    sqnr = math.inf if difference.sqnr_db is None else difference.sqnr_db
    return difference.largest_difference is not None, sqnr, -(difference.largest_difference or 0.0)


def _describe(difference: Difference) -> str:
    text = f"{difference.name}: {difference.reason}"
    if difference.largest_difference is not None:
        text += f"; largest difference {difference.largest_difference:.3g}"
    if difference.sqnr_db is not None:
        text += f", SQNR {difference.sqnr_db:.1f} dB"
    return text


def check_plot(path: Path) -> None:
    """Raises KimiBridgeError where plot_errors could not draw: before a comparison that takes an hour."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KimiBridgeError(
            "matplotlib is not installed: pip install 'kimi-megatron-bridge[plot]', or leave out --plot."
        ) from error
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise KimiBridgeError(f"{path} cannot be written: give a file in a folder that exists.")


def plot_errors(report: Report, path: Path) -> None:
    """Draws the largest difference and the relative noise by layer, with a line for each kind of tensor."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for kind in dict.fromkeys(row.kind for row in report.layers):
        rows = sorted((row for row in report.layers if row.kind == kind), key=lambda row: row.layer)
        layers = [row.layer for row in rows]
        above.plot(layers, [row.largest_difference for row in rows], marker=".", label=kind)
        relative = [math.sqrt(row.noise / row.signal) if row.signal else 0.0 for row in rows]
        below.plot(layers, relative, marker=".", label=kind)
    above.set_title(f"{report.a} against {report.b}", fontsize="small")
    above.set_ylabel("largest difference")
    below.set_ylabel("noise / signal")
    below.set_xlabel("layer")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    if report.layers:
        above.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise KimiBridgeError(f"{path} cannot be written ({error}): give another file name.") from error


def print_inspection(inspection: Inspection) -> None:
    """What inspect found; problems on stderr."""
    for key, value in {**inspection.model, **inspection.quantization}.items():
        say(f"{key:>24}  {value}")
    table = Table("kind", "tensors", "bytes")
    for count in inspection.kinds:
        table.add_row(count.kind, f"{count.tensors:,}", f"{count.bytes:,}")
    table.add_row("all", f"{inspection.tensors:,}", f"{inspection.bytes:,}")
    out.print(table)
    seen = inspection.convention
    say(f"INT4 convention: {seen.verdict}")
    if seen.groups:
        say(
            f"  sample: {seen.groups:,} groups of {seen.weights} weights, {seen.zero_groups:,} more are zero;"
            f" {seen.kimi_share:.1%} come back from /7, {seen.rtn_share:.1%} from /7.5;"
            f" {seen.minus_8_share:.1%} hold code -8, {seen.below_7_share:.1%} no code of 7"
        )
    for problem in inspection.problems:
        complain(f"problem: {problem}")


def print_plan(plan: Plan, dst: Path) -> None:
    """What a conversion would do."""
    largest = max(plan.layout(filename)[2] for filename in plan.shards)
    say(f"{plan.verb} {plan.src} -> {dst}")
    say(f"  reads   {plan.source_bytes:,} bytes")
    say(f"  writes  {plan.nbytes:,} bytes in {plan.tensors:,} tensors, {plan.int4_weights:,} weights by INT4")
    say(f"  shards  {len(plan.shards):,}, the largest {largest:,} bytes")
    text = plan.config.get("text_config", {})
    keys = ("num_hidden_layers", "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok")
    say("  config  " + ", ".join(f"{key} {text[key]}" for key in keys if key in text))


def print_summary(summary: Summary) -> None:
    """What a conversion did; the weights with the most groups that are no fixed point by name."""
    resumed = f", {summary.resumed_shards} of them by an earlier run" if summary.resumed_shards else ""
    say(
        f"{summary.dst}: {summary.tensors:,} tensors, {summary.bytes:,} bytes in {summary.shards} shards"
        f"{resumed}; {summary.seconds:.1f} s, {summary.gb_per_second:.2f} GB/s"
    )
    if not summary.verified:
        say("not verified")
        return
    if not summary.int4_weights:
        return
    say(
        f"verified {summary.int4_weights:,} INT4 weights: {summary.loose_groups:,} of {summary.groups:,} "
        "groups are no fixed point of the scheme"
    )
    for name, loose, groups in summary.worst:
        say(f"  {name}: {loose:,} of {groups:,}")
    if summary.loose_groups:
        say("  quantizing their values gives other bits: keep the INT4 checkpoint, for --reference")


def print_merge(summary: MergeSummary) -> None:
    """What a merge did, and how well its result holds the update, by kind of weight."""
    print_summary(summary)
    if not summary.kinds:
        return
    table = Table("merged", "weights", "SNR dB", "SNR of the update dB", "groups", "changed")
    for entry in summary.kinds:
        ratios = ["" if ratio is None else f"{ratio:.1f}" for ratio in (entry.snr_db, entry.update_snr_db)]
        groups = [f"{entry.groups:,}", f"{entry.changed_groups:,}"] if entry.groups else ["", ""]
        table.add_row(entry.kind, f"{entry.weights:,}", *ratios, *groups)
    out.print(table)
