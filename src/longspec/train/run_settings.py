"""The settings that a run keeps in its folder, read without Hydra: `export` needs no training extra."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from longspec.errors import UserError
from longspec.records import read_yaml

CONFIG = "config.yaml"
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
    """The settings in a run's config.yaml that other code reads; the others are only compared."""

    target: _Target
    draft: _Draft
    stage: _Stage
    data: _Data


def read_settings(run: Path) -> RunSettings:
    found = read_yaml(run / CONFIG, RunSettings)
    if len(found) != 1:
        raise UserError(f"cannot read {run / CONFIG}: it has {len(found)} documents; one is needed")
    return found[0]
