"""Compile our C code with the machine's C compiler, once, and load it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from longspec.atomic import clear_unfinished, write_whole
from longspec.hub import cache_dir

_SOURCE = Path(__file__).with_name("decode.c")  # includes the other files
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")
# Compilers prefer half of AVX-512's width, which is slower here.
_X86_FLAGS = ("-mprefer-vector-width=512",)
# Seconds after which a compiler is given up.
_PATIENCE = 600

Pointer = ctypes.c_void_p
_SIZE = ctypes.c_int64


def _sizes(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    return tuple((name, _SIZE) for name in names)


class Matrix(ctypes.Structure):
    """`Matrix` in weights.h."""

    _fields_ = (
        ("weight", Pointer),
        ("grids", Pointer),
        ("bias", Pointer),
        *_sizes("num_in", "num_out", "kept_in", "run", "has_half_grids"),
    )


class Writing(ctypes.Structure):
    """`Writing` in attention.h."""

    _fields_ = (
        ("keys", Pointer),
        ("values", Pointer),
        *_sizes("num_entries", "num_heads", "num_kv_heads", "head_dim", "num_tokens"),
        ("places", Pointer),
        ("positions", Pointer),
        ("angles", Pointer),
        *_sizes("num_angles"),
        ("q_norm", Pointer),
        ("k_norm", Pointer),
        ("eps", ctypes.c_float),
    )


class Context(ctypes.Structure):
    """`Context` in attention.h."""

    kept: list[Any]
    """The tensors that it points to."""

    _fields_ = (
        ("keys", Pointer),
        ("values", Pointer),
        *_sizes("row_stride", "layer_stride", "head_stride"),
        *_sizes("num_rows", "num_queries", "num_heads", "head_dim"),
        *_sizes("num_layers", "num_kv_heads", "query_stride", "query_row_stride"),
        ("lengths", Pointer),
        *_sizes("num_own"),
        ("sees", Pointer),
        *_sizes("sees_stride"),
        ("tables", Pointer),
        *_sizes("page_size", "num_pages", "sinks", "window"),
    )


class Layer(ctypes.Structure):
    """`Layer` in decode.c."""

    _fields_ = (
        *((name, ctypes.POINTER(Matrix)) for name in ("qkv", "output", "gate_up", "down")),
        *((name, Pointer) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_float) for name in ("attention_eps", "ffn_eps", "head_eps")),
    )


class Draft(ctypes.Structure):
    """`Draft` in draft.h."""

    _fields_ = (
        *(
            (name, ctypes.POINTER(Matrix))
            for name in ("qkv", "self_output", "cross_q", "cross_output", "gate_up", "down")
        ),
        *((name, Pointer) for name in ("self_norm", "cross_norm", "ffn_norm", "final_norm")),
        ("eps", ctypes.c_float),
    )


class SamplingOfRows(ctypes.Structure):
    """`SamplingOfRows` in choose.h."""

    _fields_ = tuple(
        (name, Pointer) for name in ("temperature", "top_p", "min_p", "penalty", "top_k", "seen")
    )


class Choosing(ctypes.Structure):
    """`Choosing` in choose.h."""

    _fields_ = (
        ("sampling", ctypes.POINTER(SamplingOfRows)),
        ("logits", Pointer),
        *_sizes("size", "num_nodes"),
        *((name, Pointer) for name in ("seeds", "positions", "tokens", "parents", "out")),
    )


class Rows(ctypes.Structure):
    """`Rows` in rounds.h."""

    _fields_ = (
        *((name, Pointer) for name in ("lengths", "num_unread", "report", "text", "limits", "eos_ids")),
        *((name, Pointer) for name in ("feature", "running", "seen", "active")),
        *_sizes("hidden_size", "num_eos", "report_stride", "text_stride", "num_tokens"),
    )


class DraftedChain(ctypes.Structure):
    """`DraftedChain` in draft.h."""

    kept: list[Any]
    """What it points to."""

    _fields_ = (
        ("draft", ctypes.POINTER(Draft)),
        ("parent", ctypes.POINTER(Matrix)),
        ("parent_norm", Pointer),
        ("head", ctypes.POINTER(Matrix)),
        ("more", Pointer),
        *_sizes("num_more"),
        *((name, Pointer) for name in ("token_ids", "temperature", "seeds")),
        ("rows", ctypes.POINTER(Rows)),
        ("to", Writing),
        ("ring", Context),
        ("pages", Context),
        *_sizes("window", "ring_size"),
        *((name, Pointer) for name in ("ring_positions", "replaced", "hidden", "tokens", "scores")),
    )


def library() -> ctypes.CDLL | None:
    """The compiled code, or None if this machine has no C compiler that works."""
    found = _load()
    return found if isinstance(found, ctypes.CDLL) else None


def code() -> ctypes.CDLL:
    """The compiled code, which must be there."""
    found = _load()
    assert isinstance(found, ctypes.CDLL), found
    return found


def code_hash() -> str:
    """It differs where the C code does."""
    return hashlib.sha256(_text()).hexdigest()[:16]


def _text() -> bytes:
    files = sorted(_SOURCE.parent.glob("*.[ch]"))
    return b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)


def what_is_missing() -> str:
    """Why there is no library."""
    found = _load()
    return found if isinstance(found, str) else ""


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        loaded = _opened()
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").split("\n")
        return f"{' '.join(error.cmd[:1])} ended with {error.returncode}: {said[0]}"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error)
    number = ctypes.c_int
    loaded.product.argtypes = (
        ctypes.POINTER(Matrix), number, Pointer, Pointer, ctypes.c_float, _SIZE, number, Pointer, number,
    )  # fmt: skip
    loaded.fit_grids.argtypes = (Pointer, _SIZE, _SIZE, _SIZE, Pointer, Pointer, number)
    loaded.rope_write.argtypes = (ctypes.POINTER(Writing), Pointer)
    loaded.attend.argtypes = (ctypes.POINTER(Context), Pointer, Pointer, Pointer, number)
    loaded.forward.argtypes = (
        ctypes.POINTER(Layer), _SIZE, ctypes.POINTER(Writing), ctypes.POINTER(Context), _SIZE,
        Pointer, number,
    )  # fmt: skip
    loaded.draft_level.argtypes = (
        ctypes.POINTER(Draft), ctypes.POINTER(Writing), ctypes.POINTER(Context), ctypes.POINTER(Context),
        Pointer, Pointer, Pointer, number,
    )  # fmt: skip
    loaded.choose.argtypes = (ctypes.POINTER(Choosing), _SIZE, number)
    loaded.noise.argtypes = (_SIZE, _SIZE, Pointer, _SIZE, Pointer)
    loaded.settle.argtypes = (
        ctypes.POINTER(Rows), _SIZE, Pointer, Pointer, Pointer, Pointer, _SIZE, _SIZE, number,
        Pointer, Pointer, Pointer,
    )  # fmt: skip
    loaded.norm.argtypes = (Pointer, Pointer, ctypes.c_float, _SIZE, _SIZE, Pointer)
    loaded.describe_nodes.argtypes = (
        Pointer, _SIZE, _SIZE, Pointer, Pointer, _SIZE, _SIZE, Pointer, Pointer, Pointer,
    )  # fmt: skip
    loaded.find.argtypes = (Pointer, _SIZE, Pointer, _SIZE, _SIZE, _SIZE, Pointer, Pointer)
    chain = ctypes.POINTER(DraftedChain)
    loaded.claim.argtypes, loaded.claim.restype = (chain, Pointer, Pointer, Pointer), _SIZE
    loaded.chain_level.argtypes = (chain, _SIZE, Pointer, Pointer, _SIZE, Pointer, Pointer, number)
    loaded.end_chain.argtypes = (chain, _SIZE)
    loaded.chain_level.restype = loaded.end_chain.restype = None
    for name in (
        "product",
        "rope_write",
        "attend",
        "forward",
        "draft_level",
        "choose",
        "noise",
        "find",
        "norm",
        "describe_nodes",
    ):
        getattr(loaded, name).restype = None
    return loaded


def _opened() -> ctypes.CDLL:
    """Load the library. If its file cannot be loaded, compile it again."""
    try:
        return ctypes.CDLL(str(_compiled()))
    except OSError:  # damaged, or compiled on another system that shares the folder
        return ctypes.CDLL(str(_compiled(again=True)))


def _compiled(again: bool = False) -> Path:
    """The library's file. It is compiled now, unless there is one for this code, compiler and processor and
    it is not wanted `again`."""
    command = _compiler()
    if not command:
        raise FileNotFoundError(f"no C compiler ({', '.join(_COMPILERS)}) is on the path")
    command += [*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]
    content = b"\0".join((_text(), " ".join(command).encode(), _processor()))
    name = f"decode-{hashlib.sha256(content).hexdigest()[:16]}.so"
    folder = cache_dir() / "native"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    # Code that somebody else put there is not run.
    if not again and (folder / name).is_file() and (folder / name).stat().st_uid in (0, os.getuid()):
        return folder / name
    with tempfile.TemporaryDirectory() as work:
        made = Path(work) / name
        line = [*command, str(_SOURCE), "-o", str(made), "-lm"]
        subprocess.run(line, check=True, capture_output=True, timeout=_PATIENCE)
        data = made.read_bytes()
    try:
        write_whole(folder / name, data)
        clear_unfinished(folder)
    except OSError:  # no room, no rights, or another process cleared what this one wrote
        folder = Path(tempfile.mkdtemp(prefix="longspec-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / name).write_bytes(data)
    return folder / name


def _compiler() -> list[str]:
    """The command that CC names, or the first compiler that there is."""
    named = shlex.split(os.environ.get("CC", ""))
    found = named or [name for name in _COMPILERS if shutil.which(name)][:1]
    return found


def _processor() -> bytes:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    told = (b"flags", b"Features", b"model name")
    return b"\n".join(sorted({line for line in lines if line.startswith(told)}))
