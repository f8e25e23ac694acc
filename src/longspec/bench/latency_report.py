"""The costs of steps and rounds as text, as JSON and as a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longspec.bench.environment import command_line, machine
from longspec.bench.latency import Latencies, Latency, Mode
from longspec.bench.markdown import spread, table
from longspec.errors import UserError
from longspec.models.files import write_whole
from longspec.models.placement import gigabytes


def to_json(run: Latencies, tau: float | None) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "command": command_line(),
        "environment": machine(run.device, run.dtype),
        "setting": asdict(run.setting),
        "replays": run.replays,
        "bandwidth": run.bandwidth,
        "lines": [_line_to_json(line, tau) for line in run.lines],
        "missing": [asdict(one) for one in run.missing],
    }


def _line_to_json(line: Latency, tau: float | None) -> dict[str, Any]:
    values = asdict(line) | {
        "share_of_floor": line.share,
        "memory_beyond_weights_and_kv": line.beyond,
        "sampling_costs": line.sampling_costs,
    }
    for name, mode in _modes(line):
        values[name] |= _speeds(line, mode, tau)
    return values


def _modes(line: Latency) -> list[tuple[str, Mode]]:
    return [("greedy", line.greedy)] + ([("sampled", line.sampled)] if line.sampled else [])


def _speeds(line: Latency, mode: Mode, tau: float | None) -> dict[str, float]:
    """All rows together, per second: vanilla's tokens, the tree's rounds, and its tokens at `tau`."""
    rounds = 1e3 * line.batch / mode.round.median
    speeds = {"vanilla_tokens_per_second": 1e3 * line.batch / mode.step.median, "rounds_per_second": rounds}
    return speeds if tau is None else speeds | {"tree_tokens_per_second": tau * rounds}


def report(run: Latencies, tau: float | None = None) -> str:
    """Everything, for people, as markdown."""
    setting = run.setting
    facts = machine(run.device, run.dtype).items()
    how = "captured and replayed" if run.replays else "run by the host"
    parts = [
        f"`{command_line()}`",
        ", ".join(f"{name} {value}" for name, value in facts if value is not None),
        f"Shape {setting.shape} with random weights and KV; rounds {how}; vanilla and tree by turns, "
        f"{setting.rounds} rounds at a time, median of {setting.repeats} (least to most). The floor reads "
        f"weights and KV once, at the {run.bandwidth / 1e9:,.1f} GB/s of a large copy.",
    ]
    if run.lines:
        parts += [_cost_table(run.lines, tau), _memory_table(run.lines), _ring(run.lines)]
        if run.device.type == "cpu":
            parts.append("The peak is that of the whole process.")
    if setting.sampling is not None:
        settings = f"temperature {setting.sampling.temperature:g}, top-p {setting.sampling.top_p:g}"
        parts.append(f"Sampled: {settings}; *more*: how much longer its round takes than greedy's.")
    parts += [f"Context {one.context:,}, batch {one.batch}: {one.why}." for one in run.missing]
    return "\n\n".join(parts) + "\n"


def _cost_table(lines: Sequence[Latency], tau: float | None) -> str:
    header = ["context", "batch", "tree", "nodes", "choice", "step ms", "of the floor", "tokens/s"]
    header += ["round ms", "rounds/s", "round / step", "more"]
    header += [] if tau is None else [f"tokens/s at tau {tau:g}"]
    rows = []
    for line in lines:
        for name, mode in _modes(line):
            speeds = list(_speeds(line, mode, tau).values())
            more = line.sampling_costs if name == "sampled" else None
            rows.append(
                [
                    *(f"{line.context:,}", str(line.batch)),
                    *(",".join(map(str, line.tree_shape)), str(line.nodes), name),
                    *(spread(mode.step, 3), f"{line.floor / mode.step.median:.2f}", f"{speeds[0]:,.0f}"),
                    *(spread(mode.round, 3), f"{speeds[1]:,.0f}", spread(mode.ratio)),
                    "-" if more is None else f"{more:+.0%}",
                    *(f"{speed:,.0f}" for speed in speeds[2:]),
                ]
            )
    return table(header, rows)


def _memory_table(lines: Sequence[Latency]) -> str:
    header = ("context", "batch", "weights", "KV", "draft weights", "draft KV a row", "peak", "beyond")
    rows = [
        [
            *(f"{line.context:,}", str(line.batch), gigabytes(line.weights_bytes), gigabytes(line.kv_bytes)),
            *(gigabytes(line.draft_weights_bytes), f"{line.draft_kv_bytes:,} bytes"),
            *(gigabytes(line.peak_memory), gigabytes(line.beyond)),
        ]
        for line in lines
    ]
    return table(header, rows)


def _ring(lines: Sequence[Latency]) -> str:
    """What the draft's constant memory comes to. Its size follows the tree, so trees are told apart."""
    sizes = {(line.tree_shape, line.draft_kv_bytes) for line in lines}
    same = len(sizes) == len({shape for shape, _ in sizes})
    about = "the same at every context and batch" if same else "NOT the same at every context and batch"
    return f"The draft's KV of a row is {about}; *beyond* is the peak without the target's weights and KV."


def write_report(run: Latencies, folder: Path, tau: float | None) -> None:
    """Put latency.json, latency.md and, where matplotlib is there, latency.png into a folder."""
    files = {
        "latency.json": json.dumps(to_json(run, tau), indent=1).encode() + b"\n",
        "latency.md": report(run, tau).encode(),
    }
    if run.lines and find_spec("matplotlib") is not None:
        files["latency.png"] = draw(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(folder / name, data)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def draw(run: Latencies) -> bytes:
    """Milliseconds and ratio by context, as a PNG picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    for index, batch in enumerate(run.setting.batches):
        own = [line for line in run.lines if line.batch == batch]
        contexts = [line.context for line in own]
        style = {"color": f"C{index}", "marker": "o"}
        times.plot(contexts, [one.greedy.round.median for one in own], label=f"round, batch {batch}", **style)
        steps = [one.greedy.step.median for one in own]
        times.plot(contexts, steps, linestyle="--", label=f"vanilla step, batch {batch}", **style)
        floors = [one.floor for one in own]
        times.plot(contexts, floors, linestyle=":", label=f"floor, batch {batch}", **style)
        ratio = [one.greedy.ratio.median for one in own]
        ratios.plot(contexts, ratio, label=f"greedy, batch {batch}", **style)
        if run.setting.sampling is not None:
            ratio = [one.sampled.ratio.median for one in own if one.sampled]
            ratios.plot(contexts, ratio, linestyle="--", label=f"sampled, batch {batch}", **style)
    times.set(ylabel="milliseconds", yscale="log", title=f"{run.setting.shape}, {run.device}")
    ratios.set(ylabel="round / vanilla step", ylim=(0, None))
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    buffer = io.BytesIO()
    # Without the version of matplotlib, the same figures give the same bytes.
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()
