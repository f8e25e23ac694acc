import contextlib
import json
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longspec.errors import UserError
from longspec.models.checkpoint import WeightFiles


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 4, generator=generator),
        "b.weight": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "b.bias": torch.randn(3, generator=generator),
    }


def write(folder: Path, layout: str) -> None:
    """The same tensors in every layout transformers writes."""
    weights = tensors()
    parts = [{"a.weight": weights["a.weight"]}, {name: weights[name] for name in ("b.weight", "b.bias")}]
    stem, suffix = ("model", "safetensors") if "safetensors" in layout else ("pytorch_model", "bin")

    def save(part: dict[str, torch.Tensor], path: Path) -> None:
        if suffix == "safetensors":
            save_file(part, path)
        else:
            torch.save(part, path, _use_new_zipfile_serialization=layout != "old bin")

    if "sharded" not in layout:
        save(weights, folder / f"{stem}.{suffix}")
        return
    names = [f"{stem}-{number + 1:05d}-of-00002.{suffix}" for number in range(2)]
    for name, part in zip(names, parts, strict=True):
        save(part, folder / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


LAYOUTS = ["safetensors", "sharded safetensors", "bin", "sharded bin", "old bin"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_every_layout(tmp_path: Path, layout: str) -> None:
    write(tmp_path, layout)
    with WeightFiles(tmp_path) as weights:
        assert weights.names == {"a.weight", "b.weight", "b.bias"}
        read = {name: weights.tensor(name) for name in weights.names}
        part = weights.tensor("a.weight", lambda shape: (slice(shape[0] // 2, None), slice(1, 3)))
        with pytest.raises(UserError, match=r"no tensor 'c\.weight'"):
            weights.tensor("c.weight")
    assert torch.equal(part, tensors()["a.weight"][3:, 1:3])
    for name, tensor in tensors().items():  # they outlive the files
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    write(tmp_path, "sharded safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert len(WeightFiles(tmp_path).names) == 3


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no weights"):
        WeightFiles(tmp_path)
    write(tmp_path, "sharded safetensors")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    shard = good["a.weight"]
    for text, said in [
        ("{", "it is not JSON"),
        ("[]", r"the whole is \[\]; it must be an object"),
        ('{"weight_map": 3}', "weight_map is 3; it must be an object"),
        ('{"weight_map": {}}', "names no tensors"),
        (json.dumps({"weight_map": good | {"c": shard}}), f"{shard} has the tensor 'c', but it does not"),
        (json.dumps({"weight_map": {"a": "../a.safetensors"}}), "not a file name"),
        (
            json.dumps({"weight_map": good | {"c": "gone.safetensors"}}),
            r"gone\.safetensors, which is missing",
        ),
    ]:
        index.write_text(text)
        with pytest.raises(UserError, match=said):
            WeightFiles(tmp_path)


def test_pickles_run_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path("/nonexistent"),)  # type: ignore[return-value]

    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="which is never run"):
        WeightFiles(tmp_path)
    torch.save({"a": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="something other than named tensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("layout", ["safetensors", "bin", "old bin"])
def test_damaged_files_are_errors_and_never_crashes(tmp_path: Path, layout: str) -> None:
    write(tmp_path, layout)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for length in sorted({0, 1, 7, 8, 9, len(good) // 2, len(good) - 1}):
        path.write_bytes(good[:length])
        with pytest.raises(UserError, match=path.name):
            read_all(tmp_path)
    rng = random.Random(0)
    stop = time.monotonic() + 3
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(len(data))] = rng.choice([0, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            read_all(tmp_path)  # flipped weights are weights too
        if time.monotonic() > stop:
            break


def read_all(folder: Path) -> None:
    with WeightFiles(folder) as weights:
        for name in weights.names:
            weights.tensor(name).float().sum().item()


def test_real_weights_are_read_quickly(smollm2_folder: Path) -> None:
    with WeightFiles(smollm2_folder) as weights:
        started = time.monotonic()
        read = [weights.tensor(name) for name in weights.names]
        assert time.monotonic() - started < 5  # measured 0.05 s
    assert sum(tensor.nbytes for tensor in read) == 538_060_032
