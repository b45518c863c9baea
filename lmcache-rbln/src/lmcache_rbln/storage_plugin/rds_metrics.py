# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and latencies of the RDS backend, among LMCache's own metrics."""

# Standard
from functools import cache
from typing import Any

# Third Party
import prometheus_client

# First Party
from lmcache.observability import PrometheusLogger
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

_COUNTERS = {
    "written_bytes": "Bytes of KV chunks written to the NVMe",
    "read_bytes": "Bytes of KV chunks read from the NVMe",
    "written_chunks": "KV chunks written to the NVMe",
    "read_chunks": "KV chunks read from the NVMe, whole and verified",
    "lookup_hits": "Chunks found by lookups",
    "lookup_misses": "Chunks not found by lookups",
    "evicted_chunks": "Chunks evicted to make space",
    "unplaced_chunks": "Chunks not written: all space holds chunks that must stay",
    "rejected_chunks": "Chunks read that were not what was written; each is a miss",
    "write_failures": "Chunks that could not be written",
    "read_failures": "Chunks that could not be read",
    "staging_failures": "Chunks for which there was no staging memory in time",
}
_GAUGES = {
    "chunks": "Chunks on the NVMe",
    "used_bytes": "NVMe space taken, free regions included",
    "staging_free_bytes": "Device staging memory that is free",
}
_LATENCIES = {
    "write_seconds": "Time of one batch from staging memory to the NVMe",
    "read_seconds": "Time of one batch from the NVMe to staging memory, verified",
    "submit_seconds": "Time that a store spends in the engine's thread for the NVMe",
}
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_PREFIX = "lmcache:rds_"


@cache
def _families(labelnames: tuple[str, ...]) -> dict[str, Any]:
    """The metrics of this process: Prometheus takes each name once."""
    return {
        **{
            name: prometheus_client.Counter(_PREFIX + name, text, labelnames)
            for name, text in _COUNTERS.items()
        },
        **{
            name: prometheus_client.Gauge(
                _PREFIX + name, text, labelnames, multiprocess_mode="livesum"
            )
            for name, text in _GAUGES.items()
        },
        **{
            name: prometheus_client.Histogram(
                _PREFIX + name, text, labelnames, buckets=_BUCKETS
            )
            for name, text in _LATENCIES.items()
        },
    }


class RDSMetrics:
    """The metrics of one worker, by the names in this module.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's metadata, for its labels.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> None:
        labels = PrometheusLogger.GetOrCreate(metadata, config=config).labels
        families = _families(tuple(labels))
        self._metrics = {
            name: family.labels(**labels) for name, family in families.items()
        }

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self._metrics[name].inc(amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._metrics[name].set(value)

    def observe(self, name: str, seconds: float) -> None:
        """Record a latency."""
        self._metrics[name].observe(seconds)
