"""Which draft, which objective, which optimizer: SmolLM2 drafts of equal training tokens, by real decoding.

The datasets are those that `recipes.smollm2.train write` leaves in OUTPUT/data. On one GPU:
  .venv/bin/python -m recipes.smollm2.ablate --data outputs/smollm2/data --output outputs/ablation \
      --prompts alpaca.jsonl humaneval.jsonl summaries.jsonl --steps 192 --jobs 3

Each variant differs from the first one in what its line says. Prompts are answered greedily, as one batch, up
to 256 tokens; tau is that of a chain of 4 and of a tree of 64 nodes, 5 deep. The table is printed last, and
is in OUTPUT/table.md; a variant that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspec import LongSpec
    from longspec.options import Options

GLIDE = (
    "draft.cross_layers=[29]",
    "draft.use_feature=false",
    "draft.qkv_bias=true",
    "draft.final_norm=false",
)
# What all but their own lines share; the experiment itself is what ships.
BASIS = (
    "draft.cross_layers=[9,19,29]",
    "draft.max_lag=8",
    "draft.draft_vocab=32768",
    "draft.lag_gate=false",
    "stage.lag_decay=1",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "as it ships": (
        "draft.cross_layers=[9,14,19,24,29]",
        "draft.max_lag=6",
        "draft.draft_vocab=16384",
        "draft.lag_gate=true",
        "stage.lag_decay=0.7",
    ),
    "GLIDE as published": GLIDE,
    "GLIDE, three layers' KV": (*GLIDE, "draft.cross_layers=[9,19,29]"),
    "GLIDE, hidden state": (*GLIDE, "draft.use_feature=true"),
    "five layers' KV": ("draft.cross_layers=[9,14,19,24,29]",),
    "feed-forward of 2560": ("draft.intermediate_size=2560",),
    "window 128": ("draft.window=128",),
    "lags up to 5": ("draft.max_lag=5",),
    "told how far it lags": ("draft.lag_gate=true",),
    "small lags more often": ("stage.lag_decay=0.7",),
    "AdamW": ("stage.optimizer=adamw",),
    "cross-entropy": ("stage.soft=0",),
    "half the rate": ("stage.lr=1e-3",),
    "twice the rate": ("stage.lr=4e-3",),
    "questions learnt too": ("stage.mask_prompt=false",),
    "two lags a sequence": ("stage.lags=2",),
}
# The vocabulary is cut when the draft is used: it is stored with the most frequent tokens first.
CUTS = (16384, 8192)
METHODS: dict[str, Options] = {
    "chain of 4": {"method": "seq", "gamma": 4},
    # No deeper than the shallowest draft was trained for.
    "tree of 64": {"method": "tree", "tree_shape": (8, 16, 16, 16, 16), "max_nodes": 64},
}


def folder_of(flags: argparse.Namespace, name: str) -> Path:
    """Where a variant's run is."""
    folder: Path = flags.output / name.replace(" ", "-").replace("'", "").replace(",", "")
    return folder


def train(flags: argparse.Namespace, name: str) -> subprocess.Popen[bytes] | None:
    """Set the training of a variant going; None where it is done."""
    run = folder_of(flags, name)
    if (run / "base" / "checkpoints" / f"step-{flags.steps:08d}").is_dir():
        return None
    own = [f"run={run}", "resume=latest", f"target.path={flags.target}", f"target.device={flags.device}"]
    own += [f"stage.num_steps={flags.steps}", "evaluation.every=0", "saving.save_steps=1000000"]
    command = [sys.executable, "-m", "longspec", "train", "--only", "base", "experiment=smollm2_gpu"]
    command += ["stage=all", "stage.lags=1", *own, *BASIS, *flags.set, *VARIANTS[name]]
    environment = os.environ | {"SMOLLM2_DATA": str(flags.data.resolve())}
    with open(flags.output / f"{run.name}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def decode(flags: argparse.Namespace, plain: LongSpec, name: str, cut: int = 0) -> dict[str, object]:
    """tau of a variant's draft, for the target of `plain`, on each file and by each method."""
    from longspec.api import LongSpec
    from longspec.bench.workloads import read_file
    from longspec.engine.load import prepare_draft
    from longspec.engine.make import make_engine
    from longspec.hub import resolve_draft
    from longspec.models.draft import DraftHead
    from longspec.models.draft_files import load_draft
    from longspec.train.checkpoints import draft_of

    path = resolve_draft(draft_of(str(folder_of(flags, name) / "base")))
    target = plain.target
    draft, head = prepare_draft(load_draft(path, target, plain.name).draft, target)
    if cut:
        assert head.vocab_ids is not None
        head = DraftHead(target, head.vocab_ids[:cut])
    engine = make_engine(target, draft, head)
    model = LongSpec(engine, plain.encoder, plain.name, plain.defaults, plain.eos_ids, name)
    asked = {Path(path).stem: read_file(Path(path)).items[: flags.limit] for path in flags.prompts}
    prompts = [item.prompt(model, []) for items in asked.values() for item in items]
    row: dict[str, object] = {"variant": f"vocabulary of {cut}" if cut else name}
    for method, options in METHODS.items():
        asking: Options = {**options, "max_new_tokens": flags.new_tokens, "temperature": 0.0}
        answers = iter(model.generate(prompts, **asking))
        for file, items in asked.items():
            found = [next(answers) for _ in items]
            row[f"{file}, {method}"] = sum(one.tokens - 1 for one in found) / sum(one.rounds for one in found)
    return row


def as_table(rows: list[dict[str, object]]) -> str:
    """As markdown."""
    from longspec.bench.report import table

    cells = [[f"{one:.2f}" if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    return table(list(rows[0]), cells)


def main() -> int:
    """Train all, decode with all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the written datasets")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="everything goes there")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="JSONL to decode on")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="prompts a file (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=192, metavar="N", help="of training (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at the same time (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="for all variants")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name in flags.only:
        while sum(process.poll() is None for process in running.values()) >= flags.jobs:
            time.sleep(0.1)
        process = train(flags, name)
        if process is not None:
            running[name] = process
    failed = [name for name, process in running.items() if process.wait()]
    print(f"failed, see the .log files: {failed}" if failed else "all are trained", flush=True)
    wanted = [(name, 0) for name in flags.only if name not in failed]
    wanted += [(name, cut) for name, _ in wanted[:1] for cut in CUTS]
    # Not before: the trainings need not wait for it.
    from longspec import LongSpec

    rows = []
    # Of its own engine only the encoder and the target are used: it is as small as can be.
    plain = LongSpec.from_pretrained(
        flags.target, draft="none", device=flags.device, max_length=16, max_rows=1, calibrate=False
    )
    for name, cut in wanted:
        rows.append(decode(flags, plain, name, cut))
        print(json.dumps(rows[-1]), flush=True)
        (flags.output / "table.md").write_text(as_table(rows) + "\n", encoding="utf-8")
    print(as_table(rows) if rows else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
