"""`prepare` on real files: every format gives the same tokens, nothing bad passes unnamed."""

from __future__ import annotations

import filecmp
import gzip
import json
import lzma
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from transformers import AutoTokenizer

from longspec.data import prepare as module
from longspec.data import shards
from longspec.data.options import PrepareOptions
from longspec.data.prepare import PrepareSummary, prepare
from longspec.data.shards import Dataset, Role
from longspec.errors import UserError

WORDS = ["sea", "wind", "mast", "sail", "harbour", "light", "fog", "captain", "rope", "deck"]
RECORDS = [
    {"text": " ".join(WORDS[(i * j) % 10] for j in range(i % 37 + 1)), "meta": {"licence": f"L{i % 2}"}}
    for i in range(200)
]


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def make(target: Path, folder: Path, *inputs: Path, **more: Any) -> PrepareSummary:
    names = tuple(str(path) for path in inputs)
    return prepare(
        PrepareOptions(names, folder, str(target), **{"seq_length": 64, "shard_sequences": 20} | more)
    )


def tokens(folder: Path) -> list[list[int]]:
    dataset = Dataset(folder)
    return [dataset[index].tokens.tolist() for index in range(len(dataset))]


def same(one: Path, other: Path) -> bool:
    """Whether two folders are equal, file by file and byte by byte."""
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    others = sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    return names == others and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(lines(RECORDS))
    return path


def zst(data: bytes) -> bytes:
    """Two frames, as parallel compressors write."""
    return zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])


def test_stream_holds_every_document_and_its_origin(plain: Path, tiny_folder: Path, tmp_path: Path) -> None:
    summary = make(tiny_folder, tmp_path / "out", plain, licence_field="meta.licence", source_field="none")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    eos = tokenizer.eos_token_id
    expected = [[*tokenizer(record["text"])["input_ids"], eos] for record in RECORDS]
    dataset = Dataset(tmp_path / "out")
    sequences = [dataset[index] for index in range(len(dataset))]
    flat = np.concatenate([one.tokens[one.roles != Role.PAD] for one in sequences]).tolist()
    assert flat == [token for document in expected for token in document]
    assert (summary.documents, summary.tokens, summary.bad, summary.already) == (200, len(flat), 0, False)
    assert summary.sources == [
        {
            "name": "plain.jsonl",
            "licence": f"L{rest}",
            "num_documents": 100,
            "num_tokens": sum(map(len, expected[rest::2])),
        }
        for rest in (0, 1)
    ]
    assert dataset.counts.sum() == len(flat)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_every_format_gives_the_same_tokens(plain: Path, small_target: Path, tmp_path: Path) -> None:
    data = plain.read_bytes()
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}
    inputs = {}
    for suffix, pack in packers.items():
        inputs[suffix] = tmp_path / f"packed.jsonl{suffix}"
        inputs[suffix].write_bytes(pack(data))
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, inputs.setdefault("parquet", tmp_path / "table.parquet"))
    inputs["folder"] = tmp_path / "folder"
    (inputs["folder"] / "sub").mkdir(parents=True)
    (inputs["folder"] / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS[:50])))
    (inputs["folder"] / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(RECORDS[50:90]) + b"\n  \n")
    pyarrow.parquet.write_table(table.slice(90), inputs["folder"] / "sub" / "c.parquet")
    (inputs["folder"] / "README.md").write_text("not data")
    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(str(inputs.setdefault("saved", tmp_path / "saved")), num_shards=3)
    datasets.DatasetDict({"train": saved}).save_to_disk(str(inputs.setdefault("dict", tmp_path / "dict")))
    make(small_target, tmp_path / "plain", plain)
    expected = tokens(tmp_path / "plain")
    for name, path in inputs.items():
        make(small_target, tmp_path / f"out {name}", path)
        assert tokens(tmp_path / f"out {name}") == expected, name


def test_skip_and_limit_part_the_records(plain: Path, small_target: Path, tmp_path: Path) -> None:
    whole = make(small_target, tmp_path / "whole", plain, pack="whole")
    first = make(small_target, tmp_path / "first", plain, pack="whole", limit=70)
    rest = make(small_target, tmp_path / "rest", plain, pack="whole", skip=70, min_tokens=5)
    assert (first.documents, rest.documents + rest.short) == (70, 130)
    assert rest.short > 0
    assert whole.tokens > first.tokens + rest.tokens


def test_truncate_keeps_beginnings(plain: Path, tiny_folder: Path, tmp_path: Path) -> None:
    make(tiny_folder, tmp_path / "cut", plain, pack="single", seq_length=8, shard_sequences=100)
    make(tiny_folder, tmp_path / "short", plain, pack="single", seq_length=8, truncate=True, limit=150)
    lengths = [len(str(one["text"]).split()) + 1 for one in RECORDS]  # a token each, and eos
    firsts = np.cumsum([0, *(-(-length // 8) for length in lengths[:-1])])
    pieces = tokens(tmp_path / "cut")
    assert tokens(tmp_path / "short") == [pieces[first] for first in firsts[:150]]
    with pytest.raises(UserError, match="--truncate"):
        make(tiny_folder, tmp_path / "none", plain, truncate=True)


GOOD = b'{"text": "a fine day"}\n'
BAD: dict[str, tuple[str, bytes, str, int]] = {
    # name: (file, content, what is said, good records before it is bad)
    "not JSON": ("a.jsonl", GOOD + b"{text\n" + GOOD, "a.jsonl line 2: it is not JSON", 2),
    "no object": ("a.jsonl", GOOD + b"\n[1]\n", "a.jsonl line 3: it is a JSON list", 1),
    "no field": ("a.jsonl", GOOD + b'{"body": 1}', "line 2: it has no field 'text', only body", 1),
    "null": ("a.jsonl", GOOD + b'{"text": null}', "line 2: its field 'text' is null", 1),
    "wrong type": ("a.jsonl", GOOD + b'{"text": ["x"]}', "line 2: its field 'text' is of type list", 1),
    "not UTF-8": ("a.jsonl", GOOD + b'{"text": "\xff"}', "line 2: it is not JSON: 'utf-8'", 1),
    "surrogate": ("a.jsonl", GOOD + b'{"text": "\\ud800"}', "line 2: its text is not valid Unicode", 1),
    "deep": ("a.jsonl", GOOD + b"[" * 100_000, "line 2: it is not JSON", 1),
    "empty": ("a.jsonl", b"", "a.jsonl: it is empty", 0),
    "blank": ("a.jsonl", b"\n \n", "a.jsonl: it is empty", 0),
    "empty gz": ("a.jsonl.gz", b"", "a.jsonl.gz: it is empty", 0),
    "cut gz": ("a.jsonl.gz", gzip.compress(GOOD * 3)[:-9], "a.jsonl.gz line 4: the rest cannot be read", 3),
    "no gz": ("a.jsonl.gz", GOOD, "the rest cannot be read: Not a gzipped file", 0),
    "cut xz": ("a.jsonl.xz", lzma.compress(GOOD * 3)[:-9], "a.jsonl.xz line 4: the rest cannot be read", 3),
    "cut zst": ("a.jsonl.zst", zstandard.compress(GOOD * 3)[:-3], "the rest cannot be read", 0),
    "no zst": ("a.jsonl.zst", GOOD, "a.jsonl.zst: the rest cannot be read", 0),
    "no parquet": ("a.parquet", GOOD, "a.parquet: the rest cannot be read", 0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_or_counted(name: str, small_target: Path, tmp_path: Path) -> None:
    file, content, said, num_good = BAD[name]
    (tmp_path / file).write_bytes(content)
    (tmp_path / "z.jsonl").write_bytes(GOOD)
    inputs = (tmp_path / file, tmp_path / "z.jsonl")
    with pytest.raises(UserError) as caught:
        make(small_target, tmp_path / "out", *inputs)
    assert said in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    assert not (tmp_path / "out").exists(), "nothing half-written"
    summary = make(small_target, tmp_path / "out", *inputs, skip_bad=True)
    assert (summary.documents, summary.bad) == (num_good + 1, 1)
    assert said in summary.bad_places[0]


def test_no_usable_document_and_no_tokenizer(plain: Path, small_target: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_bytes(b'{"text": ""}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"no usable document in .*1 bad.*1 shorter than --min-tokens 2"):
        make(small_target, tmp_path / "out", tmp_path / "short.jsonl", skip_bad=True)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="has no tokenizer"):
        make(tmp_path / "nothing", tmp_path / "out", plain)
    with pytest.raises(UserError, match="has no input"):
        make(small_target, tmp_path / "out", tmp_path / "nothing")
    with pytest.raises(UserError, match="given twice"):
        make(small_target, tmp_path / "out", plain, plain)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_alone_suffices(plain: Path, small_target: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).write_bytes((small_target / name).read_bytes())
    make(tmp_path / "tokenizer", tmp_path / "out", plain)
    make(small_target, tmp_path / "whole model", plain)
    assert tokens(tmp_path / "out") == tokens(tmp_path / "whole model")


def test_a_finished_folder_is_done_and_guarded(plain: Path, small_target: Path, tmp_path: Path) -> None:
    first = make(small_target, tmp_path / "out", plain)
    again = make(small_target, tmp_path / "out", plain, workers=3, skip_bad=True)
    assert (again.already, again.sequences, again.tokens) == (True, first.sequences, first.tokens)
    with pytest.raises(UserError, match="seq_length was 64 and is 32"):
        make(small_target, tmp_path / "out", plain, seq_length=32)
    plain.write_bytes(plain.read_bytes() + GOOD)
    with pytest.raises(UserError, match="input_files was"):
        make(small_target, tmp_path / "out", plain)
    with pytest.raises(UserError, match="is not empty"):
        make(small_target, tmp_path, plain)


def test_bad_records_late_keep_the_finished_shards(small_target: Path, tmp_path: Path) -> None:
    """Who then asks for --skip-bad does not begin anew, and gets what an unbroken run gives."""
    path = tmp_path / "late.jsonl"
    path.write_bytes(lines(RECORDS) + b"{\n" + lines(RECORDS[:20]))
    with pytest.raises(UserError, match=r"late\.jsonl line 201"):
        make(small_target, tmp_path / "out", path)
    kept = (tmp_path / "out" / "shard-00000" / "tokens.npy").stat().st_mtime_ns
    make(small_target, tmp_path / "out", path, skip_bad=True)
    assert (tmp_path / "out" / "shard-00000" / "tokens.npy").stat().st_mtime_ns == kept
    make(small_target, tmp_path / "unbroken", path, skip_bad=True)
    assert same(tmp_path / "out", tmp_path / "unbroken")


def die_at(number: int, when: str, options: PrepareOptions) -> None:
    """Prepare, but end without any warning before or after shard `number` is written, or after the last."""
    write = shards.write_shard

    def dying(folder: Path, index: int, *rest: Any) -> None:
        if index == number and when == "before":
            (folder / ".writing-shard-1").mkdir(exist_ok=True)
            os._exit(9)
        write(folder, index, *rest)
        if index == number:
            os._exit(9)

    # In a process of its own.
    setattr(module, "write_shard", dying)  # noqa: B010
    setattr(module, "finish", lambda *_: os._exit(9))  # noqa: B010
    prepare(options)


@pytest.mark.parametrize("pack", ["stream", "whole", "single"])
def test_stopped_at_any_shard_it_goes_on(pack: str, plain: Path, small_target: Path, tmp_path: Path) -> None:
    options = PrepareOptions(
        (str(plain),),
        tmp_path / "out",
        str(small_target),
        pack=pack,
        seq_length=32,
        shard_sequences=20,
        min_tokens=4,
    )
    prepare(replace(options, folder=tmp_path / "unbroken"))
    last = Dataset(tmp_path / "unbroken").info.num_shards - 1
    assert last > 2
    for number, when in ((0, "before"), (2, "after"), (last, "before"), (last, "after"), (-1, "")):
        process = multiprocessing.get_context("fork").Process(target=die_at, args=(number, when, options))
        process.start()
        process.join()
        assert process.exitcode == 9
    prepare(options)
    assert same(tmp_path / "out", tmp_path / "unbroken")
