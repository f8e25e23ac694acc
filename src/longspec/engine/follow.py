"""A rank other than 0: `python -m longspec.engine.follow`, with torchrun's environment variables."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn

import torch
import torch.distributed as dist

from longspec.engine.device import Device, make_device
from longspec.engine.load import Loaded, load_models
from longspec.engine.orders import Call, Failed, Load, Open, Order, Ping, Ready, receive, send
from longspec.engine.ranks import connect, find_store, join_group, torchrun_rank
from longspec.errors import UserError, reason_of
from longspec.models.placement import on_device, out_of_memory, room_on
from longspec.models.sharding import Shard


class Follower:
    """Carries out rank 0's orders one after the other."""

    def __init__(self, rank: int) -> None:
        self._rank, self._store = rank, find_store()
        self._link = connect(self._store, rank)
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._sends = threading.Lock()
        self._models: Loaded | None = None
        self._device: Device | None = None

    def run(self) -> None:
        """Work until rank 0 sends None."""
        threading.Thread(target=_listen, args=(self._link, self._orders, self._sends), daemon=True).start()
        try:
            with torch.inference_mode():
                while (order := self._orders.get()) is not None:
                    self._obey(order)
        except Exception as error:
            self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        reason = str(error)
        if out_of_memory(error):
            reason = "there is not enough memory"
        elif not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason_of(error)}"
            # A collective fails when another rank has ended. Give rank 0 time to notice that one first.
            time.sleep(2)
        with self._sends:
            send(self._link, Failed(reason))

    def _obey(self, order: Load | Open | Call | Ping) -> None:
        if isinstance(order, Load):
            self._load(order)
        elif isinstance(order, Open):
            assert self._models is not None
            target, draft, head, _ = self._models
            with on_device(target.device):
                self._device = make_device(target, draft, head, order.size, order.num_nodes, order.exact)
        elif isinstance(order, Call):
            assert self._device is not None
            with on_device(self._device.models.target.device):
                getattr(self._device, order.name)(*order.arguments)

    def _load(self, order: Load) -> None:
        torch.set_num_threads(order.num_threads)
        join_group(self._store, self._rank, order.devices)
        device = order.devices[self._rank]
        shard = Shard(self._rank, len(order.devices), order.plan.config)
        with torch.inference_mode(False):
            self._models = load_models(order.plan, device, shard)
        with self._sends:
            send(self._link, Ready(room_on(device, order.devices)))


def _listen(link: Connection, orders: SimpleQueue[Order], sends: threading.Lock) -> None:
    """Receive orders, and answer pings while this rank works on one. When rank 0 is gone, end the process at
    once, because a collective would wait for rank 0 forever."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            order: Order = receive(link)
            if isinstance(order, Ping):
                with sends:
                    send(link, order)
                continue
            orders.put(order)
            if order is None:
                return
    os._exit(1)


def follow_if_told(num_ranks: int) -> None:
    """Follow rank 0 if torchrun started this process as another rank. Refuse a wrong number of processes."""
    rank = torchrun_rank()
    if rank is None:
        return
    there = int(os.environ["WORLD_SIZE"])
    if there != num_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", there)) != there:
        raise UserError(
            f"tensor_parallel is {num_ranks}, and torchrun started {there} processes; start as many "
            f"(torchrun --nproc-per-node {num_ranks}), all on one machine"
        )
    if rank:
        follow()


def follow() -> NoReturn:
    """Be a rank other than 0 until rank 0 ends it; does not return."""
    # Ctrl-C reaches all processes of a terminal; rank 0 handles it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # rank 0 shows the same warnings
    code = 0
    try:
        Follower(int(os.environ["RANK"])).run()
    except Exception as error:
        code = 1
        # Rank 0 reports errors that users can act on, and the other two follow from the loss of a rank.
        if not isinstance(error, (UserError, OSError, dist.DistError)) and not out_of_memory(error):
            traceback.print_exc()
    sys.stderr.flush()
    # Not `sys.exit`, because the end of a process group may wait for ranks that have ended already.
    os._exit(code)


if __name__ == "__main__":
    follow()
