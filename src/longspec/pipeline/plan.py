"""The plan of a draft: what the target writes, the stages of training, and the cost.

It is a pure function of the target's config, the device and the options. Times are estimates from the
arithmetic and the bytes of the work, and from the shares of a device's speed that SmolLM2-135M reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from longspec.config import DraftConfig, ModelConfig
from longspec.errors import UserError
from longspec.models.copying import NUM_CROSS_LAYERS
from longspec.train.memory import fitting_micro_batch, state_bytes, working_bytes

TEMPERATURES = (0.0, 0.3, 0.7)
# Tokens of a short sequence; a stage with fewer steps gets smaller ones.
_SHORT, _LEAST_STEPS = 1024, 100
# Tokens of a step: small steps teach more with the same text (docs/measurements/training.md).
_STEP_TOKENS = {"base": 16384, "long": 65536}
# A dataset with fewer short or long sequences gets shorter ones, down to the shortest.
_SHORT_SEQUENCES, _LONG_SEQUENCES, _SHORTEST = 64, 4, 128
_LEAST_TOKENS = _SHORT_SEQUENCES * _SHORTEST
# How often a stage sees each written token.
_EPOCHS = {"base": 4, "long": 2}
_RATES = {"base": 1e-3, "long": 5e-4}
# The learning rate of the first stage, if it starts from another draft.
_RATE_FROM_DRAFT = 5e-4
# The share of the device's speed that writing and training reach.
_WRITING, _TRAINING = {"cuda": 0.2, "cpu": 0.25}, {"cuda": 0.45, "cpu": 0.6}
# Seconds that a turn of the engine and a micro-batch take on the host, for any target.
_TURN, _PASS = {"cuda": 2e-3, "cpu": 1e-2}, {"cuda": 2e-2, "cpu": 5e-2}
# Bytes that are read and written for each score while a token is chosen.
_SCORE_BYTES = 32
# The share of a budget for writing and training; the rest is for loading, preparing and measuring.
_PLANNED = 0.85
# The assumed size of the draft's vocabulary; the data decide the real one.
_VOCABULARY = 32768
_ROWS = {"cuda": 1024, "cpu": 32}
# A kill loses the shard that is being written, so a dataset has several shards. On a GPU a shard has several
# answers for each row, because most rows are empty while the last answers of a shard are written.
_SHARDS, _ANSWERS_PER_ROW = 8, {"cuda": 8, "cpu": 0}
_LEAST_SHARD, _MOST_SHARD, _SAMPLES_PER_SEQUENCE = 16, 8192, 4
# Bytes on disk for each written token: its id, its role, and the texts beside them.
_TOKEN_BYTES = 8


@dataclass(frozen=True)
class DeviceFacts:
    """The device that everything runs on."""

    type: str
    name: str
    free_memory: int
    flops: float
    """Operations per second of large matrix products."""
    bandwidth: float
    """Bytes read and written per second."""
    itemsize: int
    """Bytes of a weight."""


@dataclass(frozen=True)
class WrittenPlan:
    """A dataset that the target writes."""

    name: str
    mode: str
    """A mode of `longspec data synthesize`: prompts, questions or documents."""
    source: str | None
    """The file in the work folder that it answers or continues."""
    tokens: int
    seq_length: int
    max_new_tokens: int
    given_tokens: int
    """How many tokens of a document are given to be continued."""
    shard_samples: int
    """How many samples a shard has."""
    seconds: float


@dataclass(frozen=True)
class StagePlan:
    """A stage of training."""

    name: str
    datasets: list[str]
    seq_length: int
    batch: int
    micro_batch: int
    """How many sequences fit into memory at once; training decides again."""
    steps: int
    lr: float
    seconds: float

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.seq_length


@dataclass(frozen=True)
class Plan:
    """All that `longspec draft` will do."""

    target: str
    has_template: bool
    device: DeviceFacts
    written: list[WrittenPlan]
    stages: list[StagePlan]
    num_cross_layers: int
    """How many of the target's layers the draft reads."""
    cross_layers: list[int] | None
    """Which ones, if a draft is trained on; for a new draft, training chooses them by measurement."""
    max_lag: int
    window: int
    draft_parameters: int
    num_prompts: dict[str, int]
    """How many prompts each file has."""
    max_new_tokens: int
    """The longest answer when the draft is measured."""
    memory: int
    disk: int
    seconds: float
    is_limited: bool
    """Whether a budget of time limits the work; otherwise a number of tokens does."""

    @property
    def tokens(self) -> int:
        """All tokens of the written datasets, with their prompts."""
        return sum(one.tokens for one in self.written)


@dataclass(frozen=True)
class _Kind:
    """A kind of dataset, the same for every target."""

    share: float
    mode: str
    source: str | None
    is_long: bool
    new: float
    """The longest answer, as a share of the sequence."""
    given: float = 0.0
    written: float = 0.75
    """About the share of its tokens that the target writes; the rest is given."""


# Tokens of the longest answer; few would be longer.
_LONGEST_ANSWER = 2048
# In the order in which they are written: passages first, because the prompts of the others quote them.
_KINDS = {
    "passages": _Kind(0.08, "prompts", "passage_prompts", False, 0.75, written=0.9),
    "long_asked": _Kind(0.12, "prompts", "long_prompts", True, 0.0625, written=0.15),
    "long_continued": _Kind(0.04, "documents", "documents", True, 0.125, 0.7, written=0.15),
    "continued": _Kind(0.1, "documents", "documents", False, 0.5, 0.25),
    "questions": _Kind(0.21, "questions", None, False, 0.5, written=0.8),
    "asked": _Kind(0.45, "prompts", "prompts", False, 0.5),
}
# While it trains, a stage is measured on its last dataset.
_STAGES = {
    "base": ("passages", "continued", "questions", "asked"),
    "long": ("passages", "long_continued", "long_asked"),
}


def make_plan(
    target: str,
    config: ModelConfig,
    device: DeviceFacts,
    *,
    has_template: bool = True,
    seconds: float | None = None,
    tokens: int | None = None,
    from_draft: DraftConfig | None = None,
) -> Plan:
    """The plan for a time or for a number of tokens."""
    draft = from_draft or DraftConfig(
        max_lag=6,
        cross_layers=tuple(range(min(NUM_CROSS_LAYERS, config.num_layers))),  # only their number counts here
        use_feature=True,
        qkv_bias=False,
        final_norm=True,
        draft_vocab=min(_VOCABULARY, config.vocab_size),
        lag_gate=True,
        use_parent=True,
    )
    planner = _Planner(target, config, device, draft, has_template, from_draft is not None)
    if tokens is None:
        assert seconds is not None
        limit = _PLANNED * seconds
        if (least := planner.plan(_LEAST_TOKENS, True).seconds) > limit:
            raise UserError(
                f"a budget of {seconds:g} seconds is too short on {device.name}; about "
                f"{math.ceil(least / _PLANNED):,} seconds are needed, and far more for a good draft"
            )
        # Bisected, because the lengths depend on the tokens and the times on the lengths.
        tokens, above = _LEAST_TOKENS, 2 * _LEAST_TOKENS
        while planner.plan(above, True).seconds <= limit:
            tokens, above = above, 2 * above
        for _ in range(12):
            middle = (tokens + above) // 2
            fits = planner.plan(middle, True).seconds <= limit
            tokens, above = (middle, above) if fits else (tokens, middle)
        plan = planner.plan(tokens, True)
        return replace(plan, seconds=seconds)
    if tokens < _LEAST_TOKENS:
        raise UserError(f"tokens is {tokens}; at least {_LEAST_TOKENS:,} are needed")
    return planner.plan(tokens, False)


class _Planner:
    """Plans for one target on one device."""

    def __init__(
        self,
        target: str,
        config: ModelConfig,
        device: DeviceFacts,
        draft: DraftConfig,
        has_template: bool,
        continues: bool,
    ) -> None:
        self._target, self._config, self._device, self._draft = target, config, device, draft
        self._has_template, self._continues = has_template, continues
        self._free = device.free_memory - state_bytes(config, draft, device.itemsize)
        if config.max_length < _SHORTEST:
            raise UserError(
                f"{target} has a context of {config.max_length} tokens; at least {_SHORTEST} are needed"
            )
        if self._free <= self._working(_SHORTEST):
            raise UserError(
                f"{target} and a draft take more than the {device.free_memory / 1e9:.1f} GB that are free on "
                f"{device.name}; use a smaller target or a larger device"
            )

    def plan(self, tokens: int, is_limited: bool) -> Plan:
        kinds = self._kinds()
        total = sum(kind.share for kind in kinds.values())
        sizes = {name: int(tokens * kind.share / total) for name, kind in kinds.items()}
        short = self._short_length(sum(size for name, size in sizes.items() if not kinds[name].is_long))
        long = self._long_length(sum(size for name, size in sizes.items() if kinds[name].is_long), short)
        if long is None:  # too little to write for long sequences
            kinds = {name: kind for name, kind in kinds.items() if not kind.is_long}
        written = [
            self._written(name, kind, sizes[name], long or short if kind.is_long else short)
            for name, kind in kinds.items()
        ]
        stages = [self._stage("base", written, short)]
        if long is not None:
            stages.append(self._stage("long", written, long))
        layers, parameters = self._draft.layers_of(self._config), self._draft.num_parameters(self._config)
        used = sum(one.seconds for one in written) + sum(stage.seconds for stage in stages)
        by_name = {one.name: one for one in written}
        prompts = {
            kind.source: self._num_prompts(by_name[name])
            for name, kind in kinds.items()
            if kind.source not in (None, "documents")
        }
        largest = max(self._working(stage.micro_batch * stage.seq_length) for stage in stages)
        return Plan(
            target=self._target,
            has_template=self._has_template,
            device=self._device,
            written=written,
            stages=stages,
            num_cross_layers=len(layers),
            cross_layers=list(layers) if self._continues else None,
            max_lag=self._draft.max_lag,
            window=self._draft.window,
            draft_parameters=parameters,
            num_prompts={str(name): number for name, number in prompts.items()},
            max_new_tokens=256 if self._device.type == "cuda" else 64 if tokens >= 100_000 else 16,
            memory=state_bytes(self._config, self._draft, self._device.itemsize) + largest,
            # Two checkpoints of each stage, while the second one is written, and the draft itself.
            disk=tokens * _TOKEN_BYTES + parameters * (2 * 18 * len(stages) + 8),
            seconds=used,
            is_limited=is_limited,
        )

    def _kinds(self) -> dict[str, _Kind]:
        """A target without a chat template continues documents. For it, prompts are documents too."""
        if self._has_template:
            return _KINDS
        return {
            name: replace(kind, mode="documents", given=kind.given or 1 - kind.new - 0.05)
            for name, kind in _KINDS.items()
            if kind.mode != "questions"
        }

    def _short_length(self, tokens: int) -> int:
        length = min(_SHORT, 2 ** (self._config.max_length.bit_length() - 1))
        while length > _SHORTEST and tokens < _SHORT_SEQUENCES * length:
            length //= 2
        return length

    def _long_length(self, tokens: int, short: int) -> int | None:
        """The target's whole context, or as much as memory and tokens allow; None if that is not long."""
        length = self._config.max_length // short * short
        while length > short and (
            tokens < _LONG_SEQUENCES * length or self._working(length) > 0.8 * self._free
        ):
            length = max(short, length // 2 // short * short)
        return length if length > short else None

    def _working(self, num_tokens: int) -> int:
        return working_bytes(self._config, self._draft, self._device.itemsize, num_tokens, self._device.type)

    def _written(self, name: str, kind: _Kind, tokens: int, length: int) -> WrittenPlan:
        return WrittenPlan(
            name=name,
            mode=kind.mode,
            source=kind.source,
            tokens=max(1, tokens),
            seq_length=length,
            max_new_tokens=min(_LONGEST_ANSWER, max(16, int(kind.new * length))),
            given_tokens=max(1, min(int(kind.given * length), length - 32)),
            shard_samples=self._shard_samples(kind, tokens, length),
            seconds=round(tokens / self._writing_rate(kind, length), 1),
        )

    def _shard_samples(self, kind: _Kind, tokens: int, length: int) -> int:
        samples, rows = tokens // (length // _SAMPLES_PER_SEQUENCE), int(self._rows(length))
        if kind.is_long:  # the next question about a long text finds its KV in memory
            return max(_LEAST_SHARD, min(samples, rows))
        at_once = _ANSWERS_PER_ROW[self._device.type] * rows
        return min(_MOST_SHARD, max(_LEAST_SHARD, samples // _SHARDS, min(samples, at_once)))

    def _rows(self, length: int) -> float:
        """How many sequences are written at a time."""
        per_token = self._config.kv_bytes_per_token(self._device.itemsize)
        room = max(1.0, 0.7 * self._free / (length * per_token))
        return min(float(_ROWS[self._device.type]), room)

    def _writing_rate(self, kind: _Kind, length: int) -> float:
        """Tokens of a dataset per second, with the given ones."""
        config, device = self._config, self._device
        context = length * max(1 / 3, kind.given)
        per_token = config.kv_bytes_per_token(device.itemsize)
        weights = config.num_parameters * device.itemsize
        rows = self._rows(length)
        scores = rows * _SCORE_BYTES * config.vocab_size
        moved = weights + scores + rows * context * per_token
        step = max(moved / device.bandwidth, self._reading(rows, context))
        share = _WRITING[device.type]
        writing = kind.written * (step / share + _TURN[device.type]) / rows
        return 1 / (writing + (1 - kind.written) * self._reading(1, context / 2) / share)

    def _reading(self, num_tokens: float, context: float) -> float:
        """Seconds of arithmetic for `num_tokens` tokens after a context."""
        config = self._config
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
        return num_tokens * (2 * config.num_parameters + attention) / self._device.flops

    def _stage(self, name: str, written: list[WrittenPlan], length: int) -> StagePlan:
        datasets = [one for one in written if one.name in _STAGES[name]]
        tokens = _EPOCHS[name] * sum(one.tokens for one in datasets)
        step = min(_STEP_TOKENS[name], max(length, tokens // _LEAST_STEPS))
        batch = 2 ** (max(1, step // length).bit_length() - 1)
        steps = max(1, tokens // (batch * length))
        rate = _RATE_FROM_DRAFT if self._continues and name == "base" else _RATES[name]
        micro = fitting_micro_batch(
            self._config, self._draft, self._device.itemsize, length, batch, self._free, self._device.type
        )
        kinds, all_tokens = self._kinds(), sum(one.tokens for one in datasets)
        learnt = sum(one.tokens * kinds[one.name].written for one in datasets) / all_tokens
        seconds = steps * batch * length / self._training_rate(length, learnt)
        seconds += steps * batch / micro * _PASS[self._device.type]
        return StagePlan(
            name, [one.name for one in datasets], length, batch, micro, steps, rate, round(seconds, 1)
        )

    def _training_rate(self, length: int, learnt: float) -> float:
        """Tokens per second: the target reads, and where something is learnt, the draft learns and both heads
        score."""
        scores = 6 * self._config.hidden_size * (self._draft.draft_vocab or self._config.vocab_size)
        learning = 6 * self._draft.num_parameters(self._config) + scores
        num_lags = self._draft.max_lag if self._draft.use_parent else 1
        seconds = self._reading(1, length / 2) + learnt * num_lags * learning / self._device.flops
        return _TRAINING[self._device.type] / seconds

    def _num_prompts(self, written: WrittenPlan) -> int:
        """The number of prompts: one for each expected sample, and some more."""
        per_sample = written.seq_length // (4 if written.seq_length <= _SHORT else 3)
        return max(48, written.tokens // max(1, per_sample))
