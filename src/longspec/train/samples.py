"""Which sequences a step sees. This depends only on the step, not on the number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspec.data.shards import Dataset, Packed, Role
from longspec.errors import UserError, shown

COVERAGE = 0.99
"""The share of the learnt tokens that a draft can propose, if the data choose its vocabulary."""
# The size of such a vocabulary is a multiple of this.
_STEP = 1024


class Mixture:
    """Several datasets as one. Shorter sequences of a dataset are joined to the wanted length, but documents
    still do not see each other. A dataset that is named twice is seen twice as often."""

    def __init__(self, folders: Sequence[str], seq_length: int) -> None:
        if not folders:
            raise UserError("data.train names no dataset; give folders that `longspec data` made")
        for folder in folders:
            if not isinstance(folder, str):  # OmegaConf does not look into lists of lists
                raise UserError(f"data.train names {shown(folder)}; a folder is needed")
        self.datasets = [Dataset(Path(folder)) for folder in folders]
        self._joined: list[int] = []
        for dataset in self.datasets:
            joined, rest = divmod(seq_length, dataset.info.seq_length)
            if rest or not joined:
                raise UserError(
                    f"the dataset {dataset.folder} has sequences of {dataset.info.seq_length} tokens, and "
                    f"stage.seq_length {seq_length} is not a multiple of that"
                )
            if len(dataset) < joined:
                raise UserError(
                    f"the dataset {dataset.folder} has {len(dataset)} sequences of "
                    f"{dataset.info.seq_length} tokens; {joined} make one of {seq_length} (stage.seq_length)"
                )
            self._joined.append(joined)
        sizes = [len(dataset) // joined for dataset, joined in zip(self.datasets, self._joined, strict=True)]
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def described(self) -> str:
        """How many sequences there are of each dataset, for an error."""
        return " and ".join(
            f"{len(dataset)} sequences of {dataset.info.seq_length} tokens make {len(dataset) // joined} of "
            f"stage.seq_length {joined * dataset.info.seq_length}"
            for dataset, joined in zip(self.datasets, self._joined, strict=True)
        )

    def __getitem__(self, index: int) -> Packed:
        which = int(np.searchsorted(self._ends, index, side="right"))
        place = index - (int(self._ends[which - 1]) if which else 0)
        joined = self._joined[which]
        return _join([self.datasets[which][place * joined + part] for part in range(joined)])

    def check(self, vocab_size: int, tokenizer: str | None, target_name: str) -> None:
        """Refuse datasets that another tokenizer made."""
        for dataset in self.datasets:
            dataset.check(vocab_size, tokenizer, target_name)

    def counts(self) -> NDArray[np.int64]:
        """How often each token occurs in what is written, not in prompts."""
        counts = np.zeros(max(dataset.info.vocab_size for dataset in self.datasets), np.int64)
        for dataset in self.datasets:
            for tokens, roles, *_ in dataset.shards():
                counts += np.bincount(tokens[roles >= Role.REASONING], minlength=len(counts))
        return counts

    def covering_size(self, share: float) -> int:
        """How many of the most frequent tokens make up this share of what is written; a whole `_STEP`."""
        counts = np.sort(self.counts())[::-1]
        size = int(np.searchsorted(np.cumsum(counts), share * counts.sum())) + 1
        return min(-(-size // _STEP) * _STEP, len(counts))

    def frequent(self, count: int, always: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
        """The `count` most frequent tokens; those in `always` come first."""
        counts = np.zeros(vocab_size, np.int64)
        written = self.counts()
        counts[: len(written)] = written
        counts[list(always)] = counts.sum() + 1
        # Stable: of equally frequent tokens the lower id comes first.
        return np.argsort(-counts, kind="stable")[:count]


def _join(parts: Sequence[Packed]) -> Packed:
    if len(parts) == 1:
        return parts[0]
    length = len(parts[0].tokens)
    return Packed(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.roles for part in parts]),
        np.concatenate([part.starts + number * length for number, part in enumerate(parts)]),
    )


@dataclass(frozen=True)
class Order:
    """Samples are numbered through the whole run; each epoch has its own order."""

    num_sequences: int
    seed: int

    def index(self, sample: int) -> int:
        epoch, place = divmod(sample, self.num_sequences)
        return int(_permutation(self.num_sequences, self.seed, epoch)[place])


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)
