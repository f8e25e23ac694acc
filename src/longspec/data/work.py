"""The processes that tokenise, and the lock on the folder that they work in."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from longspec.atomic import check_folder
from longspec.data.encode import Bad, Encoded, Encoder, encode_chunk
from longspec.data.options import Recipe
from longspec.data.read import Chunk
from longspec.errors import UserError

# The encoder of a worker process. Tasks of a process pool can get it only from a global variable.
_WORKER: list[Encoder] = []

Done = tuple[Chunk, list[Encoded | Bad]]


def encode_in_order(encoder: Encoder, chunks: Iterable[Chunk], workers: int) -> Iterator[Done]:
    """Each chunk with its outcomes, in order; more than one worker runs in separate processes."""
    if workers <= 1:
        for chunk in chunks:
            yield chunk, encode_chunk(encoder, chunk)
        return
    pending: deque[tuple[Chunk, Future[list[Encoded | Bad]]]] = deque()
    # Spawned, not forked, because a fork would lose the threads of torch and of the tokenizer's library.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (encoder.recipe, encoder.tokenizer))
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(_encode, chunk)))
            if len(pending) > 2 * workers:  # bounds what is in memory
                yield _next(pending)
        while pending:
            yield _next(pending)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps because memory ran out: run the same command again with "
            "fewer --workers; it continues where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _next(pending: deque[tuple[Chunk, Future[list[Encoded | Bad]]]]) -> Done:
    chunk, future = pending.popleft()
    return chunk, future.result()


def _start_worker(recipe: Recipe, tokenizer: Any) -> None:
    """Ignore Ctrl-C, which the parent process handles, and end when the parent ends.

    The tokenizer is sent by the parent, because to load it here takes about five times as long.
    """
    _WORKER.append(Encoder(recipe, tokenizer))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _encode(chunk: Chunk) -> list[Encoded | Bad]:
    return encode_chunk(_WORKER[0], chunk)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextlib.contextmanager
def claimed(folder: Path, state: str) -> Iterator[None]:
    """Lock a folder against other processes; if no shard was written, remove what was begun."""
    with locked(folder):
        try:
            yield
        finally:
            if not any(folder.glob("shard-*")):
                (folder / state).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and lock it against other processes. A new folder that stays empty is removed."""
    check_folder(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process works in {folder}: wait for it, or name another folder"
            ) from error
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
