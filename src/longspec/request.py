"""One request, from prompts and options to answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from longspec.decoding.auto import Plan
from longspec.decoding.choose import Sampling
from longspec.decoding.device import needs_no_host, replays
from longspec.decoding.expected import num_nodes
from longspec.decoding.guard import Copying, Guarded, Prices
from longspec.decoding.loop import Acceptance, DecodeState, Method, decode, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.lookup import Lookup
from longspec.decoding.methods.make import MOST_NODES, Drafting, MethodOptions, make_method
from longspec.decoding.reuse import WAY_OUT, PrefixStore
from longspec.decoding.row import Row
from longspec.errors import UserError, number, whole_number, whole_numbers
from longspec.generation import Generation
from longspec.models.placement import memory_explained
from longspec.models.target import Transformer
from longspec.prompts import Prompt, PromptEncoder
from longspec.text import TextStream

DEFAULT_MAX_NEW_TOKENS = 512
# What a speculative round is taken to cost, in vanilla steps, where nothing was measured.
UNMEASURED_COST = 1.3


class Options(TypedDict, total=False):
    """What `generate` and `stream` take beside the prompt; what is left out follows the model's config."""

    max_new_tokens: int | None
    """None: as many as fit, at most 512."""
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | Sequence[int] | None
    """One per row, or one from which row i gets `seed + i`; None draws one, and the result tells it."""
    stop: str | Sequence[str] | None
    """Strings that end an answer; they are not part of it."""
    eos_ids: Sequence[int] | None
    """Tokens that end an answer, instead of the model's own; with none of them only its length does."""
    raw: bool
    """Whether texts skip the chat template."""
    method: str
    """auto, vanilla, seq, tree, magicdec or lookup; see `MethodOptions` for this and what follows."""
    gamma: int
    tree_shape: Sequence[int]
    max_nodes: int | None
    num_copied: int
    acceptance: str
    min_confidence: float
    sinks: int
    window: int
    max_ngram: int


@dataclass(frozen=True)
class Engine:
    """What a loaded model brings to a request."""

    name: str
    target: Transformer
    encoder: PromptEncoder
    defaults: Sampling
    eos_ids: frozenset[int]
    max_length: int
    store: PrefixStore
    draft: Drafting | None = None
    draft_name: str | None = None
    plan: Callable[[int], Plan] | None = None
    """Gives the plan of `auto` for so many rows, measuring for it the first time; None goes without
    measurements."""

    @property
    def replays(self) -> bool:
        """Whether rounds are captured and replayed."""
        return replays(self.target)

    def settle(
        self, options: MethodOptions, context: int, num_rows: int
    ) -> tuple[MethodOptions, Prices, Copying | None]:
        """What `auto` means for this context and batch, what its rounds cost, and what copies before it."""
        if self.plan is None:
            settled = replace(options, method="lookup" if self.draft is None else "tree")
            return settled, Prices(((num_nodes(settled), UNMEASURED_COST),)), None
        plan = self.plan(num_rows)
        planned, prices = plan.pick(context)
        limits = [limit for limit in (planned.max_nodes, options.max_nodes) if limit is not None]
        most = min(limits, default=None)
        found = plan.lookup(context) if planned.method in ("seq", "tree") else None
        copying = None
        if found is not None:
            assert self.draft is not None
            # No more than a caller allows, nor than the draft's window takes in at once.
            longest = min(options.max_nodes or MOST_NODES, self.draft[0].config.window) - 1
            copying = Lookup(min(found[0].gamma, longest)), found[1]
        return replace(planned, acceptance=options.acceptance, max_nodes=most), prices, copying


class Request:
    """Runs turn by turn; `close` gives the cache back, finished or not."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], options: Options) -> None:
        settings = read_options(options)
        if not prompts:
            raise UserError("there are no prompts; give at least one")
        self._engine = engine
        self._sampling = Sampling(**(vars(engine.defaults) | settings.sampling))
        self.texts = [TextStream(engine.encoder.tokenizer, settings.stop) for _ in prompts]
        seeds = _seeds(settings.seed, len(prompts))
        eos_ids = engine.eos_ids if settings.eos_ids is None else settings.eos_ids
        vocab_size = engine.target.config.vocab_size
        self.rows = []
        for prompt, seed, text in zip(prompts, seeds, self.texts, strict=True):
            tokens = engine.encoder.encode(prompt, settings.raw, vocab_size)
            room = _room(engine.max_length, len(tokens), settings.max_new_tokens)
            self.rows.append(Row(tokens, seed, room, eos_ids, text.push_and_check))
        self.method, self._acceptance = self._choose_method(settings.method)
        self._state: DecodeState | None = None
        self._closed = False
        self._seconds = self._prefill_seconds = 0.0
        self._num_prefilled = 0

    def _choose_method(self, options: MethodOptions) -> tuple[Method, Acceptance]:
        automatic = options.method == "auto"
        prices, copying = Prices(()), None
        if automatic:
            context = max(len(row.prompt) + row.max_new_tokens // 2 for row in self.rows)
            options, prices, copying = self._engine.settle(options, context, len(self.rows))
        method, acceptance = make_method(options, self._sampling, self._engine.draft)
        if automatic and options.method != "vanilla":
            method = Guarded(method, prices, copying)
        return method, acceptance

    def turns(self) -> Iterator[None]:
        """Run to the end, one turn (the prefill, then each round) at a time."""
        turns = self._decode()
        longest = max(len(row.prompt) + row.max_new_tokens for row in self.rows)
        answers = "an answer" if len(self.rows) == 1 else f"{len(self.rows)} answers"
        asked = f"{answers} of up to {longest} tokens, prompt included, on {self._engine.target.device}"
        while True:
            # The time between turns is the consumer's.
            started = time.perf_counter()
            with memory_explained(asked, WAY_OUT):
                running = next(turns, None)
            self._seconds += time.perf_counter() - started
            if running is None:
                return
            yield

    def _decode(self) -> Iterator[bool]:
        engine, slack = self._engine, self.method.num_nodes
        needed = max(len(row.prompt) + row.max_new_tokens for row in self.rows) + slack
        prompts = [row.prompt for row in self.rows]
        cache = engine.store.take(engine.target, prompts, needed, engine.max_length + slack, slack)
        state = self._state = start(engine.target, cache, self.rows, self._sampling)
        on_device = engine.replays and needs_no_host(state, self.method)
        rounds = engine.store.rounds if on_device else None
        fill = engine.store.rounds.fill if engine.replays else None
        for _ in decode(state, self.method, self._acceptance, rounds=rounds, fill=fill):
            self._prefill_seconds = state.prefill_seconds
            self._num_prefilled = state.num_prefilled
            for row, text in zip(self.rows, self.texts, strict=True):
                if row.finished:
                    text.finish()
            yield True

    def close(self) -> None:
        """Give the cache back for the next request; safe to call twice."""
        self._closed = True
        if self._state is not None:
            self._engine.store.put_back(self._state.cache, self.rows)
            self._state = None
        for text in self.texts:
            text.finish()

    def results(self) -> list[Generation]:
        """What each row has said so far."""
        return [self._result(row, text) for row, text in zip(self.rows, self.texts, strict=True)]

    def _result(self, row: Row, text: TextStream) -> Generation:
        target = self._engine.target
        method = self.method.method if isinstance(self.method, Guarded) else self.method
        tree = method if isinstance(method, Glide) and method.name == "tree" else None
        return Generation(
            text=text.text,
            token_ids=list(row.tokens),
            finish_reason=row.finish_reason or ("closed" if self._closed else "running"),
            seed=row.seed,
            prompt_tokens=len(row.prompt),
            prefilled_tokens=self._num_prefilled,
            rounds=row.num_rounds,
            tau=row.tau,
            accepted_by_depth=list(row.accepted_by_depth),
            depths=list(row.depths),
            seconds=self._seconds,
            prefill_seconds=self._prefill_seconds,
            method=self.method.name,
            tree_shape=list(self.method.tree_shape) if self.method.tree_shape else None,
            max_nodes=tree.max_nodes if tree else None,
            num_copied=tree.num_copied if tree else 0,
            target=self._engine.name,
            draft=self._engine.draft_name if self.method.name in ("seq", "tree") else None,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True)
class Settings:
    """Options, checked as far as that goes without a model."""

    sampling: dict[str, Any]
    """Those given; the rest follows the model."""
    method: MethodOptions
    max_new_tokens: int | None
    seed: int | list[int] | None
    stop: tuple[str, ...]
    eos_ids: frozenset[int] | None
    raw: bool


def read_options(options: Mapping[str, Any]) -> Settings:
    """What the options mean; a bad one is refused by name."""
    unknown = next((name for name in options if name not in Options.__annotations__), None)
    if unknown is not None:
        raise UserError(f"option {unknown!r} is unknown; there are: {', '.join(Options.__annotations__)}")
    given = {name: value for name, value in options.items() if value is not None}
    names = [field.name for field in fields(Sampling)]
    sampling = {name: given[name] for name in names if name in given}
    Sampling(**sampling)
    max_new_tokens = (
        whole_number("max_new_tokens", given["max_new_tokens"]) if "max_new_tokens" in given else None
    )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    return Settings(
        sampling=sampling,
        method=method_options(given),
        max_new_tokens=max_new_tokens,
        seed=_checked_seed(given.get("seed")),
        stop=_stop_strings(given.get("stop", ())),
        eos_ids=frozenset(whole_numbers("eos_ids", given["eos_ids"])) if "eos_ids" in given else None,
        raw=bool(given.get("raw", False)),
    )


def method_options(options: Mapping[str, Any]) -> MethodOptions:
    """Those of the options that concern the method, checked."""
    names = {field.name for field in fields(MethodOptions)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    if "min_confidence" in given:
        given["min_confidence"] = number("min_confidence", given["min_confidence"])
    for name in given.keys() - {"method", "acceptance", "tree_shape", "min_confidence"}:
        given[name] = whole_number(name, given[name])
    if "tree_shape" in given:
        given["tree_shape"] = tuple(whole_numbers("tree_shape", given["tree_shape"]))
    return MethodOptions(**given)


def _room(max_length: int, num_prompt: int, wanted: int | None) -> int:
    """How many tokens a row may add."""
    room = max_length - num_prompt
    if room < 1:
        raise UserError(
            f"the prompt has {num_prompt} tokens, but the context holds {max_length} including the answer; "
            f"shorten it to at most {max_length - 1} tokens"
        )
    if wanted is None:
        return min(room, DEFAULT_MAX_NEW_TOKENS)
    if wanted > room:
        raise UserError(
            f"max_new_tokens {wanted} does not fit: the context holds {max_length} tokens and the prompt "
            f"takes {num_prompt}, so at most {room} new tokens fit"
        )
    return wanted


def _checked_seed(seed: Any) -> int | list[int] | None:
    if seed is None:
        return None
    several = isinstance(seed, Sequence) or getattr(seed, "ndim", 0) > 0
    seeds = whole_numbers("seed", seed) if several else [whole_number("seed", seed)]
    wrong = next((one for one in seeds if not 0 <= one < 2**63), None)
    if wrong is not None:
        raise UserError(f"seed {wrong} must lie between 0 and 2**63 - 1")
    return seeds if several else seeds[0]


def _seeds(seed: int | list[int] | None, num_rows: int) -> list[int]:
    if seed is None:
        seed = secrets.randbits(31)
    seeds = [(seed + row) % 2**63 for row in range(num_rows)] if isinstance(seed, int) else seed
    if len(seeds) != num_rows:
        raise UserError(f"{len(seeds)} seeds for {num_rows} prompts; give one each, or a single one")
    return seeds


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else tuple(stop)
    if not all(isinstance(one, str) for one in strings):
        raise UserError(f"stop is {stop!r}; a text or a list of texts is needed")
    if not all(strings):
        raise UserError("a stop string is empty; it would stop every answer at once")
    return strings
