"""Make the draft of SmolLM2-135M from nothing: prompts, the target's own text, three stages, measurements.

On one GPU, everything in a row:
  .venv/bin/python -m recipes.smollm2.train all --output outputs/smollm2 --books books.jsonl.xz \
      --measure alpaca.jsonl humaneval.jsonl summaries.jsonl --measure-long meetings.jsonl

On a machine that is lent for a while, part by part; each goes on where it was, and is passed over when done:
  python -m recipes.smollm2.train mix ... && python -m recipes.smollm2.train write --budget-seconds 500 ...
  python -m recipes.smollm2.train base --budget-seconds 500 ...

A dry run on a CPU, in minutes (the draft is of no use):
  .venv/bin/python -m recipes.smollm2.train all --output outputs/dry --books books.jsonl.xz \
      --tokens 2k --device cpu --dry

parts: mix      documents and prompts, without what is in the files of --measure and --held-out
       write    the target answers the prompts and continues the documents, at temperatures 0, 0.3 and 0.7
       base     stage 1: 1,024 tokens, offsets long     stage 2: 8,192 tokens
       answers  stage 3: long answers         finish   tau by real decoding, acceptance table, card

Only the draft needs to travel between machines: --start-from FOLDER begins a stage with a draft that is there
(each stage leaves one in OUTPUT/drafts), and another --seed makes other data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from longspec.cli.synthesize import amount

# The stage that trains in each of these parts, and the length of its sequences.
STAGES = {"base": ("base", "short"), "long": ("long", "long"), "answers": ("cot", "middle")}
PARTS = ("mix", "write", *STAGES, "finish")
# Sources to quote and to continue, of those that are installed; all under permissive licences.
PACKAGES = (
    *("stdlib", "numpy", "scipy", "pandas", "networkx", "sympy", "torch", "transformers", "huggingface_hub"),
    *("requests", "httpx", "jinja2", "click", "rich", "pydantic", "pytest", "werkzeug", "pip", "setuptools"),
)
# Not 1: what so small a target then says is noise, long, and like nothing that it says when it is used.
TEMPERATURES = "0,0.3,0.7"
SHARD_TOKENS = {"short": 8192 * 1024, "middle": 2048 * 1024, "long": 2048 * 1024}
LARGEST = 16_000_000
# Measured: the published shape; a wide and deep tree cut to 64 nodes, without and with copying; a chain.
METHODS = "tree:4x16x16x16x16,tree:8x16x16x16x16x16@64,tree:8x16x16x16x16x16@64+12,seq:4"
# Pages of so many books stay out of training, to measure long contexts on.
HELD_BOOKS, HELD_CHARACTERS = 10, 45_000
# What ships; the rest of an exported draft is for other programs.
SHIPPED = ("config.json", "model.safetensors", "README.md", "training.yaml")


@dataclass(frozen=True)
class Written:
    """A dataset that the target writes."""

    name: str
    share: float
    """Of all tokens that are written."""
    mode: str
    length: str
    """short, middle or long."""
    new: float
    """The longest answer, as a share of the length."""
    given: float = 0.0
    """How much of a document is given, as a share of the length."""
    seed: int = 0
    """Added to --seed, so that of two that are asked the same each answers otherwise."""


DATASETS = (
    # Those of long sequences come first: a budget that runs out costs the large ones least.
    Written("long_asked", 0.08, "prompts", "long", 0.0625),
    Written("long_continued", 0.08, "documents", "long", 0.125, 0.7),
    Written("essays", 0.04, "prompts", "middle", 0.375),
    # So that the last stage is not of long answers alone.
    Written("mixed", 0.05, "prompts", "middle", 0.125, seed=1000),
    Written("continued", 0.1, "documents", "short", 0.5, 0.25),
    Written("questions", 0.3, "questions", "short", 0.5),
    Written("asked", 0.35, "prompts", "short", 0.5),
)
# What a token takes, against one of a short answer: of long texts most is given, and read first.
COSTS = {"short": 1.0, "middle": 1.5, "long": 3.0}
# Rows at once where several are written side by side: a quarter of a GPU of 139 GB at most.
BATCHES = {"short": 1024, "middle": 192, "long": 96}
# Which prompts they are asked.
PROMPTS = {"asked": "prompts", "long_asked": "long_prompts", "essays": "essays", "mixed": "prompts"}


class Recipe:
    """The parts, with everything that the flags say."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags, self.output = flags, Path(flags.output)
        self.data, self.run = self.output / "data", self.output / "run"
        self.held_books = self.output / "held_books.jsonl"
        self.lengths = dict.fromkeys(("short", "middle", "long"), 512) if flags.dry else {}
        self.lengths = self.lengths or {"short": 1024, "middle": 4096, "long": 8192}
        self.deadline: float | None = None

    def do(self, part: str) -> bool:
        """Do a part, or what is missing of it; whether it is done."""
        print(f"== {part}", flush=True)
        budget = self.flags.budget_seconds
        self.deadline = time.monotonic() + budget if budget else None
        return bool(self.train(part) if part in STAGES else getattr(self, part)())

    def mix(self) -> bool:
        """Documents and prompts."""
        from longspec.bench.catalogue import BUILTIN
        from longspec.data.collect import collect
        from longspec.data.held_out import HeldOut
        from longspec.data.prompts.library import Library
        from longspec.data.prompts.make import make_prompts
        from longspec.pipeline.sources import is_installed

        self.hold_out_pages()
        measured = [*self.flags.measure, *self.flags.measure_long, *self.flags.held_out]
        # The prompts that `longspec bench` comes with are for measuring, too.
        held_out = HeldOut.read([*measured, str(self.held_books), str(BUILTIN)])
        documents = self.output / "documents.jsonl"
        if not documents.exists():
            names = [name for name in PACKAGES if name == "stdlib" or is_installed(name)]
            packages = names[:1] if self.flags.dry else names
            print(collect(documents, self.flags.books, packages, held_out, self.flags.licence), flush=True)
        number = min(420_000, max(200, self.flags.tokens // 300))
        # The target must have room to answer: short sequences get short quotations.
        long = "summaries" if self.flags.dry else "long_texts"
        wanted: dict[str, tuple[int, dict[str, float] | None]] = {
            "prompts": (number, None),
            "long_prompts": (number // 10, {long: 1}),
            "essays": (number // 5, {"essays": 3, "stories": 1, "explanations": 1, "letters": 1}),
        }
        library = Library([str(documents)])
        for name, (count, shares) in wanted.items():
            path = self.output / f"{name}.jsonl"
            if not path.exists():
                print(make_prompts(path, count, library, held_out, shares, self.flags.seed), flush=True)
        return True

    def hold_out_pages(self) -> None:
        """Put some pages of the first books, each with a question, where they are measured on."""
        if self.held_books.exists():
            return
        from longspec.data.records import read_records

        lines = []
        for _, record in islice(read_records(self.flags.books), HELD_BOOKS):
            begin = record["text"].find("\n", len(record["text"]) // 3) + 1
            pages = record["text"][begin : begin + HELD_CHARACTERS]
            lines.append(
                json.dumps({"context": pages, "input": "Summarize the text above in a few sentences."})
            )
        self.output.mkdir(parents=True, exist_ok=True)
        unfinished = self.output / ".held_books"
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
        unfinished.rename(self.held_books)

    def write(self) -> bool:
        """The target's own text."""
        target, documents = ["--target", self.flags.target], self.output / "documents.jsonl"
        rest = [one for one in DATASETS if not self.has(one.name)]
        jobs = self.flags.jobs
        started: list[subprocess.Popen[bytes]] = []
        for place, one in enumerate(rest):
            length = self.lengths[one.length]
            command: list[object] = ["--output", self.data / one.name, "--mode", one.mode, *target]
            if one.mode == "prompts":
                command += ["--prompts", self.output / f"{PROMPTS[one.name]}.jsonl"]
            elif one.mode == "documents":
                command += ["--documents", documents, "--given-tokens", int(one.given * length)]
            command += ["--tokens", max(1, int(one.share * self.flags.tokens)), "--seq-length", length]
            command += ["--max-new-tokens", int(one.new * length), "--temperatures", TEMPERATURES]
            command += ["--seed", self.flags.seed + one.seed, "--device", self.flags.device]
            # Shards of some ten seconds on a GPU: so much may a budget be overdrawn.
            command += (
                ["--batch", 8] if self.flags.dry else ["--shard-samples", SHARD_TOKENS[one.length] // length]
            )
            if jobs > 1 and not self.flags.dry:
                command += ["--batch", BATCHES[one.length]]
            while sum(process.poll() is None for process in started) >= jobs:
                time.sleep(0.1)
            started.append(start("data", "synthesize", *command, *self.seconds_for(rest[place:])))
        try:
            for process in started:
                finished(process)
        finally:
            # Where one failed, the others must not go on behind the next try's back.
            for process in started:
                process.terminate()
        return True

    def has(self, name: str) -> bool:
        """Whether a dataset is finished."""
        return (self.data / name / "dataset.json").is_file()

    def seconds_for(self, rest: list[Written]) -> list[object]:
        """The share of what is left of the budget that falls to the first of these."""
        if self.deadline is None:
            return []
        left = max(1.0, self.deadline - time.monotonic())
        costs = [one.share * COSTS[one.length] for one in rest]
        # Side by side, each takes as many times longer.
        return ["--seconds", round(left * min(1.0, self.flags.jobs * costs[0] / sum(costs)), 1)]

    def train(self, part: str) -> bool:
        """One stage, as far as the budget goes; its draft is exported when it is done."""
        draft = self.output / "drafts" / part
        stage, length = STAGES[part]
        if draft.exists():
            return True
        own = [f"run={self.run}", "resume=latest", f"seed={self.flags.seed}"]
        own += [f"target.path={self.flags.target}", f"target.device={self.flags.device}"]
        if self.flags.start_from:
            own.append(f"draft.path={self.flags.start_from}")
        if self.deadline is not None:
            own.append(f"saving.max_seconds={max(0.01, self.deadline - time.monotonic()):.2f}")
        if self.flags.dry:
            own += [f"stage.seq_length={self.lengths[length]}", "stage.micro_batch=1", "compile=false"]
            own += ["data.num_held_out=1", "evaluation.new_tokens=16", "evaluation.prompt_tokens=16"]
            own += ["target.dtype=float32", "stage.num_steps=5"]
        own += self.flags.set
        longspec("train", "--only", stage, "experiment=smollm2_gpu", "stage=all", *own, data=self.data)
        from longspec.train.checkpoints import progress_of

        step, num_steps = progress_of(self.run / stage)
        if step < num_steps:
            print(f"{part}: step {step} of {num_steps}; give the same command again to go on", flush=True)
            return False
        longspec("export", self.run / stage, draft, "--dtype", "bfloat16")
        return True

    def finish(self) -> bool:
        """The draft as it ships, with what was measured of it."""
        draft, last = self.output / "draft", self.flags.start_from or self.output / "drafts" / "answers"
        if not draft.exists():
            building = self.output / ".draft"
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            for name in SHIPPED:
                shutil.copy(Path(last) / name, building)
            from longspec.pipeline.card import with_given

            documents = self.output / "documents.jsonl"
            if documents.exists():
                card = building / "README.md"
                card.write_text(with_given(card.read_text(encoding="utf-8"), documents), encoding="utf-8")
            building.rename(draft)
        size = (draft / "model.safetensors").stat().st_size
        print(
            f"{draft}: {size / 1e6:.1f} MB; to ship it, copy it to src/longspec/drafts/smollm2-135m",
            flush=True,
        )
        if size > LARGEST:
            sys.exit(f"{draft} has {size:,} bytes; at most {LARGEST:,} may ship: lower draft.cross_layers")
        self.measure(draft)
        return True

    def measure(self, draft: Path) -> None:
        """tau by real decoding: on short prompts, and as the context grows; noted in the draft's folder."""
        measured, runs = self.output / "measured", []
        limit = 1 if self.flags.dry else self.flags.limit
        shared: list[object] = [
            "--target",
            self.flags.target,
            "--draft",
            draft,
            "--device",
            self.flags.device,
        ]
        shared += ["--repeats", 1, "--attention", self.flags.attention]
        shared += ["--max-new-tokens", 8 if self.flags.dry else 256]
        if self.flags.measure:
            runs.append(measured / "short")
            short = [part for path in self.flags.measure for part in ("--workload", path)]
            short += ["--methods", self.flags.methods, "--temperature", "0,0.7"]
            short += ["--limit", limit] if limit else []
            longspec("bench", "generate", *shared, *short, "--output", runs[-1])
        own = [self.held_books] if self.held_books.exists() else []
        for path in (*self.flags.measure_long, *own):
            runs.append(measured / Path(path).name.partition(".")[0])
            lengths = "128,256" if self.flags.dry else "1024,2048,4096,7500"
            long = ["--source", path, "--lengths", lengths, "--limit", min(limit or 10, 10)]
            longspec(
                "bench", "context", *shared, *long, "--methods", self.flags.methods, "--output", runs[-1]
            )
        if runs:
            longspec("bench", "acceptance", *runs, "--draft", draft)


def longspec(*arguments: object, data: Path | None = None) -> None:
    """Run one command of the package; it must succeed."""
    finished(start(*arguments, data=data))


def start(*arguments: object, data: Path | None = None) -> subprocess.Popen[bytes]:
    """Set one command of the package going."""
    command = [sys.executable, "-m", "longspec", *map(str, arguments)]
    print("$ longspec " + " ".join(command[3:]), flush=True)
    environment = os.environ | ({"SMOLLM2_DATA": str(data.resolve())} if data is not None else {})
    return subprocess.Popen(command, env=environment)


def finished(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command; it must succeed."""
    if process.wait():
        sys.exit(process.returncode)


def _flags(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--output", required=True, metavar="FOLDER", help="everything goes there")
    parser.add_argument(
        "--books", nargs="+", default=[], metavar="FILE", help="JSONL with 'text', may be packed"
    )
    parser.add_argument("--licence", default="public domain", help="of the books (default: %(default)s)")
    parser.add_argument(
        "--measure", nargs="+", default=[], metavar="FILE", help="prompts that tau is measured on"
    )
    parser.add_argument(
        "--measure-long",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts that tau is measured on by length",
    )
    parser.add_argument(
        "--attention", default="auto", metavar="NAME", help="of the measurements (%(default)s)"
    )
    parser.add_argument(
        "--held-out", nargs="+", default=[], metavar="FILE", help="more text to keep out of training"
    )
    parser.add_argument(
        "--tokens", type=amount, default="500M", metavar="N", help="written (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-seconds", type=float, metavar="N", help="for this part; training then stops, saved"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of prompts, text and training (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="datasets written at the same time (%(default)s)"
    )
    parser.add_argument("--start-from", metavar="DRAFT", help="the draft that the stage begins with")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="for every stage; repeatable"
    )
    parser.add_argument("--methods", default=METHODS, metavar="M,M", help="measured (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts measured of each file (all)")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="(default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--dry", action="store_true", help="short sequences and small batches: does it all run?"
    )
    flags = parser.parse_args(arguments)
    if flags.part in ("mix", "all") and not flags.books:
        parser.error(f"{flags.part} needs --books to quote from")
    for name in ("jobs", "limit"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            parser.error(f"--{name} is {getattr(flags, name)}; it must be at least 1")
    return flags


def main(arguments: list[str]) -> int:
    """Do the parts that are asked for."""
    flags = _flags(arguments)
    recipe = Recipe(flags)
    for part in PARTS if flags.part == "all" else [flags.part]:
        if not recipe.do(part):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
