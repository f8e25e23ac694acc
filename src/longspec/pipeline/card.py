"""A plan, a finished draft's figures and its card as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from longspec.bench.acceptance import MEASURED
from longspec.bench.report import table
from longspec.bench.summary import ALL, Figures
from longspec.data.records import read_records
from longspec.models.placement import gigabytes
from longspec.pipeline.plan import Plan
from longspec.train.samples import COVERAGE


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan_text(plan: Plan) -> str:
    device = plan.device
    writes = "answers prompts" if plan.has_template else "continues texts, because it has no chat template"
    layers = f"the KV of {plan.num_cross_layers} layers, chosen by measurement"
    if plan.cross_layers is not None:
        layers = f"the KV of layers {', '.join(map(str, plan.cross_layers))}"
    lines = [
        f"Plan of a draft for {plan.target} on {device.name} ({gigabytes(device.free_memory)} free)",
        "",
        f"The target {writes}: {plan.tokens:,} tokens",
        *(
            f"  {one.name:15} {one.tokens:>13,} tokens of {one.seq_length:>7,} a sequence, "
            f"about {duration(one.seconds)}"
            for one in plan.written
        ),
        "",
        f"The draft has {plan.draft_parameters / 1e6:,.1f} million parameters and reads {layers}; "
        f"lags 1 to {plan.max_lag}, window {plan.window}, "
        f"vocabulary for {COVERAGE:.0%} of the written tokens",
        *(
            f"  stage {stage.name:9} {stage.tokens:>13,} tokens in {stage.steps:,} steps of {stage.batch} x "
            f"{stage.seq_length:,} ({stage.micro_batch} at a time), learning rate {stage.lr:g}, "
            f"about {duration(stage.seconds)}"
            for stage in plan.stages
        ),
        "",
        f"Measured by decoding, answers of up to {plan.max_new_tokens} tokens",
        f"Cost: {'at most' if plan.is_limited else 'about'} {duration(plan.seconds)}, "
        f"{gigabytes(plan.memory)} of memory, {gigabytes(plan.disk)} of disk",
    ]
    return "\n".join(lines)


def result_text(figures: Sequence[Figures], target: str, output: Path) -> str:
    """tau for every kind of prompt, and the commands that use the draft."""
    methods = list(dict.fromkeys(one.method for one in figures if one.method != "vanilla"))
    names = list(dict.fromkeys(one.name for one in figures))
    found = {(one.name, one.method): one for one in figures}
    rows = []
    for name in names:
        taus = [found[name, method].tau if (name, method) in found else None for method in methods]
        cells = ["-" if tau is None else f"{tau:.2f}" for tau in taus]
        rows.append([name.replace(f"/{ALL}", ", all"), *cells])
    arguments = f"--target {shlex.quote(target)} --draft {shlex.quote(str(output))}"
    return "\n".join(
        [
            "tau, by real decoding at temperature 0:",
            "",
            table(["prompts", *methods], rows),
            "",
            f'longspec generate {arguments} "Why is the sky blue?"',
            f"longspec serve {arguments}",
        ]
    )


def with_given(card: str, documents: Path) -> str:
    """A draft's card that also lists what the target was given to quote and to continue."""
    counts: dict[tuple[str, str], list[int]] = {}
    for _, record in read_records([str(documents)]):
        count = counts.setdefault((record["source"], record["licence"]), [0, 0])
        count[0] += 1
        count[1] += len(record["text"])
    rows = [[*names, f"{number:,}", f"{size:,}"] for names, (number, size) in sorted(counts.items())]
    head, measured, rest = card.partition(f"\n{MEASURED}")
    given = table(["source", "licence", "documents", "characters"], rows)
    head = head.partition("\n## Given")[0].rstrip()
    about = "What the target was given to quote, to summarise and to continue; the draft learns what it said:"
    return f"{head}\n\n## Given\n\n{about}\n\n{given}\n{measured}{rest}"
