"""Load what the settings name: target, draft and data, each checked against the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch

from longspec import hub
from longspec.config import DraftConfig
from longspec.data.shards import tokenizer_fingerprint
from longspec.errors import UserError, shown
from longspec.models.copying import copying_layers, copying_scores
from longspec.models.draft_files import read_draft_config
from longspec.models.pair import Pair, load_pair
from longspec.models.placement import pick_dtype
from longspec.models.target import Transformer
from longspec.prompts import PromptEncoder
from longspec.train.checkpoints import draft_of, newest
from longspec.train.layout import Draws
from longspec.train.samples import COVERAGE, Mixture
from longspec.train.schema import StageSettings, TrainSettings

_LEAST = {
    "stage.batch": 1,
    "stage.micro_batch": 0,  # as many as fit
    "stage.accumulation": 1,
    "stage.lags": 1,
    "stage.num_steps": 1,
    "data.num_held_out": 0,
    "saving.save_steps": 1,
    "saving.keep": 1,
    "saving.log_steps": 1,
    "evaluation.every": 0,  # never
    "evaluation.new_tokens": 1,
    "evaluation.gamma": 1,
    "evaluation.prompt_tokens": 1,
}


@dataclass(frozen=True)
class Parts:
    """The models and the data of a run."""

    pair: Pair
    mixture: Mixture
    draws: Draws


def build(settings: TrainSettings, device: torch.device, partitioned: bool) -> Parts:
    """Load or make all parts. A `partitioned` target stays on the CPU until it is sharded."""
    path = settings.draft.path
    start = None if path is None else draft_of(path)
    # Names first, because a wrong one is found at once.
    hub.resolve(settings.target.path, config_only=True)
    if start is not None:
        hub.resolve_draft(start)
    mixture = Mixture(settings.data.train, settings.stage.seq_length)
    _check(settings, mixture)
    load_device = torch.device("cpu") if partitioned else device
    dtype = pick_dtype(settings.target.dtype, load_device)
    shape = _new_draft(settings, mixture) if path is None else None
    pair = load_pair(settings.target.path, start, shape, load_device, dtype, seed=settings.seed)
    config, draft = pair.target.config, pair.draft
    tokenizer = PromptEncoder(hub.resolve(settings.target.path).folder).tokenizer
    mixture.check(config.vocab_size, tokenizer_fingerprint(tokenizer), settings.target.path)
    if draft.vocab_ids is not None and path is None:
        ids = mixture.frequent(len(draft.vocab_ids), sorted(pair.eos_ids), config.vocab_size)
        draft.vocab_ids.copy_(torch.from_numpy(ids))
    gamma, max_lag = settings.evaluation.gamma, draft.config.max_lag
    if settings.evaluation.every and gamma > max_lag:
        raise UserError(f"evaluation.gamma is {gamma} and the draft has {max_lag} lags (draft.max_lag)")
    draft.to(device)
    return Parts(pair, mixture, _draws(settings.stage, draft.config, config.max_length))


def _new_draft(
    settings: TrainSettings, mixture: Mixture
) -> DraftConfig | Callable[[Transformer], DraftConfig]:
    """The shape of a new draft. If the settings name no layers for it to read, the target decides."""
    shape = asdict(settings.draft)
    del shape["path"]
    if shape["draft_vocab"] < 0:
        shape["draft_vocab"] = mixture.covering_size(COVERAGE)
    if shape["cross_layers"]:
        return DraftConfig(**shape)
    del shape["cross_layers"]
    rest = DraftConfig(**shape)  # now, so that bad values are refused before the target is loaded
    checkpoint = newest(Path(settings.run)) if settings.resume == "latest" else None
    if checkpoint is not None:
        # Not measured again: another device rounds differently, and might choose other layers.
        return replace(rest, cross_layers=read_draft_config(checkpoint / "draft").cross_layers)
    return lambda target: replace(rest, cross_layers=copying_layers(copying_scores(target)))


def _check(settings: TrainSettings, mixture: Mixture) -> None:
    stage, data = settings.stage, settings.data
    for name, value in asdict(stage).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"stage.{name} is {value}; a finite number is needed")
    if not 0 <= settings.seed < 2**32:
        raise UserError(f"seed is {shown(settings.seed)}; it must lie between 0 and {2**32 - 1}")
    for name, least in _LEAST.items():
        value = attrgetter(name)(settings)
        if value is not None and not least <= value < 2**31:
            raise UserError(f"{name} is {shown(value)}; it must be at least {least}, and below {2**31}")
    if not 0 < stage.lag_decay <= 1:
        raise UserError(f"stage.lag_decay is {stage.lag_decay}; it is a share, above 0 and at most 1")
    if stage.lag_decay < 1 and stage.lags > 1:
        raise UserError(
            f"stage.lags is {stage.lags} and stage.lag_decay is {stage.lag_decay}: several lags are "
            "spread evenly over the range, so stage.lag_decay must be 1"
        )
    if min(stage.soft, stage.overlap) < 0 or stage.soft + stage.overlap > 1:
        raise UserError(
            f"stage.soft is {stage.soft} and stage.overlap is {stage.overlap}: they are shares, from 0 to 1, "
            "and at most 1 together"
        )
    if stage.optimizer not in ("adamw", "muon"):
        raise UserError(f"stage.optimizer is {stage.optimizer!r}; there are adamw and muon")
    if stage.lr <= 0:
        raise UserError(f"stage.lr is {stage.lr}; it must be above 0")
    if data.num_held_out >= len(mixture):
        raise UserError(
            f"data.num_held_out is {data.num_held_out}, and {mixture.described}: none would be left to train "
            f"on; lower stage.seq_length or data.num_held_out"
        )
    if settings.evaluation.every and not data.num_held_out:
        raise UserError("evaluation needs held-out sequences: set data.num_held_out, or evaluation.every=0")
    last = data.train[-1]
    if data.num_held_out and [Path(one).resolve() for one in data.train].count(Path(last).resolve()) > 1:
        raise UserError(
            f"data.train names {last} twice, and the held-out sequences are at its end, so they would be "
            "learnt: put another folder last, or set data.num_held_out=0"
        )


def _draws(stage: StageSettings, draft: DraftConfig, max_length: int) -> Draws:
    room = max(0, max_length - stage.seq_length)
    if stage.seq_length > max_length:
        raise UserError(f"stage.seq_length {stage.seq_length} exceeds the target's context of {max_length}")
    if stage.max_offset > room:
        raise UserError(
            f"stage.max_offset {stage.max_offset} goes past the target's context of {max_length}: with "
            f"{stage.seq_length} tokens it can be at most {room}"
        )
    offset = room if stage.max_offset < 0 else stage.max_offset
    if stage.lags > draft.max_lag:
        raise UserError(f"stage.lags is {stage.lags} and the draft has {draft.max_lag} (draft.max_lag)")
    if draft.use_parent and stage.lags > 1:
        raise UserError(
            f"stage.lags is {stage.lags}, and a draft with use_parent learns all lags of a sequence: set "
            "stage.lags=1"
        )
    return Draws(
        draft.max_lag, draft.window, stage.num_sinks, offset, stage.lags, stage.lag_decay, draft.use_parent
    )
