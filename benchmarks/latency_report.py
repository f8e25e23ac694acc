"""What `benchmarks.latency` measured: JSON, Markdown and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.latency import Latencies, Latency
from longspec.atomic import write_whole
from longspec.bench.environment import command_line, machine
from longspec.bench.plots import can_draw, canvas_of, to_png
from longspec.bench.report import repeats_text, spread, table
from longspec.errors import UserError
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
        "share_of_floor": line.floor / line.greedy.step.median,
        "memory_beyond_weights_and_kv": line.beyond,
        "sampling_costs": line.sampling_costs,
    }
    for name, mode in line.modes.items():
        values[name] |= line.speeds(mode, tau)
    return values


def write_report(run: Latencies, folder: Path, tau: float | None) -> None:
    """Put latency.json, latency.md and, where matplotlib is there, latency.png into a folder."""
    files = {
        "latency.json": json.dumps(to_json(run, tau), indent=1).encode() + b"\n",
        "latency.md": latency_markdown(run, tau).encode(),
    }
    if run.lines and can_draw():
        files["latency.png"] = draw_latency(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(folder / name, data)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def latency_markdown(run: Latencies, tau: float | None = None) -> str:
    """The costs of steps and rounds."""
    setting = run.setting
    facts = machine(run.device, run.dtype).items()
    how = "captured and replayed" if run.replays else "run by the host"
    parts = [
        f"`{command_line()}`",
        ", ".join(f"{name} {value}" for name, value in facts if value is not None),
        f"Shape {setting.shape} with random weights and KV; rounds {how}; vanilla and tree by turns, "
        f"{setting.rounds} rounds at a time, {repeats_text(setting.repeats)}. The floor reads weights and KV "
        f"once, at the {run.bandwidth / 1e9:,.1f} GB/s of a large copy.",
    ]
    if run.lines:
        parts += [_cost_table(run.lines, tau), _memory_table(run.lines), _ring_text(run.lines)]
        if run.device.type == "cpu":
            parts.append("The peak is that of the whole process.")
    if setting.sampling is not None:
        sampling = f"temperature {setting.sampling.temperature:g}, top-p {setting.sampling.top_p:g}"
        parts.append(f"Sampled: {sampling}; *more*: how much longer its round takes than greedy's.")
    parts += [f"Context {one.context:,}, batch {one.batch}: {one.why}." for one in run.missing]
    return "\n\n".join(parts) + "\n"


def _cost_table(lines: Sequence[Latency], tau: float | None) -> str:
    header = ["context", "batch", "tree", "nodes", "choice", "step ms", "of the floor", "tokens/s"]
    header += ["round ms", "rounds/s", "round / step", "more"]
    header += [] if tau is None else [f"tokens/s at tau {tau:g}"]
    rows = []
    for line in lines:
        for name, mode in line.modes.items():
            speeds = [f"{speed:,.0f}" for speed in line.speeds(mode, tau).values()]
            more = line.sampling_costs if name == "sampled" else None
            tree = ",".join(map(str, line.tree_shape))
            rows.append(
                [
                    *(f"{line.context:,}", str(line.batch), tree, str(line.nodes), name),
                    *(spread(mode.step, 3), f"{line.floor / mode.step.median:.2f}", speeds[0]),
                    *(spread(mode.round, 3), speeds[1], spread(mode.ratio)),
                    *("-" if more is None else f"{more:+.0%}", *speeds[2:]),
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


def _ring_text(lines: Sequence[Latency]) -> str:
    """What the draft's constant memory comes to. Its size follows the tree, so trees are told apart."""
    sizes = {(line.tree_shape, line.draft_kv_bytes) for line in lines}
    same = len(sizes) == len({shape for shape, _ in sizes})
    about = "the same at every context and batch" if same else "NOT the same at every context and batch"
    return f"The draft's KV of a row is {about}; *beyond* is the peak without the target's weights and KV."


def draw_latency(run: Latencies) -> bytes:
    """Milliseconds and ratio of steps and rounds by context."""
    canvas = canvas_of(11, 4)
    times, ratios = canvas.subplots(1, 2)
    for number, batch in enumerate(run.setting.batches):
        own = [line for line in run.lines if line.batch == batch]
        contexts = [line.context for line in own]
        style = {"color": f"C{number}", "marker": "o"}
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
    return to_png(canvas)
