"""What `longspec data prepare` and `longspec data synthesize` can be asked for.

No numpy or torch here, because `--help` reads these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longspec.decoding.sampling import Sampling
from longspec.errors import UserError, check_known
from longspec.hub.registry import DEFAULT_TARGET
from longspec.option import check_options, option


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a record becomes a document."""

    template: str = option("text", "makes the document of a record: see above")
    renames: tuple[tuple[str, str], ...] = ()
    aligners: tuple[str, ...] = ()
    think: bool = option(False, "cot: put reasoning between <think> and </think>")
    licence: str = option("unknown", "of the text", metavar="TEXT")
    licence_field: str | None = option(
        None, "where a record names its own licence, such as meta.licence", metavar="FIELD"
    )
    source_field: str | None = option(
        None, "where a record names its origin; without it, the name of the input", metavar="FIELD"
    )


@dataclass(frozen=True)
class PrepareOptions(Recipe):
    """What to prepare, and how."""

    inputs: tuple[str, ...]
    folder: Path
    target: str
    revision: str | None = None
    offline: bool = False
    seq_length: int = option(1024, "tokens per sequence", least=2, most=2**24)
    pack: str = option("stream", "how documents become sequences: see above")
    truncate: bool = option(False, "whole, single: drop what exceeds a sequence")
    min_tokens: int = option(2, "drop shorter documents", least=1)
    skip: int = option(0, "leave out the first N records", least=0)
    limit: int | None = option(None, "then take at most N records", least=1)
    shard_sequences: int | None = option(None, "sequences per shard (default: 8 million tokens)", least=1)
    split: str | None = option(None, "of a save_to_disk folder that has several")
    skip_bad: bool = option(False, "count refused records and files, and continue")
    workers: int = option(1, "processes that tokenise; the result does not depend on it", least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.truncate and self.pack == "stream":
            raise UserError("--truncate is for --pack whole and single: stream cuts where sequences end")


# In the order in which they are written: long prompts first, so that prompts of like length run together.
MODES = ("documents", "prompts", "questions")


@dataclass(frozen=True)
class SynthesisOptions:
    """What the target is asked to write."""

    output: Path
    tokens: int
    target: str = DEFAULT_TARGET
    revision: str | None = None
    offline: bool = False
    modes: dict[str, float] | None = None
    """The share of each mode; None is questions alone."""
    prompts: Path | None = option(
        None, "JSONL with 'prompt', 'turns' (answered one after the other) or 'messages'"
    )
    documents: Path | None = option(None, "JSONL with 'text'")
    prefixes: Path | None = option(
        None, "how questions begin, one per line, for variety: 'Translate to French:'"
    )
    temperatures: tuple[float, ...] = option(
        (0.0, 0.3, 0.7, 1.0), "each answer is written at one of them; 0 is greedy", metavar="T,T,..."
    )
    question_temperature: float = option(1.0, "of the questions", metavar="T")
    max_new_tokens: int = option(512, "longest answer", least=1)
    max_question_tokens: int = option(
        128, "longest question; one that does not end is cut at a sentence", least=1
    )
    given_tokens: int = option(256, "how many tokens of a document are given to be continued", least=1)
    seq_length: int = option(1024, "tokens of a packed sequence, and the most of a sample", least=64)
    batch: int | None = option(
        None, "rows at once (default: what fits, at most 2048 on a GPU and 32 on a CPU)", least=1
    )
    shard_samples: int | None = option(
        None, "most samples of a shard, which are lost if it is stopped (default: 16 x batch)", least=1
    )
    seed: int = option(0, "another one gives other data")
    device: str = "auto"
    dtype: str = "auto"
    licence: str | None = option(
        None, "what the data is under (default: as the target's files say)", metavar="TEXT"
    )
    seconds: float | None = option(
        None, "after this time begin no further shard, and finish with fewer tokens", least=0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.tokens < 1:
            raise UserError(f"tokens is {self.tokens}; it must be at least 1")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must fit into 64 bits")
        for temperature in (*self.temperatures, self.question_temperature):
            Sampling(temperature)
        shares = self.shares
        for mode, share in shares.items():
            check_known("mode", mode, MODES)
            if not 0 <= share < float("inf"):
                raise UserError(f"the share of mode {mode} is {share}; it must be 0 or more")
        if not sum(shares.values()):
            raise UserError("all shares of the modes are 0; give one a share")
        for mode, file in (("prompts", self.prompts), ("documents", self.documents)):
            if bool(shares.get(mode)) != (file is not None):
                raise UserError(f"mode {mode} and its file belong together: --mode {mode}:1 --{mode} FILE")
        if self.prefixes is not None and not shares.get("questions"):
            raise UserError("--prefixes are for questions; give --mode questions a share")
        if shares.get("documents") and self.given_tokens > self.seq_length - 32:
            raise UserError(
                f"seq_length is {self.seq_length}; it must be at least 32 above given_tokens, "
                f"{self.given_tokens}"
            )

    @property
    def shares(self) -> dict[str, float]:
        return self.modes or {"questions": 1.0}
