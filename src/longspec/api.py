"""The Python interface: load a target, generate, stream."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from longspec import hub
from longspec.attention import choose_backend
from longspec.decoding.sampling import Sampling
from longspec.engine.costs import known_costs
from longspec.engine.engine import Engine
from longspec.engine.follow import follow_if_told
from longspec.engine.load import LoadPlan, read_shape
from longspec.engine.make import load_engine, no_exact
from longspec.engine.sequence import Sequence
from longspec.errors import UserError, naming, whole_number
from longspec.generation import Generation
from longspec.models.files import eos_ids, read_generation_config
from longspec.models.int8 import check_draft_dtype
from longspec.models.placement import check_fits, memory_explained, pick_devices
from longspec.models.target import Transformer
from longspec.option import num_bytes
from longspec.options import Options, Settings, read_options, room_for, seeds_for
from longspec.prompts import Prompt, PromptEncoder, split_batch
from longspec.text import TextStream

_WAY_OUT = (
    "shorten the prompt, lower max_new_tokens, give fewer prompts at once, or load the target with a smaller "
    "dtype or on another device"
)


@dataclass(frozen=True)
class SequenceMaker:
    """Makes sequences from prompts and options. It needs no engine, and can be sent to another process."""

    encoder: PromptEncoder
    defaults: Sampling
    eos_ids: frozenset[int]
    vocab_size: int
    max_length: int

    def make(self, prompts: Many[Prompt], settings: Settings) -> tuple[list[Sequence], list[TextStream]]:
        """A sequence for each prompt, and the `TextStream` of its answer."""
        if not prompts:
            raise UserError("there are no prompts; give at least one")
        sampling = Sampling(**(vars(self.defaults) | settings.sampling))
        eos_ids = self.eos_ids if settings.eos_ids is None else settings.eos_ids
        wrong = next((one for one in settings.eos_ids or () if not 0 <= one < self.vocab_size), None)
        if wrong is not None:
            raise UserError(f"one of eos_ids is {wrong}; the target's tokens are 0 to {self.vocab_size - 1}")
        sequences, texts = [], []
        for prompt, seed in zip(prompts, seeds_for(settings.seed, len(prompts)), strict=True):
            tokens = self.encoder.encode(prompt, settings.raw, self.vocab_size)
            room = room_for(self.max_length, len(tokens), settings.max_new_tokens)
            text = TextStream(self.encoder.tokenizer, settings.stop)
            # The engine looks at the text only if there are stop strings.
            check = text.push_and_check if settings.stop else None
            sequence = Sequence(
                tokens, room, sampling, seed, eos_ids, settings.method, check, acceptance=settings.acceptance
            )
            sequences.append(sequence)
            texts.append(text)
        return sequences, texts


class LongSpec:
    """A loaded target that is ready to answer.

    Its engine answers many prompts at once; threads may share it. The KV of finished texts stays while there
    is room. So the next turn of a conversation, or another question about the same document, computes only
    what is new. `reset` drops that KV.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        name: str,
        defaults: Sampling | None = None,
        eos_ids: frozenset[int] = frozenset(),
        draft_name: str | None = None,
    ) -> None:
        self.engine, self.encoder, self.name = engine, encoder, name
        self.defaults, self.eos_ids, self.draft_name = defaults or Sampling(), eos_ids, draft_name

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str] = hub.DEFAULT_TARGET,
        draft: str | os.PathLike[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_length: int | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        progress: bool = False,
        calibrate: bool = True,
        attention: str = "auto",
        draft_dtype: str = "auto",
        weights: str = "auto",
        max_rows: int | None = None,
        kv_memory: int | str | None = None,
        kv_dtype: str = "auto",
        exact: bool = False,
        tensor_parallel: int = 1,
    ) -> LongSpec:
        """Load a target by short name, hub id, folder or .gguf file.

        draft: a hub id, a folder, a .pth file, or "none". Without it, a target with a short name (`longspec
            models`) uses its own draft: the one in this package, or the published one. A short name means
            this package's draft; it also works for a fine-tuned target of the same shape.
        dtype, device: torch's, or their names. "auto" is bfloat16 on a GPU and float32 on a CPU.
        max_length: the limit on prompt plus answer; by default the model's limit, or what fits.
        revision, offline: the branch, tag or commit of a hub id; use only what is on disk.
        calibrate: measure this machine for method "auto", once.
        attention: "triton", the default on a GPU, replays whole rounds as CUDA graphs; "torch"; "reference".
        weights: how the target's weights are rounded: "float16", "bfloat16", "int8" or "int4" on a CPU,
            "int8" or "fp8" on a GPU. The target then decodes faster and says slightly other things, and every
            method says the same as vanilla with these weights. "auto" leaves them as they are, also those of
            a quantised checkpoint on a GPU (on a CPU they are expanded).
        draft_dtype: "int8" rounds the draft's weights, the default on a CPU; "target" keeps the target's
            dtype; "auto" on a GPU rounds them as the target's are.
        max_rows, kv_memory: how many prompts run at once, and how many bytes their KV may take (or
            "8GB"); the defaults depend on the device.
        kv_dtype: "fp8", for a GPU, rounds keys and values to half the bytes, so that the target says slightly
            other things (docs/decoding.md).
        exact: for half precision on a GPU. All methods give the same words there too, whatever runs at the
            same time, and rounds take longer.
        tensor_parallel: how many processes hold the target together, each a part of it on a device of its own
            (docs/tensor-parallel.md); `device` may then name them all, as "cuda:0,cuda:2".
        """
        backend = choose_backend(attention)
        check_draft_dtype(draft_dtype)  # before a long load
        kv_memory = None if kv_memory is None else num_bytes("kv_memory", kv_memory)
        target, devices = name_of("target", target), pick_devices(device, tensor_parallel)
        if len(devices) > 1:
            follow_if_told(len(devices))
        find = partial(hub.resolve, target, revision=revision, offline=offline, progress=progress)
        entry, config, precision, limit = read_shape(find, devices[0], dtype, weights, kv_dtype, backend)
        if exact and devices[0].type == "cpu":
            raise no_exact(precision.dtype, devices[0])
        if devices[0].type == "cpu" and precision.rounding is not None and attention not in ("auto", "torch"):
            raise UserError(f"attention {attention!r} does not go with rounded weights; use auto or torch")
        limit = _pick_max_length(max_length, limit)
        draft_name = name_of("draft", draft) if draft else hub.default_draft(entry)
        draft_name = None if draft_name == "none" else draft_name
        check_fits(target, config, precision, *devices)
        files = find()
        defaults = _read_defaults(files.folder)
        encoder = PromptEncoder(files.folder, files.chat_template)
        answer_ends = eos_ids(files.folder, encoder.tokenizer.eos_token_id, files.eos_id)
        path = None
        if draft_name is not None:
            path = hub.resolve_draft(draft_name, offline=offline, progress=progress)
        plan = LoadPlan(target, files.folder, config, precision, attention, path, draft_dtype)
        sizes = {"max_length": max_length, "limit": limit, "max_rows": max_rows, "kv_memory": kv_memory}
        engine = load_engine(plan, devices, progress, exact=exact, **sizes)
        loaded = cls(engine, encoder, target, defaults, answer_ends, draft_name)
        if calibrate:
            loaded.calibrate(progress)
        else:
            engine.prepare()
        return loaded

    def calibrate(self, progress: bool = False) -> None:
        """Measure this machine for method "auto", unless that was done before. Ctrl-C stops the measurement
        and does not change the model."""
        with self.engine.paused() as rows:
            costs = known_costs(rows, self.engine.candidates, progress)
        self.engine.adopt(costs)
        self.engine.prepare()

    @property
    def maker(self) -> SequenceMaker:
        size, room = self.target.config.vocab_size, self.engine.max_length
        return SequenceMaker(self.encoder, self.defaults, self.eos_ids, size, room)

    @property
    def tokenizer(self) -> Any:
        """The target's `transformers` tokenizer."""
        return self.encoder.tokenizer

    @property
    def target(self) -> Transformer:
        return self.engine.models.target

    @overload
    def generate(  # type: ignore[overload-overlap] # a str is a sequence of str, and still one prompt
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(self, prompt: Many[Prompt], **options: Unpack[Options]) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Many[Prompt], **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Answer one prompt, or a list of prompts at the same time. `Options` lists what can be set.

        A prompt is a text, a message or a list of messages, or token ids (a list or an array). Texts use the
        chat template unless `raw=True`.
        """
        prompts, batch = split_batch(prompt)
        sequences, texts = self.maker.make(prompts, read_options(options))
        with self._memory_explained(sequences):
            self.engine.run(sequences)
        results = [self._result(one, text) for one, text in zip(sequences, texts, strict=True)]
        return results if batch else results[0]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece, with the options of `generate`."""
        prompts, batch = split_batch(prompt)
        if batch:
            raise UserError(f"stream takes one prompt, but got {len(prompts)}; use generate for several")
        (sequence,), (text,) = self.maker.make(prompts, read_options(options))
        return Stream(self, sequence, text)

    def reset(self) -> None:
        """Drop the KV of all finished texts."""
        self.engine.forget()

    def close(self) -> None:
        """End the other processes that hold parts of the target, if there are any. So does the end of this
        process, or the last reference to the model."""
        self.engine.close()

    def _memory_explained(self, sequences: list[Sequence]) -> contextlib.AbstractContextManager[None]:
        longest = max(sequence.limit for sequence in sequences)
        answers = "an answer" if len(sequences) == 1 else f"{len(sequences)} answers"
        asked = f"{answers} of up to {longest} tokens, prompt included, on {self.target.device}"
        return memory_explained(asked, _WAY_OUT)

    def _result(self, sequence: Sequence, text: TextStream) -> Generation:
        method = self.engine.main_method(sequence)
        text.catch_up(sequence.tokens, sequence.finished)
        done = sequence.finished_at or time.perf_counter()
        begun = sequence.submitted_at or done  # a stream that was never read is not submitted
        return Generation(
            text=text.text,
            token_ids=list(sequence.tokens),
            finish_reason=sequence.finish_reason or "running",
            seed=sequence.seed,
            temperature=sequence.sampling.temperature,
            prompt_tokens=len(sequence.prompt),
            prefilled_tokens=len(sequence.prompt) - sequence.num_shared,
            rounds=sequence.num_rounds,
            tau=sequence.tau,
            accepted_by_depth=sequence.accepted_by_depth,
            depths=list(sequence.depths),
            seconds=done - begun,
            prefill_seconds=(sequence.first_at or done) - begun,
            method=method.name,
            label=method.label,
            tree_shape=list(method.shape) if method.shape else None,
            target=self.name,
            draft=self.draft_name if method.uses_draft else None,
            device=str(self.target.device),
            dtype=str(self.target.dtype).removeprefix("torch."),
            weights=self.target.weights,
            kv_dtype=self.target.kv,
        )


class Stream:
    """Iterate over it for pieces of text; afterwards `result` has the whole answer and the figures.

    `close`, or the end of its `with` block, stops the answer early; `result` then has what came so far.
    """

    def __init__(self, model: LongSpec, sequence: Sequence, text: TextStream) -> None:
        self._model, self._sequence, self._text = model, sequence, text
        self._pieces = _pieces(model, sequence, text)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the answer. If another thread reads this stream, its iteration ends."""
        self._model.engine.cancel(self._sequence)
        with contextlib.suppress(ValueError):  # that thread is in the middle of it
            self._pieces.close()
        if not self._sequence.finished:  # it was never submitted
            self._sequence.finish("closed")

    @property
    def result(self) -> Generation:
        """The answer so far; the whole answer at the end of the stream."""
        return self._model._result(self._sequence, self._text)


def _pieces(model: LongSpec, sequence: Sequence, text: TextStream) -> Generator[str]:
    """The text of a stream. It holds no reference to the `Stream`, so an unused stream is freed at once."""
    known = given = 0

    def has_news() -> bool:
        return sequence.finished or len(sequence.tokens) > known

    try:
        model.engine.submit([sequence])
        while not text.is_whole:
            with model._memory_explained([sequence]):
                model.engine.lead(has_news)
                if sequence.error is not None:
                    raise sequence.error
            is_final, known = sequence.finished, len(sequence.tokens)
            text.catch_up(sequence.tokens[:known], is_final)
            if len(text.text) > given:
                piece, given = text.text[given:], len(text.text)
                yield piece
    finally:
        model.engine.cancel(sequence)


def name_of(what: str, given: Any) -> str:
    name = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(name, str):
        raise UserError(f"{what} is {given!r}; a name or a path is needed")
    return name


def _read_defaults(folder: Path) -> Sampling:
    values = read_generation_config(folder)
    with naming(folder / "generation_config.json"):
        return Sampling.from_generation_config(values)


def _pick_max_length(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return limit
    wanted = whole_number("max_length", wanted)
    if not 2 <= wanted <= limit:
        raise UserError(f"max_length {wanted} must be between 2 and the target's limit of {limit} tokens")
    return wanted
