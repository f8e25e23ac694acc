"""The measuring itself: every method on every prompt, taking turns, one finished row at a time."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from longspec.api import LongSpec
from longspec.bench.environment import PeakMemory, load_average
from longspec.bench.exact import describe_difference, first_difference
from longspec.bench.folder import Row, RunFolder, row_key
from longspec.bench.runners import Answer, Asked, Runner, accepted_by_depth
from longspec.bench.workloads import Item, Workload
from longspec.text import pieces_of

# Tokens of a warm-up, and of the generation whose rounds are taken apart.
WARM_UP, PARTS = 8, 32


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    repeats: int
    max_new_tokens: int

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
    first_of_kind: bool

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
    warm: set[tuple[str, str, str, float]] = set()
    for place in _places(plan):
        for runner in runners:
            if place.key(runner.label) in done:
                on_row(1)
                continue
            group = (runner.label, place.workload, place.item.kind, place.temperature)
            if group not in warm:
                runner.forget()
                runner.answer(
                    place.item.prompt(model, []),
                    Asked(min(WARM_UP, plan.max_new_tokens), place.temperature, 0),
                )
                warm.add(group)
            vanilla = done.get((*place.key("vanilla")[:4], 0))
            row = _row(model, runner, place, plan.max_new_tokens, vanilla)
            folder.add(row)
            done[row_key(row)] = row
            on_row(1)


def _places(plan: Plan) -> list[Place]:
    """In order. Temperatures one after the other: on a GPU, rounds are captured for each of them."""
    places = []
    for repeat, temperature in product(range(plan.repeats), plan.temperatures):
        for workload in plan.workloads:
            kinds: set[str] = set()
            for seed, item in enumerate(workload.items):
                first = item.kind not in kinds
                kinds.add(item.kind)
                places.append(Place(workload.name, item, seed, temperature, repeat, first))
    return places


def _row(model: LongSpec, runner: Runner, place: Place, max_new_tokens: int, vanilla: Row | None) -> Row:
    """Run one item and write down how it went."""
    asked = Asked(max_new_tokens, place.temperature, place.seed)
    runner.forget()
    gc.collect()
    memory = PeakMemory(model.engine.target.device)
    prompts, answers, pieces = _converse(model, runner, place.item, asked)
    peak = memory.peak
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
        "peak_memory": peak,
        "memory_above_start": max(0, peak - memory.before),
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
        row["pieces"] = pieces
        if place.first_of_kind:
            row["parts"] = runner.parts(prompts[0], replace(asked, max_new_tokens=min(PARTS, max_new_tokens)))
    # Sampled, `transformers` has noise of its own: there is nothing to compare.
    row["compared"] = vanilla is not None and (place.temperature == 0 or answers[0].depths is not None)
    row["difference"] = _difference(model, row, prompts, answers, vanilla) if row["compared"] else None
    return row


def _converse(
    model: LongSpec, runner: Runner, item: Item, asked: Asked
) -> tuple[list[list[int]], list[Answer], list[list[str]]]:
    """All turns of an item: each turn's whole prompt, its answer, and the text of the answer's tokens."""
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    pieces: list[list[str]] = []
    for _ in range(item.num_turns):
        prompts.append(item.prompt(model, ["".join(one) for one in pieces]))
        answers.append(runner.answer(prompts[-1], asked))
        pieces.append(pieces_of(model.tokenizer, answers[-1].token_ids))
    return prompts, answers, pieces


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
