"""The cache between requests: threads, streams that nobody finishes, and memory that does not suffice."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from longspec import LongSpec, UserError
from longspec.config import RopeConfig
from longspec.decoding.reuse import PrefixStore
from longspec.decoding.row import Row
from longspec.models import rope
from longspec.models.rope import RopeTable

GIBIBYTE = 2**30


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_threads(*works: object) -> list[object]:
    """Run all at once; returns what each one raised or returned."""
    results: list[object] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()  # type: ignore[operator]
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("_eager_threads")
def test_only_one_thread_gets_the_cache(tiny: LongSpec) -> None:
    target, store = tiny.engine.target, PrefixStore()
    cache = target.new_cache(1, 64)
    for _ in range(100):
        store.put_back(cache, [Row([1, 2, 3], 0, 1)])
        taken = run_threads(*[lambda: store.take(target, [[1, 2, 3]], 64, 64)] * 4)
        assert sum(one is cache for one in taken) == 1


def test_a_rope_table_that_threads_grow_never_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RopeTable(RopeConfig(), 8)

    def slow(_: RopeConfig) -> float:
        time.sleep(0.05 if threading.current_thread().name == "slow" else 0.01)
        return 1.0

    def grow(capacity: int) -> torch.Tensor:
        threading.current_thread().name = "slow" if capacity == 100 else "fast"
        table.reserve(capacity)
        time.sleep(0.3)
        return table(torch.tensor([[capacity - 1]]))[1]

    monkeypatch.setattr(rope, "amplitude", slow)
    for result in run_threads(lambda: grow(100), lambda: grow(200)):
        assert isinstance(result, torch.Tensor), result
    with torch.inference_mode():
        table.reserve(300)
    assert not table.table.is_inference(), "training must be able to use it afterwards"


@pytest.mark.usefixtures("_eager_threads")
def test_threads_get_what_they_would_get_alone(tiny: LongSpec) -> None:
    prompts = [[7] * 20 + list(range(100 + index, 160 + index)) for index in range(4)]

    def ask(index: int, size: int) -> list[int]:
        return tiny.generate(prompts[index % 4], max_new_tokens=size).token_ids

    alone = [ask(index, 20) for index in range(4)]

    def work(first: int) -> bool:
        return all(ask(first + turn, 20) == alone[(first + turn) % 4] for turn in range(8))

    assert run_threads(*[lambda first=first: work(first) for first in range(4)]) == [True] * 4


def test_a_stream_that_is_dropped_is_freed_at_once(tiny: LongSpec) -> None:
    gc.collect()
    gc.disable()
    try:
        stream = tiny.stream("Tell me a story.", max_new_tokens=20, eos_ids=())
        next(stream)
        cache = weakref.ref(stream._request._state.cache)  # type: ignore[union-attr]
        later = tiny.generate("Something else.", max_new_tokens=4)
        del stream
        assert cache() is None, "a newer request's cache is kept, and this one is gone"
    finally:
        gc.enable()
    again = tiny.generate("Something else.", max_new_tokens=4)
    assert (again.prefilled_tokens, again.token_ids) == (1, later.token_ids)


def test_the_consumers_time_is_not_in_the_figures(tiny: LongSpec) -> None:
    stream = tiny.stream("Tell me a story.", max_new_tokens=8, eos_ids=())
    started = time.perf_counter()
    for _ in stream:
        time.sleep(0.2)
    waited = time.perf_counter() - started
    result = stream.result
    assert 0 < result.prefill_seconds < result.seconds < waited - 0.5


def test_what_does_not_fit_in_memory_is_refused_with_what_would(
    tiny: LongSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(100, 150))
    tiny.generate(prompt, max_new_tokens=4, method="vanilla")
    per_token = tiny.engine.target.config.kv_bytes_per_token(4)
    free = 256 * 2**20 + 100 * per_token
    monkeypatch.setattr("longspec.decoding.reuse.free_memory", lambda device: free)
    with pytest.raises(UserError, match="has room for") as refused:
        tiny.generate(prompt + prompt, max_new_tokens=1900, method="vanilla")
    found = re.search(r"room for (\d+) tokens", str(refused.value))
    assert found
    assert len(prompt) < int(found[1]) < 200, "what the store holds would come free"
    again = tiny.generate(prompt, max_new_tokens=4, method="vanilla")
    assert again.prefilled_tokens == 1, "nothing was given up for a request that is refused"
    tiny.reset()
    assert tiny.generate(prompt, max_new_tokens=49, eos_ids=(), method="vanilla").tokens == 49
    tiny.reset()
    with pytest.raises(UserError, match="has room for 99 tokens"):
        tiny.generate(prompt, max_new_tokens=50, method="vanilla")


def test_an_allocator_that_gives_up_is_explained(tiny: LongSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspec.decoding.reuse.free_memory", lambda device: 10**9 * GIBIBYTE)
    with pytest.raises(UserError, match=f"no memory for a KV cache of {10**14} tokens"):
        PrefixStore().take(tiny.engine.target, [[1, 2]], 10**14, 10**14)
