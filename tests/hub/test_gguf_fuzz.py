"""Damaged GGUF files: an error in one line or a model, and nothing else, ever."""

import random
import struct
import tempfile
import time
from pathlib import Path

import pytest

from longspec.errors import UserError
from longspec.hub.gguf_convert import convert
from longspec.hub.gguf_header import read_header
from tests.hub.gguf_samples import write_gguf

SECONDS = 6  # per test; the seed is fixed, a slow machine sees a prefix of the same cases


def outcome(data: bytes, tmp_path: Path) -> str | None:
    """The error a file gives, None when it converts; anything but a one-line UserError fails the test."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    message = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            convert(path, Path(folder))
        except UserError as error:
            message = str(error)
    assert message is None or "\n" not in message
    return message


@pytest.fixture(params=["gpt2", "llama"])
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    write_gguf(tmp_path / "good.gguf", kind="Q4_1", tokenizer=request.param)
    return (tmp_path / "good.gguf").read_bytes()


def header_size(tmp_path: Path) -> int:
    return min(tensor.offset for tensor in read_header(tmp_path / "good.gguf").tensors.values())


def test_every_truncation_is_an_error(tmp_path: Path, sample: bytes) -> None:
    rng = random.Random(0)
    end = header_size(tmp_path)
    lengths = [
        0,
        3,
        4,
        8,
        23,
        24,
        25,
        end,
        len(sample) - 1,
        *(rng.randrange(len(sample)) for _ in range(100)),
    ]
    lengths += [rng.randrange(end) for _ in range(200)]
    for length in lengths:
        assert outcome(sample[:length], tmp_path) is not None, length


def test_flipped_bytes_never_crash(tmp_path: Path, sample: bytes) -> None:
    rng = random.Random(1)
    end = header_size(tmp_path)
    stop = time.monotonic() + SECONDS
    errors = number = 0
    while number < 400 and time.monotonic() < stop:
        data = bytearray(sample)
        for _ in range(rng.choice([1, 1, 1, 4, 32])):
            # Mostly in the header, where a byte can do harm; some in the weights.
            position = rng.randrange(end if rng.random() < 0.8 else len(data))
            data[position] = rng.choice(
                [0, 0xFF, data[position] ^ (1 << rng.randrange(8)), rng.randrange(256)]
            )
        errors += outcome(bytes(data), tmp_path) is not None
        number += 1
    assert number > 20
    assert errors > number // 4  # most single flips in a header of names and lengths are seen


def test_wild_counts_are_refused_without_allocating(tmp_path: Path, sample: bytes) -> None:
    """Each eight-byte field of the header's first part becomes a huge number."""
    started = time.monotonic()
    for position in range(8, 600, 4):
        data = bytearray(sample)
        struct.pack_into("<Q", data, position, (1 << 63) + 12345)
        outcome(bytes(data), tmp_path)
    assert time.monotonic() - started < 30
