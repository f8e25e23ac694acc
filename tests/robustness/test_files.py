"""Every JSON file that we read, changed at random: it is read or refused in one line, and costs little."""

from __future__ import annotations

import json
import random
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec.bench.folder import read_run
from longspec.config import DraftConfig
from longspec.data.shards import Dataset, Packed, Role, Source, finish, write_shard
from longspec.decoding.methods import Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.costs import Calibration, read_calibration
from longspec.errors import UserError
from longspec.hub.cache import is_complete
from longspec.models.checkpoint import WeightFiles
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import Fingerprint, load_draft, save_draft
from longspec.models.files import eos_ids, read_config, read_generation_config
from longspec.prompts import PromptEncoder
from longspec.train import checkpoints, evaluate
from tests.bench.rows import made_row, made_run
from tests.decoding.scripted import tiny_target

SECONDS, MEMORY = 10, 2 * 2**30
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x1b[31m", "../..", "\0", "\ud800", [], [None], [[1, 2], 3], {}, {"x": {}}, "9" * 5000),
)


def change(value: Any, rng: random.Random) -> Any:
    """The value with one place in it replaced, removed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {key: one for key, one in value.items() if key != name}
        return value | {name: change(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], *([change(value[index], rng)] * rng.choice((1, 1, 2))), *value[index + 1 :]]
    return rng.choice(VALUES)


def damage(good: bytes, rng: random.Random) -> bytes:
    """Another value somewhere, other bytes, a file that ends early, or a file of brackets."""
    form = rng.random()
    if form < 0.75:
        lines = [json.loads(line) for line in good.splitlines()] if good.count(b"\n{") else [json.loads(good)]
        lines[rng.randrange(len(lines))] = change(lines[rng.randrange(len(lines))], rng)
        return "\n".join(json.dumps(line) for line in lines).encode() + b"\n"
    if form < 0.85:
        return good[: rng.randrange(len(good))]
    if form < 0.98:
        data = bytearray(good)
        for _ in range(rng.choice((1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    return rng.choice(
        (b"[" * 10**6, b'{"a":' * 10**5, b"[" + b"[]," * 10**5 + b"0]", b"1" * 10**6, b"\xff\xfe")
    )


Reader = Callable[[], Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[Path, Reader]:
    """Each file that we read, good, with what reads it."""
    root = tmp_path_factory.mktemp("files")
    target, draft, model = tiny_target(), root / "draft", root / "model"
    made = GlideDraft(target.config, DraftConfig(window=9, max_lag=3, use_feature=True, lag_gate=True))
    made.initialise()
    table = {"chain": [0.5, 0.25], "trees": {"4,16": [0.7, 0.5]}}
    save_draft(made, draft, Fingerprint.of(target), "tiny", table)

    def read_draft() -> None:
        loaded = load_draft(draft, target, "tiny")
        methods = list(Tree.candidates(loaded.draft.config, loaded.acceptance, False))
        assert all(method.gain(loaded.acceptance) >= 0 for method in methods)

    model.mkdir()
    config = json.loads((tiny_folder / "config.json").read_text()) | {"eos_token_id": [2, 3]}
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "eos_token_id": 2}
    (model / "generation_config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((tiny_folder / name).read_bytes())
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b", "c": "d"}}))

    dataset, shard = (
        root / "dataset",
        Packed(np.arange(8), np.full(8, Role.TEXT, np.uint8), np.zeros(1, np.int32)),
    )
    write_shard(dataset, 0, [shard], 100, [Source("made", "mit", 1, 8)])
    finish(dataset, 1, 100, None, {"command": "made"})

    run = root / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps(made_run()))
    rows = [made_row("vanilla"), made_row("lookup", token_ids=[[1, 2]], depths=[[0, 1]])]
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    calibration = root / "calibration.json"
    times = [("vanilla", 1, 256, 0.1), ("vanilla", 1, 2048, 0.2)]
    calibration.write_text(json.dumps(asdict(Calibration(times, 1, True))))
    cache = root / "cache"
    cache.mkdir()
    (cache / "longspec.json").write_text(json.dumps({"format": 1, "files": {}}))
    checkpoint = root / "train" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    state = {"step": 1, "num_steps": 2, "tokens": 3, "world_size": 1, "files": {}, "acceptance": None}
    (checkpoint / "state.json").write_text(json.dumps(state))
    (root / "train" / "stages.json").write_text(json.dumps({"stages": ["base", "long"]}))
    held_out = root / "held_out.json"
    evaluate.save_continuations(held_out, [evaluate.Continuation([1, 2], [3])])
    return {
        draft / "config.json": read_draft,
        model / "config.json": lambda: (read_config(model), eos_ids(model)),
        model / "generation_config.json": lambda: (
            Sampling.from_generation_config(read_generation_config(model)),
            eos_ids(model),
        ),
        model / "model.safetensors.index.json": lambda: WeightFiles(model),
        dataset / "dataset.json": lambda: Dataset(dataset)[0],
        dataset / "shard-00000" / "shard.json": lambda: Dataset(dataset),
        run / "run.json": lambda: read_run(run),
        run / "rows.jsonl": lambda: read_run(run),
        calibration: lambda: read_calibration(calibration),
        cache / "longspec.json": lambda: is_complete(cache),
        checkpoint / "state.json": lambda: checkpoints.progress_of(root / "train"),
        root / "train" / "stages.json": lambda: checkpoints.stage_runs(root / "train"),
        held_out: lambda: evaluate.load_continuations(held_out, 100),
    }


def outcome(path: Path, data: bytes, read: Reader) -> bool:
    """Whether it is read; anything but that and a UserError of one line fails the test."""
    path.write_bytes(data)
    started = time.monotonic()
    try:
        with warnings.catch_warnings(action="ignore"):
            read()
        return True
    except UserError as error:
        if "\n" in str(error):
            pytest.fail(f"an error of several lines: {error}")
        return False
    except OSError as error:  # which the command line tells in one line too
        if error.filename is None:
            raise
        return False
    finally:
        assert time.monotonic() - started < SECONDS, data[:200]


def peak_memory() -> int:
    """Bytes of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


Damage = Callable[[bytes, random.Random], bytes]


def fuzz(
    files: dict[Path, Reader],
    num_changes: int,
    seed: int,
    damage_of: Callable[[Path], Damage] = lambda path: damage,
) -> None:
    before = peak_memory()
    rng, refused = random.Random(seed), 0
    for path, read in files.items():
        good = path.read_bytes()
        for _ in range(num_changes // len(files) + 1):
            data = damage_of(path)(good, rng)
            try:
                refused += not outcome(path, data, read)
            except Exception as error:
                error.add_note(f"{path.name}: {data[:2000]!r}")
                raise
        path.write_bytes(good)
    assert refused > num_changes // 10
    # Of this process other tests ran as well: what counts is by how much the peak has risen.
    assert peak_memory() - before < MEMORY


def test_a_few_changes(files: dict[Path, Reader]) -> None:
    fuzz(files, 400, seed=1)


@pytest.mark.full
def test_ten_thousand_changes(files: dict[Path, Reader]) -> None:
    fuzz(files, 10_000, seed=2)


def test_a_tokenizer_config_is_read_or_refused(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    good = json.loads((tiny_folder / "tokenizer_config.json").read_text())
    for field, value in (("model_max_length", "x"), ("model_max_length", [1]), ("tokenizer_class", 3)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(good | {field: value}))
        with pytest.raises(UserError, match=rf"tokenizer_config\.json: {field}"):
            PromptEncoder(tmp_path)


def test_an_error_names_file_field_and_value(files: dict[Path, Reader]) -> None:
    path, read = next((path, read) for path, read in files.items() if path.parent.name == "draft")
    good = path.read_bytes()
    config = json.loads(good)
    for changed, said in (
        ({"window": "x"}, "draft: window is 'x'; it must be a valid integer"),
        ({"cross_layers": "ab"}, "draft: cross_layers is 'ab'; it must be a valid array"),
        ({"window": 10**30}, "it must lie between 1 and 1048576"),
    ):
        path.write_text(json.dumps(config | {"draft": config["draft"] | changed}))
        with pytest.raises(UserError) as caught:
            read()
        assert str(path) in str(caught.value)
        assert said in str(caught.value)
    path.write_bytes(good)


def test_a_calibration_of_other_sizes_is_measured_again() -> None:
    from longspec.decoding.methods import VANILLA

    good = Calibration([("vanilla", 1, 256, 0.1), ("vanilla", 1, 2048, 0.2)], 1, True)
    assert good.covers([VANILLA], {1: (256, 2048)})
    twice = replace(good, times=[("vanilla", 1, 256, 0.1), ("vanilla", 1, 256, 0.2)])
    assert not twice.covers([VANILLA], {1: (256, 2048)})
