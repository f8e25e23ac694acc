"""A rank other than 0: `python -m longspec.engine.follow`, with torchrun's variables. See `ranks`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn

import torch

from longspec.engine.device import Device, make_device, on_device
from longspec.engine.load import Loaded, load_models
from longspec.engine.ranks import (
    Call,
    Failed,
    Load,
    Open,
    Order,
    Ping,
    Ready,
    connect,
    find_store,
    join_group,
    receive,
    room_on,
    send,
)
from longspec.errors import UserError
from longspec.models.sharding import Shard


class Follower:
    """Does what rank 0 says, in order."""

    def __init__(self, rank: int) -> None:
        self._rank, self._store = rank, find_store()
        self._link = connect(self._store, rank)
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._sends = threading.Lock()
        self._models: Loaded | None = None
        self._device: Device | None = None

    def run(self) -> None:
        """Until rank 0 says that it is over."""
        threading.Thread(target=_listen, args=(self._link, self._orders, self._sends), daemon=True).start()
        try:
            with torch.inference_mode():
                while (order := self._orders.get()) is not None:
                    self._obey(order)
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            with self._sends:
                send(self._link, Failed(reason))
            raise

    def _obey(self, order: Load | Open | Call | Ping) -> None:
        if isinstance(order, Load):
            self._load(order)
        elif isinstance(order, Open):
            assert self._models is not None
            models = self._models
            with on_device(models.target.device):
                self._device = make_device(
                    models.target, models.draft, models.head, order.size, order.num_nodes, order.exact
                )
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
    """Take orders, and say that this rank is alive while it works on one. Without rank 0 there is nothing to
    do, and what this rank may wait for in a collective never comes: end at once."""
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


def follow() -> NoReturn:
    """Be a rank other than 0 for as long as rank 0 is there; the process ends here."""
    # Ctrl-C reaches all processes of a terminal; rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # rank 0 has told it
    code = 0
    try:
        Follower(int(os.environ["RANK"])).run()
    except UserError:
        code = 2  # rank 0 tells it
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by `sys.exit`: the end of a group of which others have ended already may wait for them.
    os._exit(code)


if __name__ == "__main__":
    follow()
