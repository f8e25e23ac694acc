"""Whether `auto` captures the best method, or uses another one because a capture would not pay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from longspec.decoding.methods import VANILLA, Method
from longspec.engine.auto import MethodFitter, Outlook, Policy
from longspec.engine.device import Device

RunningRows = tuple[Sequence[Outlook], Sequence[int] | None, int, int]
"""The first arguments of `Policy.pick`: outlooks, runs, number of rows, context."""
_Graph = tuple[Method, int, bool]
"""The name of a captured round: the fitted method, the number of rows, and whether any row is sampled."""


class Captures:
    """Lets a method be captured when that pays.

    The rest of one answer may be too short to pay for a capture, but many answers are not. So what was lost
    so far without the capture counts, too.
    """

    def __init__(self, device: Device, fit: MethodFitter) -> None:
        self._device, self._fit = device, fit
        self._lost: defaultdict[_Graph, float] = defaultdict(float)
        """The seconds that were lost because a round was not captured."""

    def pick(
        self,
        policy: Policy,
        rows: RunningRows,
        max_nodes: int | None,
        draws: bool,
        sampled: bool,
        num_left: int,
    ) -> Method:
        """The method for rows that may emit `num_left` more tokens each. If it is not captured yet, it should
        be."""
        wanted = policy.pick(*rows, max_nodes)

        def graph(method: Method) -> _Graph:
            return self._fit(method, draws), rows[2], sampled

        if self._device.is_ready(*graph(wanted)):
            return wanted
        delays = {
            method: max(self._device.capture_seconds - self._lost[graph(method)], 0.0) / num_left
            for method in (VANILLA, *policy.methods)
            if not self._device.is_ready(*graph(method))
        }
        picked = policy.pick(*rows, max_nodes, delays)
        if picked != wanted:
            # Below 0 where vanilla is wanted and `picked` is less than `LEAST_SPEED` times as fast.
            self._lost[graph(wanted)] += max(policy.lost(wanted, picked, *rows), 0.0)
        self._lost.pop(graph(picked), None)  # it is captured now, if it was not before
        return picked
