"""The figures of /metrics, under vLLM's names with our prefix, so that its dashboards can be used."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from longspec.server.answer import Answer, Speculation
from longspec.server.wire import Row, Status

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SHORT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts over all requests, and the engine's own figures."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self.registry.register(self._engine)
        self._name = model_name

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"longspec:{name}", about, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(
                f"longspec:{name}", about, ("model_name",), buckets=buckets, registry=self.registry
            )
            return made.labels(model_name)

        self._success = counter("request_success", "Requests that were answered.", "finished_reason")
        self._refused = counter("request_refused", "Requests that were not answered.", "status")
        self._generated = counter("generation_tokens", "Tokens of answers.").labels(model_name)
        self._steps = counter("spec_decode_num_drafts", "Rounds that proposed tokens.").labels(model_name)
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens proposed.").labels(model_name)
        self._accepted = counter("spec_decode_num_accepted_tokens", "Tokens accepted.").labels(model_name)
        self._by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Tokens accepted at each depth.", "position"
        )
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._between = histogram(
            "inter_token_latency_seconds", "From one time that tokens came to the next.", _SHORT
        )
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.mean_seconds = 1.0
        """A moving average over recent requests."""

    def count(self, rows: Iterable[Row]) -> None:
        """Count the tokens of answers that have come since the last call."""
        for row in rows:
            self._generated.inc(len(row.tokens) - row.num_counted)
            row.num_counted = len(row.tokens)

    def note(self, answer: Answer) -> None:
        """Count an answer that is complete, or whose client has left."""
        self.count(choice.row for choice in answer.choices)
        found = Speculation()
        for choice in answer.choices:
            row = choice.row
            self._success.labels(self._name, choice.finish_reason or "abort").inc()
            found.add(row)
            if row.tokens:
                self._first.observe(row.times[0] - answer.begun)
            for earlier, later in pairwise(row.times):
                self._between.observe(later - earlier)
            if row.times and row.end is not None and row.end.error is None:
                seconds = row.times[-1] - answer.begun
                self._whole.observe(seconds)
                self.mean_seconds += 0.1 * (seconds - self.mean_seconds)
        self._steps.inc(found.num_steps)
        self._drafted.inc(found.num_drafted)
        self._accepted.inc(found.num_accepted)
        for depth, count in found.by_depth.items():
            self._by_position.labels(self._name, str(depth - 1)).inc(count)

    def note_refused(self, status: int) -> None:
        self._refused.labels(self._name, str(status)).inc()

    def told(self, status: Status) -> bytes:
        """All figures in Prometheus's text form; `status` is the engine's state now."""
        self._engine.status = status
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    status: Status | None = None

    def __init__(self, model_name: str) -> None:
        self._name = model_name

    def collect(self) -> Iterable[Metric]:
        if self.status is None:
            return
        did = self.status.statistics
        gauges = {
            "num_requests_running": ("Sequences that have a slot.", self.status.num_running),
            "num_requests_waiting": ("Sequences that wait for one.", self.status.num_waiting),
            "kv_cache_usage_perc": ("Share of the pages that are held.", did.held_pages / did.num_pages),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts.", did.prompt_tokens),
            "prefix_cache_queries": ("Tokens of prompts that were looked for.", did.prompt_tokens),
            "prefix_cache_hits": ("Tokens of prompts whose KV was there already.", did.shared_tokens),
            "num_preemptions": ("Sequences that gave their pages to older ones.", did.num_paused),
        }
        families = ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters))
        for family, values in families:
            for name, (about, value) in values.items():
                made = family(f"longspec:{name}", about, labels=("model_name",))
                made.add_metric((self._name,), value)
                yield made
        rounds = CounterMetricFamily(
            "longspec:rounds", "Rounds of sequences, by method.", labels=("model_name", "method")
        )
        for method, count in did.rounds.items():
            rounds.add_metric((self._name, method), count)
        yield rounds
