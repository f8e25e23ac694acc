"""Describe a dataset: its figures, and its sequences in readable parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longspec.data.shards import Dataset, DatasetInfo, Packed, Role


@dataclass(frozen=True)
class Survey:
    """The figures of a dataset."""

    info: DatasetInfo
    num_documents: int
    """Documents and parts of documents in all sequences, without padding."""
    num_different: int
    """Different tokens."""
    role_shares: dict[str, float]
    """Of all tokens, with padding."""


@dataclass(frozen=True)
class Span:
    """Tokens of one document and one role."""

    document: int
    role: Role
    tokens: list[int]


def survey(dataset: Dataset) -> Survey:
    """Count tokens, documents and roles; reads the role of every token."""
    counts = np.zeros(max(Role) + 1, np.int64)
    num_documents = 0
    for _, roles, starts, firsts in dataset.shards():
        found = np.bincount(roles.reshape(-1), minlength=len(counts))
        if len(found) > len(counts):
            raise dataset.damaged("it has a role that there is not")
        counts += found
        rows = np.repeat(np.arange(len(roles)), np.diff(firsts))
        num_documents += int(np.count_nonzero(roles[rows, starts] != Role.PAD))
    shares = {role.name.lower(): float(counts[role] / counts.sum()) for role in Role}
    return Survey(dataset.info, num_documents, int(np.count_nonzero(dataset.counts)), shares)


def spans(one: Packed) -> Iterator[Span]:
    """Split a sequence into runs of one document and one role."""
    changes = np.flatnonzero(np.diff(one.roles)) + 1
    bounds = np.union1d(np.union1d(changes, one.starts), [len(one.tokens)])
    for first, last in pairwise(bounds):
        document = int(np.searchsorted(one.starts, first, "right")) - 1
        yield Span(document, Role(int(one.roles[first])), one.tokens[first:last].tolist())
