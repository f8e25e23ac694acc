"""The processes that hold one target together: rank 0 starts the others, sends them orders and watches them.

Rank 0 has the engine. Only rank 0 admits, schedules, picks methods and reads results. Each other rank has
only a `Device`, and repeats rank 0's calls of its own in the same order. So nothing on them depends on
clocks, threads or measurements, and only small numbers of the host are sent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from longspec.engine.load import LoadPlan
from longspec.engine.orders import Answer, Call, Failed, Hello, Load, Order, Ping, Ready, receive, send
from longspec.errors import UserError, reason_of
from longspec.models.placement import room_on
from longspec.models.sharding import Shard

T = TypeVar("T")
# Seconds without an answer after which a rank counts as lost.
TIMEOUT = float(os.environ.get("LONGSPEC_RANK_TIMEOUT", "120"))
# Seconds in which a process must start and a collective must finish. NCCL's collectives get more time,
# because ranks wait for each other's compilers while rounds are captured. A lost rank is noticed anyway.
_SLOW, _SLOW_NCCL = 120.0, 900.0
# Seconds between two pings, and seconds to wait for the cause of an error.
_PING, _CAUSE = 1.0, 5.0
# The key in the store that holds the path of rank 0's socket.
_LINK = "longspec/link"


class RankError(ChildProcessError):
    """Another rank is lost, and with it the model; the message names the rank."""


def torchrun_rank() -> int | None:
    """This process's number among those that torchrun started; None: torchrun did not start it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def find_store() -> Store:
    """The store through which the ranks find each other, from torchrun's variables."""
    store: Store = next(rendezvous("env://", timeout=timedelta(seconds=_SLOW)))[0]
    return store


def connect(store: Store, rank: int) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    client.connect(store.get(_LINK).decode())
    link = Connection(client.detach())
    send(link, Hello(rank, os.getpid()))
    return link


def join_group(store: Store, rank: int, devices: tuple[torch.device, ...]) -> None:
    """Join torch's default group of all ranks: NCCL where each has a GPU of its own, else gloo."""
    device = devices[rank]
    with_nccl = device.type == "cuda" and len(set(devices)) == len(devices)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if with_nccl else "gloo",
        store=PrefixStore("longspec/group", store),
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(seconds=_SLOW_NCCL if with_nccl else _SLOW),
        device_id=device if with_nccl else None,
    )


@dataclass(eq=False)
class _Peer:
    """Another rank, as rank 0 knows it."""

    rank: int
    pid: int
    link: Connection
    num_unanswered: int = 0
    """Pings that were sent since its last message."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while a message is sent. Reentrant, because garbage collection may close the model meanwhile."""


class Ranks:
    """The other ranks, as rank 0 sees them. It starts them, unless torchrun did."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        if dist.is_initialized():
            raise UserError(
                "tensor_parallel needs torch.distributed for itself, and this process uses it already; close "
                "the other model, or use another process"
            )
        self.devices = devices
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._peers: list[_Peer] = []
        self._answers: dict[int, Ready] = {}
        self._error: RankError | None = None
        self._news = threading.Condition()
        self._over = threading.Event()
        self._is_leading, self._has_joined = False, False
        self._num_threads = torch.get_num_threads()
        self._watcher = threading.Thread(target=self._watch, name="longspec-ranks", daemon=True)
        try:
            self._store = self._start() if torchrun_rank() is None else find_store()
            self._accept()
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    @property
    def size(self) -> int:
        """How many ranks there are, with this one."""
        return len(self.devices)

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the other ranks, in order."""
        return [peer.pid for peer in sorted(self._peers, key=lambda peer: peer.rank)]

    def _start(self) -> Store:
        seconds = timedelta(seconds=_SLOW)
        store = TCPStore("127.0.0.1", 0, self.size, True, seconds, wait_for_workers=False)
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(self.size)}
        for rank in range(1, self.size):
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "longspec.engine.follow"],
                env={**os.environ, **given, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        return store

    def _accept(self) -> None:
        end = time.monotonic() + _SLOW
        # The socket is in a folder that only this user can open, because reading a pickle can run code.
        with (
            tempfile.TemporaryDirectory(prefix="longspec-") as folder,
            socket.socket(socket.AF_UNIX) as server,
        ):
            path = str(Path(folder) / "link")
            server.bind(path)
            server.listen(self.size)
            server.settimeout(_PING)
            self._store.set(_LINK, path)
            while len(self._peers) < self.size - 1:
                missing = set(range(1, self.size)) - {peer.rank for peer in self._peers}
                for rank, process in self._processes.items():
                    if process.poll() is not None:
                        raise RankError(f"{self._name(rank)} ended at its start, with code {process.poll()}")
                if time.monotonic() > end:
                    raise RankError(f"{self._name(min(missing))} did not start within {_SLOW:g} s")
                with contextlib.suppress(TimeoutError):
                    link = Connection(server.accept()[0].detach())
                    hello = receive(link)
                    self._peers.append(_Peer(hello.rank, hello.pid, link))

    def load(self, plan: LoadPlan) -> Shard:
        """Let the other ranks load their parts; returns the part of this process."""
        if self.devices[0].type == "cpu":
            # The ranks share the processors.
            torch.set_num_threads(max(1, self._num_threads // self.size))
        self.tell(Load(self.devices, plan, torch.get_num_threads()))
        with self.explained():
            join_group(self._store, 0, self.devices)
        self._has_joined = True
        return Shard(0, self.size, plan.config)

    def room(self) -> int:
        """Wait until all ranks have loaded their parts; returns the fewest free bytes of any rank."""
        with self._news:
            while len(self._answers) < self.size - 1:
                self.check()
                self._news.wait(_PING)
        own = room_on(self.devices[0], self.devices)
        return min(own, *(one.free for one in self._answers.values()))

    def tell(self, order: Order) -> None:
        self.check()
        for peer in self._peers:
            with self.explained(), peer.lock:
                send(peer.link, order)

    def lead(self, name: str, arguments: tuple[Any, ...], work: Callable[[], T]) -> T:
        """Do `work` on this rank's device, and let the other ranks call the same method of theirs."""
        if self._is_leading:
            return work()  # called inside a method that the other ranks were sent already
        self._is_leading = True
        try:
            self.tell(Call(name, arguments))
            with self.explained():
                return work()
        finally:
            self._is_leading = False

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the error of the rank that caused an error here. The ranks are out of step after it."""
        try:
            yield
        except Exception as error:
            cause = self._cause(error)
            if cause is error:
                raise
            raise cause from error

    def check(self) -> None:
        if self._error is not None:
            raise RankError(*self._error.args)

    def _cause(self, error: Exception) -> Exception:
        """The error of the rank that caused this one; if no rank did, the error itself. The model cannot be
        used after that."""
        with self._news:
            if not isinstance(error, UserError):  # a UserError is rank 0's own
                self._news.wait_for(lambda: self._error is not None, _CAUSE)
            found = self._error
        if found is not None:
            return found
        self._fail(f"the ranks stopped after an error of rank 0 ({reason_of(error)})")
        return error

    def _watch(self) -> None:
        """Receive the others' messages, and notice when one is lost; runs in a thread of its own."""
        asked = 0.0
        while not self._over.is_set():
            for link in wait([peer.link for peer in self._peers], _PING):
                peer = next(peer for peer in self._peers if peer.link is link)
                try:
                    self._hear(peer, receive(peer.link))
                except (EOFError, OSError):
                    self._lose(peer)
                    return
            if time.monotonic() - asked >= _PING:
                asked = time.monotonic()
                self._ask()
            # Count pings, because the clock goes on while all processes are suspended.
            silent = next((peer for peer in self._peers if peer.num_unanswered * _PING > TIMEOUT), None)
            if silent is not None:
                self._fail(f"{self._name(silent.rank, silent.pid)} has not answered for {TIMEOUT:g} s")
                return

    def _ask(self) -> None:
        for peer in self._peers:
            peer.num_unanswered += 1
            # If a send blocks, the rank does not read, and a ping would block too.
            if peer.lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(OSError):
                        send(peer.link, Ping())
                finally:
                    peer.lock.release()

    def _hear(self, peer: _Peer, answer: Answer) -> None:
        peer.num_unanswered = 0
        if isinstance(answer, Ready):
            with self._news:
                self._answers[peer.rank] = answer
                self._news.notify_all()
        elif isinstance(answer, Failed):
            self._fail(f"{self._name(peer.rank, peer.pid)}: {answer.reason}")

    def _lose(self, peer: _Peer) -> None:
        if self._over.is_set():
            return
        process, ending = self._processes.get(peer.rank), ""
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ending = f", with code {process.wait(_PING)}"
        self._fail(f"{self._name(peer.rank, peer.pid)} ended{ending}")

    def _fail(self, reason: str) -> None:
        """Note the reason, if it is the first, and kill the other ranks, so that none waits for another."""
        with self._news:
            if self._error is None:
                self._error = RankError(f"{reason}; load the model again")
            self._news.notify_all()
        for peer in self._peers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer.pid, signal.SIGKILL)
        group = dist.group.WORLD
        if group is not None and dist.get_backend() == "nccl":
            group.abort()  # otherwise this process would wait on its GPU

    def _name(self, rank: int, pid: int | None = None) -> str:
        found = f"process {pid} on " if pid else ""
        return f"rank {rank} of {self.size} ({found}{self.devices[rank]})"

    def close(self) -> None:
        if self._over.is_set():
            return
        self._over.set()
        self._error = self._error or RankError("the model is closed; load it again")
        if self._has_joined and dist.is_initialized():
            dist.destroy_process_group()  # while the others are still there: NCCL may wait for them
        for peer in self._peers:
            with contextlib.suppress(OSError), peer.lock:
                send(peer.link, None)
        for process in self._processes.values():
            try:
                process.wait(_CAUSE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(_CAUSE)
        for peer in self._peers:
            peer.link.close()
        torch.set_num_threads(self._num_threads)
