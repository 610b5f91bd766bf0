"""The governor's figures for Prometheus; needs the extra `nxrt-driver[metrics]`.

Every scrape reads one snapshot, so its figures agree with each other. Nothing is counted here.
Holders and requests come and go, so they are no labels: `governor.snapshot()` has them.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.snapshot import Snapshot, TierUsage

_GAUGES = {
    "used_bytes": "bytes in use",
    "limit_bytes": "the most that may be in use; absent without a limit",
    "available_bytes": "bytes that would still be granted",
    "peak_bytes": "the most bytes that were ever in use",
    "committed_bytes": "bytes in use that were recorded without asking",
    "oversubscribed_bytes": "bytes in use above the limit",
    "watermark_bytes": "the use from which watchers are told; absent without one",
    "num_waiting": "requests that wait now",
}
_COUNTERS = {
    "num_refused": "requests that were refused, those that timed out among them",
    "num_timed_out": "requests that waited in vain",
    "num_cancelled": "waits that were cancelled",
}


class GovernorCollector(Collector):
    """Report one governor: `prometheus_client.REGISTRY.register(GovernorCollector(governor))`.

    Args:
        governor: whose figures; of the process, usually.
        depth: how many levels below it to report; requests that are levels would be many.
    """

    def __init__(self, governor: MemoryGovernor, *, depth: int = 1) -> None:
        self._governor = governor
        self._depth = depth

    def describe(self) -> Iterator[Metric]:
        """Yield the families without figures, so that registering takes no snapshot."""
        yield from _families([])

    def collect(self) -> Iterator[Metric]:
        """Yield every family, with the figures of one moment."""
        yield from _families(list(_levels(self._governor.snapshot(), self._depth)))


def _levels(snapshot: Snapshot, depth: int) -> Iterator[tuple[str, TierUsage]]:
    for usage in snapshot:
        yield snapshot.level, usage
    if depth > 0:
        for child in snapshot.children:
            yield from _levels(child, depth - 1)


def _families(usages: list[tuple[str, TierUsage]]) -> Iterator[Metric]:
    labels = ["level", "tier"]
    for name, what in _GAUGES.items():
        gauge = GaugeMetricFamily(_metric_name(name), f"Memory: {what}.", labels=labels)
        for level, usage in usages:
            figure = getattr(usage, name.removesuffix("_bytes"))
            if figure is not None:
                gauge.add_metric([level, str(usage.tier)], figure)
        yield gauge
    for name, what in _COUNTERS.items():
        counter = CounterMetricFamily(_metric_name(name), f"Memory: {what}.", labels=labels)
        for level, usage in usages:
            counter.add_metric([level, str(usage.tier)], getattr(usage, name))
        yield counter
    yield _roles(usages, [*labels, "role"])


def _metric_name(name: str) -> str:
    return f"nxrt_memory_{name.removeprefix('num_')}"


def _roles(usages: list[tuple[str, TierUsage]], labels: list[str]) -> Metric:
    gauge = GaugeMetricFamily("nxrt_memory_role_bytes", "Memory: bytes by role.", labels=labels)
    for level, usage in usages:
        for role, nbytes in usage.by_role().items():
            gauge.add_metric([level, str(usage.tier), role.value], nbytes)
    return gauge
