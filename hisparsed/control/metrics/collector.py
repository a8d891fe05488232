"""Prometheus metrics of the control side: from the status, and from the loop's counters.

Readings are taken when Prometheus asks, so a hanging loop shows as a growing report age. vLLM's
metrics are on the same page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hisparsed.control.journal.records import TickRecord
from hisparsed.control.metrics.table import METRICS
from hisparsed.control.status.document import Status
from hisparsed.policy.decisions import LeverDecision
from hisparsed.policy.signals import Lever

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MOVES_HELP = "Moves by lever, direction and reason."
_HOLDS_HELP = "Ticks in which a lever was held, by lever and reason."


def direction(decision: LeverDecision) -> str:
    """One word per lever and direction: the pool that grows, up or down, the order."""
    if decision.lever is Lever.ADMISSION:
        return str(decision.wanted)
    if decision.lever is Lever.WATERMARK:
        return "default" if decision.wanted == "default" else "set"
    grows = float(decision.wanted) > float(decision.current)
    if decision.lever is Lever.SPLIT:
        return "to-offload" if grows else "to-hisparse"
    return "up" if grows else "down"


class ControlMetrics(Collector):
    """Owns its registry. ``status`` is asked for the document at each scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._moves: Counter[tuple[str, str, str]] = Counter()
        self._holds: Counter[tuple[str, str]] = Counter()
        self.registry = CollectorRegistry()
        self._tick = Histogram(
            "hisparsed_tick_seconds",
            "Time that one tick took, waiting for the engine included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._apply = Histogram(
            "hisparsed_apply_seconds",
            "Time from a command to the engine's answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def count_tick(self, record: TickRecord, tick_s: float) -> None:
        """A move counts when the engine accepted it."""
        self._tick.observe(tick_s)
        failed = record.applied is not None and record.applied.error is not None
        for one in record.decision.levers:
            if not one.acts:
                self._holds[one.lever.value, one.reason.value] += 1
            elif not failed:
                self._moves[one.lever.value, direction(one), one.reason.value] += 1

    def count_apply(self, apply_s: float) -> None:
        self._apply.observe(apply_s)

    def describe(self) -> Iterator[Family]:
        """Families without samples, so that registering reads no status."""
        for metric in METRICS:
            yield _family(metric.name, metric.help, metric.labels, metric.is_counter)
        yield CounterMetricFamily(
            "hisparsed_moves", _MOVES_HELP, labels=("lever", "direction", "reason")
        )
        yield CounterMetricFamily("hisparsed_holds", _HOLDS_HELP, labels=("lever", "reason"))

    def collect(self) -> Iterator[Family]:
        status = self._status()
        for metric in METRICS:
            family = _family(metric.name, metric.help, metric.labels, metric.is_counter)
            for labels, value in metric.read(status):
                family.add_metric(labels, float(value))
            yield family
        moves = CounterMetricFamily(
            "hisparsed_moves", _MOVES_HELP, labels=("lever", "direction", "reason")
        )
        for move, count in self._moves.items():
            moves.add_metric(move, count)
        yield moves
        holds = CounterMetricFamily("hisparsed_holds", _HOLDS_HELP, labels=("lever", "reason"))
        for hold, count in self._holds.items():
            holds.add_metric(hold, count)
        yield holds


def _family(
    name: str, text: str, labels: tuple[str, ...], is_counter: bool
) -> GaugeMetricFamily | CounterMetricFamily:
    if is_counter:
        return CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    return GaugeMetricFamily(name, text, labels=labels)
