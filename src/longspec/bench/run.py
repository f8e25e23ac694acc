"""A benchmark of whole answers: every method answers every prompt in turn; each answer is kept at once."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from longspec.api import LongSpec
from longspec.atomic import write_whole
from longspec.bench.environment import PeakMemory, command_line, environment, load_average
from longspec.bench.exact import describe_difference, first_difference
from longspec.bench.folder import Row, RunFolder, read_run, row_key
from longspec.bench.plots import draw_all
from longspec.bench.report import markdown
from longspec.bench.runners import OurMethod, Runner, TimedAnswer, accepted_by_depth
from longspec.bench.settings import RunSetting
from longspec.bench.summary import Figures, summarise
from longspec.bench.workloads import Item, Workload, fitting
from longspec.decoding.methods import Method
from longspec.errors import UserError
from longspec.progress import Advance, count_bar
from longspec.text import pieces_of

# Tokens of a warm-up.
WARM_UP = 8


def bench(
    model: LongSpec,
    workloads: Sequence[Workload],
    setting: RunSetting,
    output: Path,
    others: Sequence[Runner] = (),
    left_out: dict[str, str] | None = None,
    progress: bool = False,
) -> list[Figures]:
    """Measure into `output`, or resume the run that is there; write summary.json, report.md and plots.

    `others` are measured together with our methods.
    """
    chosen = [fitting(one.first(setting.limit), model, setting.max_new_tokens) for one in workloads]
    ours = [OurMethod(model, label) for label in setting.labels]
    model.engine.prepare(methods=[one.choice for one in ours if isinstance(one.choice, Method)])
    runners: list[Runner] = [*ours, *others]
    tasks = [batch for repeat in range(setting.repeats) for batch in _batches(chosen, setting, repeat)]
    facts = {
        "environment": environment(model),
        "methods": [runner.label for runner in runners],
        "temperatures": list(setting.temperatures),
        "repeats": setting.repeats,
        "max_new_tokens": setting.max_new_tokens,
        "batch": setting.batch,
        "workloads": {one.name: [item.id for item in one.items] for one in chosen},
    }
    short = {one.name: f"{one.left_out} prompts, by their length" for one in chosen if one.left_out}
    about = {
        "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": command_line(),
        "left_out": short | (left_out or {}),
    }
    total = sum(map(len, tasks)) * len(runners)
    with RunFolder(output, facts, about) as folder, count_bar("answers", total, progress) as advance:
        gc.collect()
        # The model stays: with it frozen, the collection before each row looks at the row's garbage alone.
        gc.freeze()
        try:
            _measure(model, runners, tasks, setting, folder, advance)
        finally:
            gc.unfreeze()
    return conclude(output)


def conclude(folder: Path) -> list[Figures]:
    """Write what a run's rows say: summary.json, report.md and, with matplotlib, the plots."""
    run, rows = read_run(folder)
    figures = summarise(rows)
    try:
        write_whole(
            folder / "summary.json", json.dumps([asdict(one) for one in figures], indent=1).encode() + b"\n"
        )
        write_whole(folder / "report.md", markdown(figures, run).encode())
        for name, picture in draw_all(figures).items():
            write_whole(folder / f"{name}.png", picture)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; all rows are kept: make room and give the same "
            "command again"
        ) from error
    return figures


@dataclass(frozen=True)
class Task:
    """A prompt to be answered by every method, at a temperature, in a repeat."""

    workload: str
    item: Item
    seed: int
    temperature: float
    repeat: int

    def key(self, method: str) -> tuple[str, str, str, float, int]:
        """The `row_key` of the row that a method makes of this task."""
        return self.workload, self.item.id, method, self.temperature, self.repeat


def _batches(workloads: Sequence[Workload], setting: RunSetting, repeat: int) -> list[list[Task]]:
    """The tasks that are answered side by side; each batch is of one kind."""
    batches: list[list[Task]] = []
    for temperature, workload in product(setting.temperatures, workloads):
        last: dict[str, list[Task]] = {}
        for seed, item in enumerate(workload.items):
            own = last.get(item.kind)
            if own is None or len(own) == setting.batch:
                own = last[item.kind] = []
                batches.append(own)
            own.append(Task(workload.name, item, seed, temperature, repeat))
    return batches


def _measure(
    model: LongSpec,
    runners: Sequence[Runner],
    batches: Sequence[Sequence[Task]],
    setting: RunSetting,
    folder: RunFolder,
    advance: Advance,
) -> None:
    """Measure the rows that the folder does not have yet.

    Before a method is timed on a kind of prompt at a temperature, it answers the first batch untimed.
    """
    assert runners[0].label == "vanilla"
    done = {row_key(row): row for row in folder.rows}
    warm: set[tuple[str, str, str, float, int]] = set()
    for batch in batches:
        for runner in runners:
            missing = [task for task in batch if task.key(runner.label) not in done]
            if missing:
                first = batch[0]
                group = (runner.label, first.workload, first.item.kind, first.temperature, len(batch))
                if group not in warm:
                    _warm_up(model, runner, batch, setting.max_new_tokens)
                    warm.add(group)
                for task, row in zip(batch, _rows(model, runner, batch, setting, done), strict=True):
                    if task in missing:
                        folder.add(row)
                        done[row_key(row)] = row
            advance(len(batch))


def _warm_up(model: LongSpec, runner: Runner, batch: Sequence[Task], max_new_tokens: int) -> None:
    runner.forget()
    prompts = [task.item.prompt(model, []) for task in batch]
    runner.answers(prompts, min(WARM_UP, max_new_tokens), batch[0].temperature, [0] * len(batch))


def _rows(
    model: LongSpec, runner: Runner, batch: Sequence[Task], setting: RunSetting, done: Mapping[Any, Row]
) -> list[Row]:
    runner.forget()
    gc.collect()
    memory = PeakMemory(model.target.device)
    talks, seconds = _converse(model, runner, batch, setting.max_new_tokens)
    peak = memory.peak
    rows = []
    for task, talk in zip(batch, talks, strict=True):
        row = _row(model, runner, task, talk, done.get((*task.key("vanilla")[:4], 0)))
        row |= {"peak_memory": peak, "memory_above_start": max(0, peak - memory.before)}
        if setting.batch > 1:
            row |= {"batch": batch[0].item.id, "batch_seconds": seconds}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Talk:
    """All turns of an item: each turn's whole prompt, its answer, and the text of the answer's tokens."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[TimedAnswer] = field(default_factory=list)
    pieces: list[list[str]] = field(default_factory=list)


def _row(model: LongSpec, runner: Runner, task: Task, talk: _Talk, vanilla: Row | None) -> Row:
    """The row of an item; `vanilla` is the row of vanilla's first repeat."""
    prompts, answers = talk.prompts, talk.answers
    row: Row = {
        "workload": task.workload,
        "kind": task.item.kind,
        "item": task.item.id,
        "method": runner.label,
        "ran": answers[0].ran,
        "temperature": task.temperature,
        "repeat": task.repeat,
        "seed": task.seed,
        "prompt_tokens": max(map(len, prompts)),
        "prompt_sha256": _digest(prompts[0]),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "decoded_tokens": sum(len(answer.token_ids) - answer.first_tokens for answer in answers),
        "prefill_seconds": sum(answer.prefill_seconds for answer in answers),
        "decode_seconds": sum(answer.decode_seconds for answer in answers),
        "load_average": load_average(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "finish_reasons": [answer.finish_reason for answer in answers],
        "answer_sha256": _digest([token for answer in answers for token in answer.token_ids]),
    }
    if answers[0].depths is not None:
        depths = [depth for answer in answers for depth in answer.depths or []]
        row["rounds"] = sum(answer.rounds or 0 for answer in answers)
        row["accepted_by_depth"] = accepted_by_depth(depths)
    if task.repeat == 0:
        # The digest shows whether the answers of other repeats are the same, so they are kept once.
        row["token_ids"] = [answer.token_ids for answer in answers]
        row["depths"] = [answer.depths for answer in answers]
        row["pieces"] = talk.pieces
    row["compared"] = vanilla is not None and (task.temperature == 0 or runner.same_when_sampled)
    row["difference"] = _difference(model, row, prompts, answers, vanilla) if row["compared"] else None
    return row


def _converse(
    model: LongSpec, runner: Runner, batch: Sequence[Task], max_new_tokens: int
) -> tuple[list[_Talk], float]:
    """Run all turns of all items, turn by turn.

    Also returns the seconds from each turn's submission to the end of its last answer, summed over turns.
    """
    talks, seconds = [_Talk() for _ in batch], 0.0
    for turn in range(max(task.item.num_turns for task in batch)):
        now = [(task, talk) for task, talk in zip(batch, talks, strict=True) if turn < task.item.num_turns]
        for task, talk in now:
            talk.prompts.append(task.item.prompt(model, ["".join(one) for one in talk.pieces]))
        prompts = [talk.prompts[-1] for _, talk in now]
        seeds = [task.seed for task, _ in now]
        answers = runner.answers(prompts, max_new_tokens, batch[0].temperature, seeds)
        seconds += max(one.prefill_seconds + one.decode_seconds for one in answers)
        for (_, talk), answer in zip(now, answers, strict=True):
            talk.answers.append(answer)
            talk.pieces.append(pieces_of(model.tokenizer, answer.token_ids))
    return talks, seconds


def _difference(
    model: LongSpec, row: Row, prompts: list[list[int]], answers: list[TimedAnswer], vanilla: Row | None
) -> dict[str, Any] | None:
    """The first difference from vanilla's first repeat; None where there is none."""
    assert vanilla is not None
    for turn, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        said = vanilla["token_ids"][turn]
        place = first_difference(said, answer.token_ids)
        if place is not None:
            found = describe_difference(
                model, prompt, said, answer.token_ids, place, row["temperature"], row["seed"]
            )
            return {"turn": turn, **found}
    return None


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
