"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

from longspec.hub import resolve


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The embedded default target, fetched on first use and kept in the user's cache."""
    return resolve("smollm2-135m").folder
