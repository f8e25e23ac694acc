"""Where a round's time goes: proposing, the target's pass over the nodes, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from longspec.api import LongSpec
from longspec.bench.clock import now
from longspec.decoding.loop import DecodeState, Method
from longspec.decoding.tree import TokenTree
from longspec.request import Options, Request


class _Watched:
    """A method whose proposing is timed."""

    def __init__(self, method: Method, now: Callable[[], float]) -> None:
        self.name, self.tree_shape = method.name, method.tree_shape
        self.num_nodes, self.depth = method.num_nodes, method.depth
        # The host holds the watch.
        self.device_key: tuple[Hashable, ...] | None = None
        self._method, self._now = method, now
        self.seconds = 0.0
        self.proposing = False

    def begin(self, state: DecodeState) -> None:
        """See `Method.begin`."""
        self._method.begin(state)

    def follow(self, state: DecodeState) -> None:
        """See `Method.follow`."""
        self._method.follow(state)

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`."""
        started, self.proposing = self._now(), True
        tree = self._method.propose(state)
        self.seconds += self._now() - started
        self.proposing = False
        return tree


def time_parts(model: LongSpec, prompt: list[int], options: Options) -> dict[str, float]:
    """Seconds of an average round, by part. Watching costs a little: it is never the timed answer."""
    clock = partial(now, model.engine.target.device)
    request = Request(model.engine, [prompt], options)
    watched = request.method = _Watched(request.method, clock)
    verify, began = 0.0, 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = clock()

    def after(*_: Any) -> None:
        nonlocal verify
        if not watched.proposing:  # magicdec proposes by the target too
            verify += clock() - began

    hooks: list[Any] = []
    turns, started = request.turns(), 0.0
    try:
        next(turns)  # the prefill
        started = clock()
        target = model.engine.target
        hooks = [target.register_forward_pre_hook(before), target.register_forward_hook(after)]
        for _ in turns:
            pass
        total = clock() - started
    finally:
        for hook in hooks:
            hook.remove()
        request.close()
    rounds = request.rows[0].num_rounds
    if not rounds:
        return {}
    rest = total - watched.seconds - verify
    return {"propose": watched.seconds / rounds, "verify": verify / rounds, "accept": rest / rounds}
