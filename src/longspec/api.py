"""The front door: load a target, generate, stream."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from longspec import hub
from longspec.attention import choose_backend
from longspec.calibration import Planner
from longspec.config import ModelConfig
from longspec.decoding.choose import Sampling
from longspec.decoding.methods.make import Drafting
from longspec.decoding.reuse import PrefixStore
from longspec.errors import UserError, naming, whole_number
from longspec.generation import Generation
from longspec.models.checkpoint import WeightFiles
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.draft_files import load_draft
from longspec.models.files import eos_ids, read_config, read_generation_config
from longspec.models.int8 import check_draft_dtype, round_linears, wants_int8
from longspec.models.layers import pack_linears
from longspec.models.load import load_target
from longspec.models.placement import check_fits, gigabytes, memory_explained, pick_device, pick_dtype
from longspec.models.target import Transformer
from longspec.progress import byte_bar
from longspec.prompts import Prompt, PromptEncoder, split_batch
from longspec.request import Engine, Options, Request

# Of a draft's vocabulary, most frequent first, a CPU reads so much; the context's own words come beside it.
_CPU_VOCAB = 8192
_SMALLER = "free some, or take a smaller dtype, a smaller target or another device"


class LongSpec:
    """A target that is loaded and ready to answer.

    The KV of the last request stays, so the next turn of a conversation, or another question about the
    same document, computes only what is new. `reset` lets it go.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

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
    ) -> LongSpec:
        """Load a target by short name, hub id, folder or .gguf file, and a draft by hub id, folder or .pth.

        Without `draft`, a target of the table (`longspec models`) brings its own: the one that comes with
        this package, or that was published for it; "none" is none. A short name stands for the package's
        draft, also for a fine-tuned target of the same shape.

        dtype and device are torch's, or their names; "auto" is bfloat16 on a GPU and float32 on a CPU.
        max_length bounds prompt plus answer; the default is what the model was made for. The first request
        with method "auto" measures this machine, once, unless `calibrate` is off. attention names a backend:
        "triton", which "auto" is on a GPU, replays whole rounds as CUDA graphs. draft_dtype "int8" rounds
        the draft's weights, which "auto" does on a CPU; "target" leaves them in the target's type.
        """
        backend = choose_backend(attention)
        check_draft_dtype(draft_dtype)  # told before a long load
        target, place = name_of("target", target), pick_device(device)
        kind = pick_dtype(dtype, place)
        find = partial(hub.resolve, target, revision=revision, offline=offline, progress=progress)
        # The config alone comes first: what cannot fit is refused before its weights are fetched.
        shape = find(config_only=True)
        entry, config = shape.entry, read_config(shape.folder, shape.config)
        limit = _pick_max_length(max_length, entry.context if entry else config.max_length)
        wanted = name_of("draft", draft) if draft else hub.default_draft(entry)
        check_fits(target, config, kind, place)
        files = find()
        folder = files.folder
        defaults, told = _read_defaults(folder), eos_ids(folder)
        encoder = PromptEncoder(folder, entry.chat_template if entry else None)
        ends = told | {encoder.tokenizer.eos_token_id, entry.eos_id if entry else None}
        model = _load_model(target, folder, config, place, kind, progress)
        model.attention = backend
        drafting: Drafting | None = None
        acceptance: dict[str, Any] = {}
        if wanted and wanted != "none":
            path = hub.resolve_draft(wanted, offline=offline, progress=progress)
            drafting, acceptance = _load_drafting(path, model, files.name, draft_dtype)
        return cls(
            Engine(
                name=files.name,
                target=model,
                encoder=encoder,
                defaults=defaults,
                eos_ids=frozenset(end for end in ends if end is not None),
                max_length=limit,
                store=PrefixStore(),
                draft=drafting,
                draft_name=wanted if drafting else None,
                plan=Planner(model, drafting, acceptance, limit, progress) if calibrate else None,
            )
        )

    @property
    def tokenizer(self) -> Any:
        """The target's `transformers` tokenizer."""
        return self.engine.encoder.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap] # a str is a sequence of str, and still one prompt
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[Options]) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Answer one prompt, or a list of them side by side; see `Options` for what can be set.

        A prompt is a text, a message or a list of them, or token ids (a list or an array); texts go through
        the chat template unless `raw=True`.
        """
        prompts, batch = split_batch(prompt)
        request = Request(self.engine, prompts, options)
        try:
            for _ in request.turns():
                pass
        finally:
            request.close()
        results = request.results()
        return results if batch else results[0]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece; options as for `generate`."""
        prompts, batch = split_batch(prompt)
        if batch:
            raise UserError(f"stream takes one prompt and was given {len(prompts)}; use generate for several")
        return Stream(Request(self.engine, prompts, options))

    def reset(self) -> None:
        """Forget the last request's KV and free its memory."""
        self.engine.store.clear()


class Stream:
    """Iterate over it for pieces of text; afterwards `result` has the whole answer and the figures.

    Closing it early, or leaving its `with` block, frees what it held; `result` then tells what came so far.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._pieces = _pieces(request)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop here."""
        self._pieces.close()

    @property
    def result(self) -> Generation:
        """The answer so far, or whole once the stream is at its end."""
        return self._request.results()[0]


def _pieces(request: Request) -> Generator[str]:
    """A stream's text. It knows nothing of the stream, so that one nobody holds any more is freed at once."""
    given = 0
    try:
        for _ in request.turns():
            text = request.texts[0].text
            if len(text) > given:
                piece, given = text[given:], len(text)
                yield piece
    finally:
        request.close()


def name_of(what: str, given: Any) -> str:
    """A target or a draft as a text: a name or a path."""
    try:
        name = os.fspath(given)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise UserError(f"{what} is {given!r}; a name or a path is needed")
    return name


def _load_model(
    name: str, folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: bool
) -> Transformer:
    """The target, from the files that are there."""
    num_bytes = config.num_parameters * dtype.itemsize
    what = f"the {gigabytes(num_bytes)} of {name} in {str(dtype).removeprefix('torch.')} on {device}"
    with (
        memory_explained(what, _SMALLER),
        WeightFiles(folder) as weights,
        byte_bar(f"Loading {name}", num_bytes, progress) as advance,
    ):
        return load_target(config, weights.tensor, device, dtype, advance)


def prepare_draft(draft: GlideDraft, target: Transformer, draft_dtype: str = "auto") -> Drafting:
    """A draft ready to decode with, and the target's head as it uses it."""
    draft.requires_grad_(False).eval()
    int8 = wants_int8(draft_dtype, draft)
    if int8:
        round_linears(draft)
    pack_linears(draft)
    ids = draft.vocab_ids
    if ids is not None and target.device.type == "cpu":
        ids = ids[:_CPU_VOCAB]
    return draft, DraftHead(target, ids, int8)


def _load_drafting(
    path: Path, target: Transformer, target_name: str, draft_dtype: str
) -> tuple[Drafting, dict[str, Any]]:
    """The draft and its head, and what is known of its acceptance."""
    with memory_explained(f"the draft {path} beside {target_name} on {target.device}", _SMALLER):
        loaded = load_draft(path, target, target_name)
        return prepare_draft(loaded.draft, target, draft_dtype), loaded.acceptance


def _read_defaults(folder: Path) -> Sampling:
    values = read_generation_config(folder)
    with naming(folder / "generation_config.json"):
        return Sampling.from_generation_config(values)


def _pick_max_length(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return limit
    wanted = whole_number("max_length", wanted)
    if not 2 <= wanted <= limit:
        raise UserError(f"max_length {wanted} must lie between 2 and the target's limit of {limit} tokens")
    return wanted
