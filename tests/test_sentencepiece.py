"""A folder whose tokenizer is a SentencePiece `tokenizer.model` alone, as Vicuna's and LongChat's are."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from longspec import LongSpec


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def nested(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def piece(text: str, score: float, kind: int) -> bytes:
    """One entry of the vocabulary; kinds are 1 text, 2 unknown, 3 control, 6 byte."""
    scored = varint(2 << 3 | 5) + struct.pack("<f", score)
    return nested(1, nested(1, text.encode()) + scored + varint(3 << 3) + varint(kind))


def write_model(path: Path) -> None:
    """A SentencePiece model of type BPE with byte fallback, without any library."""
    pieces = [piece("<unk>", 0, 2), piece("<s>", 0, 3), piece("</s>", 0, 3)]
    pieces += [piece(f"<0x{byte:02X}>", 0, 6) for byte in range(256)]
    words = ["▁", "h", "i", "e", "l", "o", "▁h", "ll", "▁hi", "lo"]
    pieces += [piece(word, -float(rank), 1) for rank, word in enumerate(words)]
    bpe = nested(2, varint(3 << 3) + varint(2))
    path.write_bytes(b"".join(pieces) + bpe + nested(3, nested(1, b"identity")))


def test_a_folder_with_nothing_but_tokenizer_model(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path)
    write_model(tmp_path / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    model = LongSpec.from_pretrained(tmp_path)
    ids = model.tokenizer("hi héllo")["input_ids"]
    assert ids[:2] == [1, model.tokenizer.convert_tokens_to_ids("▁hi")]
    assert 3 + 0xC3 in ids, "what has no piece comes as bytes"
    assert model.tokenizer.decode(ids, skip_special_tokens=True) == "hi héllo"
    assert model.generate("hi hello", max_new_tokens=4, eos_ids=(), method="vanilla").tokens == 4
