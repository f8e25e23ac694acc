"""Several processes hold one target together, on GPUs: they say what one process says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.check_tensor_parallel import check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "device",
    [
        "cuda:0,cuda:0",
        pytest.param(
            "cuda:0,cuda:1",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_two_ranks_say_what_one_process_says(device: str, tmp_path: Path) -> None:
    assert check(device, 2, "float32", None, tmp_path)
