"""The target writes its own training data: with no dataset at all, or from prompts and documents."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longspec import hub
from longspec.config import ModelConfig
from longspec.data.samples import MODES, JsonLines, Mix, Script, read_document, read_prompt
from longspec.data.shards import is_finished, tokenizer_fingerprint
from longspec.data.synthesis import Output, SynthesisSummary, begin, make_dataset, summary_of
from longspec.decoding.sampling import Sampling
from longspec.engine.make import make_engine
from longspec.engine.memory import kv_bytes
from longspec.errors import UserError
from longspec.models.checkpoint import WeightFiles
from longspec.models.files import eos_ids, read_config
from longspec.models.load import load_target
from longspec.models.placement import check_fits, free_memory, pick_device, pick_dtype
from longspec.progress import byte_bar, token_bar
from longspec.prompts import PromptEncoder
from longspec.records import read_record

# Rows at once: as many as fit into this share of the free memory, up to these.
_MEMORY_SHARE = 0.7
_BATCH = {"cuda": 2048, "cpu": 32}
# Samples of a shard per row: enough that the few rows at work at its end hardly count.
_SAMPLES_PER_ROW = 16
_FILES = {"prompts": read_prompt, "documents": read_document}


@dataclass(frozen=True)
class Request:
    """What `longspec data synthesize` is asked for."""

    output: Path
    tokens: int
    target: str = hub.DEFAULT_TARGET
    revision: str | None = None
    offline: bool = False
    modes: dict[str, float] | None = None
    """Shares of the modes; questions alone where it is None."""
    prompts: Path | None = None
    documents: Path | None = None
    prefixes: Path | None = None
    """A file with a beginning per line; each question starts with one."""
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7, 1.0)
    question_temperature: float = 1.0
    max_new_tokens: int = 512
    max_question_tokens: int = 128
    given_tokens: int = 256
    seq_length: int = 1024
    batch: int | None = None
    shard_samples: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    licence: str | None = None
    seconds: float | None = None
    """After so many, the shard at hand is the last one, and the dataset is finished with what there is."""

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "max_question_tokens", "given_tokens", "seq_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("batch", "shard_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seconds is not None and not self.seconds >= 0:
            raise UserError(f"seconds is {self.seconds}; it must be 0 or more")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must fit into 64 bits")
        if not self.temperatures:
            raise UserError("temperatures is empty; give at least one, such as 0.7")
        for temperature in (*self.temperatures, self.question_temperature):
            Sampling(temperature)
        shares = self.shares
        for mode, share in shares.items():
            if mode not in MODES or not 0 <= share < float("inf"):
                raise UserError(f"mode {mode}:{share} is unknown; shares of {', '.join(MODES)} are needed")
        if not sum(shares.values()):
            raise UserError("all shares of the modes are 0; give one a share")
        for mode in _FILES:
            if bool(shares.get(mode)) != (getattr(self, mode) is not None):
                raise UserError(f"mode {mode} and its file belong together: --mode {mode}:1 --{mode} FILE")
        if self.prefixes is not None and not shares.get("questions"):
            raise UserError("--prefixes are for questions; give --mode questions a share")
        if self.seq_length < 64 or (shares.get("documents") and self.given_tokens > self.seq_length - 32):
            raise UserError(
                f"seq_length is {self.seq_length}; it must be at least 64, and 32 above given_tokens"
            )

    @property
    def shares(self) -> dict[str, float]:
        """`modes`, or the default."""
        return self.modes or {"questions": 1.0}


def synthesize(request: Request, progress: bool = False) -> SynthesisSummary:
    """Make the dataset, or go on where an earlier run was stopped; returns what came of it."""
    place = pick_device(request.device)
    kind = pick_dtype(request.dtype, place)
    files = {
        mode: JsonLines(path, check) for mode, check in _FILES.items() if (path := getattr(request, mode))
    }
    topics = _read_topics(request.prefixes) if request.prefixes else ()
    settings = begin(request.output, _settings(request, place, kind, files, topics))
    if is_finished(request.output):
        return summary_of(request.output)
    found, config = _find(request, place, kind, progress)
    encoder = PromptEncoder(found.folder, found.entry.chat_template if found.entry else None)
    known = None if found.entry is None else found.entry.eos_id
    told = eos_ids(found.folder) | (set() if known is None else {known})
    script = Script(_mix(request), encoder, files.get("prompts"), files.get("documents"), topics, told)
    num_bytes = config.num_parameters * kind.itemsize
    label = f"Loading {request.target}"
    with WeightFiles(found.folder) as weights, byte_bar(label, num_bytes, progress) as advance:
        target = load_target(config, weights.tensor, place, kind, advance)
    batch = settings["batch"] or _pick_batch(config, request.seq_length, place, kind)
    output = Output(
        folder=request.output,
        num_tokens=request.tokens,
        shard_samples=request.shard_samples or _SAMPLES_PER_ROW * batch,
        seq_length=request.seq_length,
        vocab_size=config.vocab_size,
        pad_id=encoder.tokenizer.pad_token_id or 0,
        tokenizer=tokenizer_fingerprint(encoder.tokenizer),
        source=f"written by {request.target}",
        licence=request.licence or _licence(found.folder),
        settings=settings | {"batch": batch},
    )
    # So many pages that nobody waits for one: what is free now must not decide what is written.
    pages = kv_bytes(config, kind, batch, request.seq_length)
    engine = make_engine(target, max_length=request.seq_length, max_rows=batch, kv_memory=pages)
    with token_bar("Writing", request.tokens, progress) as update:
        return make_dataset(output, script, engine, update, request.seconds)


def _find(
    request: Request, place: torch.device, kind: torch.dtype, progress: bool
) -> tuple[hub.TargetFiles, ModelConfig]:
    """The target's files; what does not fit is refused before its weights are fetched."""
    find = partial(
        hub.resolve, request.target, revision=request.revision, offline=request.offline, progress=progress
    )
    shape = find(config_only=True)
    config = read_config(shape.folder, shape.config)
    if request.seq_length > config.max_length:
        raise UserError(
            f"seq_length is {request.seq_length}; {request.target} was made for at most {config.max_length}"
        )
    check_fits(request.target, config, kind, place)
    return find(), config


def _mix(request: Request) -> Mix:
    values = {field.name: getattr(request, field.name) for field in fields(Mix)}
    return Mix(**values | {"modes": request.shares})


def _settings(
    request: Request,
    place: torch.device,
    kind: torch.dtype,
    files: dict[str, JsonLines],
    topics: tuple[str, ...],
) -> dict[str, Any]:
    """All that decides what is written, as JSON would give it back."""
    own = {"output", "offline", "seconds", "device", "dtype", "modes", "temperatures", "prefixes", *_FILES}
    plain = [field.name for field in fields(Request) if field.name not in own]
    return {name: getattr(request, name) for name in plain} | {
        "modes": request.shares,
        "temperatures": list(request.temperatures),
        "prefixes": list(topics),
        "device": place.type,
        "dtype": str(kind).removeprefix("torch."),
        **{name: f"{lines.path.name} {lines.fingerprint}" for name, lines in files.items()},
    }


def _read_topics(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    topics = tuple(line.strip() for line in lines if line.strip())
    if not topics:
        raise UserError(f"{path} is empty; a beginning of a question per line is needed")
    return topics


def _pick_batch(config: ModelConfig, seq_length: int, place: torch.device, kind: torch.dtype) -> int:
    """The largest power of two that memory has room for."""
    batch, room = _BATCH[place.type], _MEMORY_SHARE * free_memory(place)
    # Beside its pages, a row has its scores, a few times over while a token is drawn.
    while batch > 1 and kv_bytes(config, kind, batch, seq_length) + 16 * batch * config.vocab_size > room:
        batch //= 2
    return batch


def _licence(folder: Path) -> str:
    """What the model's files say it is under."""
    if (folder / "longspec.json").is_file():
        told = read_record(folder / "longspec.json", dict[str, Any]).get("license")
        if told:
            return str(told)
    card = folder / "README.md"
    if card.is_file():
        found = re.search(
            r"^license:\s*(\S+)", card.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        if found:
            return found[1]
    return "unknown"
