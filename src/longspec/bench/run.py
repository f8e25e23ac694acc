"""The measuring itself: every method on every prompt, taking turns, one finished row at a time."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from longspec.api import LongSpec
from longspec.bench.environment import PeakMemory, load_average
from longspec.bench.exact import describe_difference, first_difference
from longspec.bench.folder import Row, RunFolder, row_key
from longspec.bench.runners import Answer, Asked, Runner, accepted_by_depth
from longspec.bench.workloads import Item, Workload
from longspec.text import pieces_of

# Tokens of a warm-up.
WARM_UP = 8


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    repeats: int
    max_new_tokens: int
    batch: int = 1
    """Prompts of one kind that are answered side by side."""

    @property
    def generations(self) -> int:
        """How many rows it makes for each method."""
        return sum(len(one.items) for one in self.workloads) * len(self.temperatures) * self.repeats


@dataclass(frozen=True)
class Place:
    """Where in the plan a row belongs."""

    workload: str
    item: Item
    seed: int
    temperature: float
    repeat: int

    def key(self, method: str) -> tuple[str, str, str, float, int]:
        """That of the row which a method makes here."""
        return self.workload, self.item.id, method, self.temperature, self.repeat


def measure(
    model: LongSpec,
    runners: Sequence[Runner],
    plan: Plan,
    folder: RunFolder,
    on_row: Callable[[int], None] = lambda number: None,
) -> None:
    """Fill the folder with what it does not have yet; vanilla, which the others are compared to, is first.

    Before a method is timed on a kind of prompt and at a temperature, it answers one of them untimed.
    """
    assert runners[0].label == "vanilla"
    gc.collect()
    # What is there by now stays there: collecting a row's own garbage need not look through it all again.
    gc.freeze()
    try:
        _measure(model, runners, plan, folder, on_row)
    finally:
        gc.unfreeze()


def _measure(
    model: LongSpec,
    runners: Sequence[Runner],
    plan: Plan,
    folder: RunFolder,
    on_row: Callable[[int], None],
) -> None:
    done = {row_key(row): row for row in folder.rows}
    warm: set[tuple[str, str, str, float, int]] = set()
    for batch in _batches(plan):
        for runner in runners:
            missing = [place for place in batch if place.key(runner.label) not in done]
            if missing:
                first = batch[0]
                group = (runner.label, first.workload, first.item.kind, first.temperature, len(batch))
                if group not in warm:
                    _warm_up(model, runner, batch, plan.max_new_tokens)
                    warm.add(group)
                for place, row in zip(batch, _rows(model, runner, batch, plan, done), strict=True):
                    if place in missing:
                        folder.add(row)
                        done[row_key(row)] = row
            on_row(len(batch))


def _batches(plan: Plan) -> list[list[Place]]:
    """What is answered side by side, of one kind each, in order."""
    batches: list[list[Place]] = []
    for repeat, temperature in product(range(plan.repeats), plan.temperatures):
        for workload in plan.workloads:
            last: dict[str, list[Place]] = {}
            for seed, item in enumerate(workload.items):
                own = last.get(item.kind)
                if own is None or len(own) == plan.batch:
                    own = last[item.kind] = []
                    batches.append(own)
                own.append(Place(workload.name, item, seed, temperature, repeat))
    return batches


def _warm_up(model: LongSpec, runner: Runner, batch: Sequence[Place], max_new_tokens: int) -> None:
    runner.forget()
    prompts = [place.item.prompt(model, []) for place in batch]
    asked = [Asked(min(WARM_UP, max_new_tokens), place.temperature, 0) for place in batch]
    runner.answers(prompts, asked)


def _rows(
    model: LongSpec, runner: Runner, batch: Sequence[Place], plan: Plan, done: Mapping[Any, Row]
) -> list[Row]:
    """Run items side by side and write down how each went."""
    runner.forget()
    gc.collect()
    memory = PeakMemory(model.target.device)
    talks, seconds = _converse(model, runner, batch, plan.max_new_tokens)
    peak = memory.peak
    rows = []
    for place, talk in zip(batch, talks, strict=True):
        row = _row(model, runner, place, talk, done.get((*place.key("vanilla")[:4], 0)))
        row |= {"peak_memory": peak, "memory_above_start": max(0, peak - memory.before)}
        if plan.batch > 1:
            row |= {"batch": batch[0].item.id, "batch_seconds": seconds}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Talk:
    """All turns of an item: each turn's whole prompt, its answer, and the text of the answer's tokens."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    pieces: list[list[str]] = field(default_factory=list)


def _row(model: LongSpec, runner: Runner, place: Place, talk: _Talk, vanilla: Row | None) -> Row:
    """What is to be kept of an item; `vanilla` is the row of vanilla's first repeat."""
    prompts, answers = talk.prompts, talk.answers
    row: Row = {
        "workload": place.workload,
        "kind": place.item.kind,
        "item": place.item.id,
        "method": runner.label,
        "ran": answers[0].ran,
        "temperature": place.temperature,
        "repeat": place.repeat,
        "seed": place.seed,
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
    if place.repeat == 0:
        # The answers themselves are alike in every repeat, or the digest tells; once is enough.
        row["token_ids"] = [answer.token_ids for answer in answers]
        row["depths"] = [answer.depths for answer in answers]
        row["pieces"] = talk.pieces
    # Sampled, `transformers` has noise of its own: there is nothing to compare.
    row["compared"] = vanilla is not None and (place.temperature == 0 or answers[0].depths is not None)
    row["difference"] = _difference(model, row, prompts, answers, vanilla) if row["compared"] else None
    return row


def _converse(
    model: LongSpec, runner: Runner, batch: Sequence[Place], max_new_tokens: int
) -> tuple[list[_Talk], float]:
    """All turns of all items, turn by turn; and the seconds from each turn's submission to the end of its
    last answer, summed over the turns."""
    talks, seconds = [_Talk() for _ in batch], 0.0
    for turn in range(max(place.item.num_turns for place in batch)):
        now = [(place, talk) for place, talk in zip(batch, talks, strict=True) if turn < place.item.num_turns]
        for place, talk in now:
            talk.prompts.append(place.item.prompt(model, ["".join(one) for one in talk.pieces]))
        answers = runner.answers(
            [talk.prompts[-1] for _, talk in now],
            [Asked(max_new_tokens, place.temperature, place.seed) for place, _ in now],
        )
        seconds += max(one.prefill_seconds + one.decode_seconds for one in answers)
        for (_, talk), answer in zip(now, answers, strict=True):
            talk.answers.append(answer)
            talk.pieces.append(pieces_of(model.tokenizer, answer.token_ids))
    return talks, seconds


def _difference(
    model: LongSpec, row: Row, prompts: list[list[int]], answers: list[Answer], vanilla: Row | None
) -> dict[str, Any] | None:
    """Where it left the words of vanilla's first repeat; None where it said the same."""
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
