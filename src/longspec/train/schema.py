"""The typed settings of a training run. With these classes Hydra refuses unknown names and wrong types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class TargetSettings:
    """The frozen model that the draft is for."""

    path: str = MISSING
    """A short name, a folder, a .gguf file or a hub id."""
    dtype: str = "auto"
    device: str = "auto"
    tp_size: int = 1
    """The number of processes over which the target's heads are split."""


@dataclass
class DraftSettings:
    """`path` continues a draft (a run, a draft folder, a .pth); without it, a new one gets this shape.

    The values here are GLIDE as published; the group `draft` has ours.
    """

    path: str | None = None
    window: int = 512
    max_lag: int = 8
    cross_layers: list[int] = field(default_factory=lambda: [-1])
    """The target's layers whose KV it reads; none is five layers, chosen by measurement."""
    use_feature: bool = False
    qkv_bias: bool = True
    final_norm: bool = False
    draft_vocab: int = 0
    """How many of the training data's most frequent tokens its head can propose; 0 is all, -1 as many as
    cover 99% of what is learnt."""
    intermediate_size: int = 0
    """The width of its feed-forward; 0 is the target's."""
    lag_gate: bool = False
    """Whether what the hidden state adds is scaled and shifted by vectors for each lag."""
    use_parent: bool = False
    """Whether a node also reads the draft's hidden state at its parent."""


@dataclass
class StageSettings:
    """What is learnt, from how many tokens, and how fast."""

    name: str = MISSING
    seq_length: int = MISSING
    collator: str = MISSING
    """base, long or cot."""
    mask_prompt: bool = False
    num_steps: int | None = None
    """Optimizer steps; without it, `epochs` decides."""
    epochs: float = 1.0
    batch: int = 64
    """Sequences per step, of all processes together, if `micro_batch` is 0."""
    micro_batch: int = 0
    """Sequences per process at a time; 0 is as many of `batch` as fit into memory."""
    accumulation: int = 1
    """Micro-batches per step, if `micro_batch` is given."""
    lags: int = 1
    """The draft learns each sequence with this many lags, for one pass of the target."""
    lag_decay: float = 1.0
    """How often a lag is drawn, relative to the lag below it. Low lags matter most, because a wrong token
    ends its branch."""
    lr: float = MISSING
    warmup: float = 0.02
    """The share of the steps in which the learning rate rises."""
    final_lr: float = 0.1
    """The end of the learning rate's cosine, as a share of `lr`."""
    optimizer: str = "adamw"
    """adamw, or muon, with which matrices learn from fewer tokens; `lr` is Adam's in both cases."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    soft: float = 0.0
    """The share of the KL divergence from the target in the loss."""
    overlap: float = 0.0
    """The share of -log(sum(min(p, q))), the chance that a drawn proposal is accepted, in the loss; what
    `soft` and this leave is cross-entropy."""
    num_sinks: int = 4
    max_offset: int = 0
    """The largest anchor offset; 0 is none, -1 is as far as the target's context allows."""


@dataclass
class DataSettings:
    """Datasets made by `longspec data`."""

    train: list[str] = MISSING
    """Folders. The stage's sequence length must be a multiple of theirs."""
    num_held_out: int = 16
    """Sequences of the last folder that are not trained on. Acceptance is measured on the target's answers to
    their beginnings."""


@dataclass
class EvaluationSettings:
    """Acceptance as in decoding, on continuations that the target wrote greedily."""

    every: int = 200
    """In steps; 0 is never."""
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
    """After this time, save and stop; resume=latest continues. 0 is no limit."""
    stage_seconds: float = 0.0
    """After this time the stage is complete, with fewer steps, and its learning rate has fallen by then. 0 is
    no limit."""


@dataclass
class LoggerSettings:
    """Where figures go besides metrics.jsonl."""

    tensorboard: bool = False
    wandb: str = "disabled"
    """online, offline or disabled."""
    project: str = "longspec"


@dataclass
class DeepSpeedSettings:
    """Passed to DeepSpeed, with batch sizes, optimizer and precision filled in."""

    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainSettings:
    """All settings of a run."""

    name: str = "run"
    run: str = "outputs/${name}"
    """The folder of the run."""
    seed: int = 0
    resume: str | None = None
    """latest: continue from the newest complete checkpoint, or start if there is none."""
    compile: bool = False
    """Let torch.compile fuse the target's and the draft's layers. A CPU never does."""
    target: TargetSettings = field(default_factory=TargetSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
    stage: StageSettings = field(default_factory=StageSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    saving: SavingSettings = field(default_factory=SavingSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    deepspeed: DeepSpeedSettings = field(default_factory=DeepSpeedSettings)
    stages: dict[str, list[str]] = field(default_factory=dict)
    """What `stage=all` runs, one after the other: the name of each stage and its overrides."""
