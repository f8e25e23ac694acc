"""The settings of a training run, typed: Hydra refuses unknown names and wrong values by these classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict


@dataclass
class TargetSettings:
    """The frozen model that the draft is for."""

    path: str = MISSING
    """A short name, a folder, a .gguf file or a hub id."""
    dtype: str = "auto"
    device: str = "auto"
    tp_size: int = 1
    """Over how many processes the target's heads are split."""


@dataclass
class DraftSettings:
    """The draft: `path` continues one (a run, a draft folder, a .pth), else a fresh one is made so."""

    path: str | None = None
    window: int = 512
    max_lag: int = 8
    cross_layers: list[int] = field(default_factory=lambda: [-1])
    use_feature: bool = False
    qkv_bias: bool = True
    final_norm: bool = False
    draft_vocab: int = 0
    """How many of the training data's most frequent tokens its head can propose; 0 is all."""
    intermediate_size: int = 0
    """The width of its feed-forward; 0 is the target's."""
    lag_gate: bool = False
    """Whether it is told how far it lags; by that, what the hidden state adds is scaled and shifted."""


@dataclass
class StageSettings:
    """What is learnt, from how much, how fast."""

    name: str = MISSING
    seq_length: int = MISSING
    collator: str = MISSING
    """base, long or cot."""
    mask_prompt: bool = False
    num_steps: int | None = None
    """Optimizer steps; without it `epochs` decides."""
    epochs: float = 1.0
    micro_batch: int = 1
    """Sequences of one process at a time."""
    accumulation: int = 1
    """Micro-batches of a step."""
    lags: int = 1
    """From so many lags the draft learns each sequence that the target reads: the target reads it once."""
    lag_decay: float = 1.0
    """How often a lag is drawn, as a share of how often the one below it is. A token that is wrong ends its
    branch, so the first ones matter most."""
    lr: float = MISSING
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises."""
    final_lr: float = 0.1
    """Where its cosine ends, as a share of `lr`."""
    optimizer: str = "adamw"
    """adamw, or muon, by which matrices learn from fewer tokens; `lr` is Adam's in both cases."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    soft: float = 0.0
    """Share of the KL divergence from the target in the loss; the rest is cross-entropy."""
    num_sinks: int = 4
    max_offset: int = 0
    """Largest anchor offset; 0 is none, -1 as far as the target's context goes."""


@dataclass
class DataSettings:
    """Datasets made by `longspec data`."""

    train: list[str] = MISSING
    """Folders of the stage's sequence length, or of shorter ones that it is a multiple of."""
    num_held_out: int = 16
    """Sequences of the last folder kept from training; acceptance is measured on what the target says to
    their beginnings."""


@dataclass
class EvaluationSettings:
    """Acceptance as decoding will see it, on continuations that the target wrote greedily."""

    every: int = 200
    """Steps; 0 is never."""
    prompt_tokens: int = 128
    new_tokens: int = 64
    gamma: int = 4


@dataclass
class SavingSettings:
    """Checkpoints and the progress line."""

    save_steps: int = 200
    keep: int = 3
    log_steps: int = 10
    max_seconds: float = 0.0
    """After so many, save and stop; resume=latest goes on. 0 is no limit."""


@dataclass
class LoggerSettings:
    """Besides metrics.jsonl, which is always written."""

    tensorboard: bool = False
    wandb: str = "disabled"
    """online, offline or disabled."""
    project: str = "longspec"


@dataclass
class DeepSpeedSettings:
    """Handed to DeepSpeed as it is; batch sizes, optimizer and precision are filled in."""

    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainSettings:
    """Everything."""

    name: str = "run"
    run: str = "outputs/${name}"
    """The folder that the run writes."""
    seed: int = 0
    resume: str | None = None
    """latest: go on from the newest whole checkpoint, or start where there is none."""
    compile: bool = False
    """Let torch.compile fuse the target's and the draft's layers (GPU)."""
    target: TargetSettings = field(default_factory=TargetSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
    stage: StageSettings = field(default_factory=StageSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    saving: SavingSettings = field(default_factory=SavingSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    deepspeed: DeepSpeedSettings = field(default_factory=DeepSpeedSettings)
    stages: dict[str, list[str]] = field(default_factory=dict)
    """What `stage=all` runs in a row: a name for each stage and the overrides that make it."""


_MORE = with_config(ConfigDict(extra="allow"))


@_MORE
class _Target(TypedDict):
    path: str
    dtype: str


@_MORE
class _Draft(TypedDict):
    path: str | None


@_MORE
class _Stage(TypedDict):
    name: str
    seq_length: int
    lr: float


@_MORE
class _Data(TypedDict):
    train: list[str]


@_MORE
class RunSettings(TypedDict):
    """Of the settings that a run wrote down, what others read; the rest is only compared."""

    target: _Target
    draft: _Draft
    stage: _Stage
    data: _Data
