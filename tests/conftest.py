from __future__ import annotations

from pathlib import Path

import pytest

from longspec import LongSpec
from longspec.hub import DEFAULT_TARGET, resolve


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default target on disk, fetched once."""
    return resolve(DEFAULT_TARGET).folder


@pytest.fixture(scope="session")
def _loaded(smollm2_folder: Path) -> LongSpec:
    return LongSpec.from_pretrained(DEFAULT_TARGET, dtype="float32", device="cpu")


@pytest.fixture
def smollm2(_loaded: LongSpec) -> LongSpec:
    """The default target in fp32 on the CPU, holding nothing of earlier requests."""
    _loaded.reset()
    return _loaded
