"""What Prometheus reads. No text of any request is in it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.serve.service import Service

__all__ = ["CONTENT_TYPE", "metrics"]


class _Counted(Collector):
    def __init__(self, service: Service | None) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("penstock_model_loaded", "0 while a model is loaded.", self._service is not None)
        if self._service is None:
            return
        counts, engine = self._service.counts, self._service.engine
        for name, value, about in (
            ("requests_running", counts.running, "Requests that are read or answered."),
            ("requests_waiting", counts.waiting, "Requests that wait for a sequence."),
            ("sequences_free", self._service.free_sequences, "Sequences of the plan that nobody has."),
            ("kv_pages", counts.pages, "Pages of the KV pools."),
            ("kv_pages_had", counts.pages_had, "KV pages that requests have."),
            ("kv_pages_kept", counts.pages_kept, "KV pages that nobody has, kept for prompts that begin alike."),
            ("predicted_tokens_per_second", engine.prediction.decode_tokens_per_s, "Of all sequences together."),
            ("host_memory_peak_bytes", engine.peak_host_bytes, "The most memory of the process so far."),
        ):
            yield GaugeMetricFamily(f"penstock_{name}", about, value)
        ended = CounterMetricFamily("penstock_requests", "Requests that have ended, by how.", labels=["ended"])
        for how, count in (("answered", counts.answered), ("failed", counts.failed), ("cancelled", counts.cancelled)):
            ended.add_metric([how], count)
        yield ended
        for name, total, about in (
            ("prompt_tokens", counts.prompt_tokens, "Tokens of prompts that were read."),
            ("cached_prompt_tokens", counts.cached_tokens, "Tokens of prompts that were there from an earlier one."),
            ("output_tokens", counts.output_tokens, "Tokens that were said."),
            ("kv_given_back", counts.given_back, "Times that a request gave its KV pages back and waited again."),
            ("passes", counts.passes, "Passes through the model."),
            ("passes_seconds", counts.passes_s, "Seconds of these passes."),
        ):
            yield CounterMetricFamily(f"penstock_{name}", about, total)
        moved = CounterMetricFamily("penstock_moved_bytes", "Bytes that crossed a lane.", labels=["lane"])
        for lane, nbytes in engine.session.bytes_moved().items():
            moved.add_metric([str(lane)], nbytes)
        yield moved


def metrics(service: Service | None) -> bytes:
    """The text of /metrics. Counters are of the loaded model, and begin anew when it is loaded again."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Counted(service))
    return generate_latest(registry)
