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

_PREFIX = "lmcache:rds_"
COUNTERS = {
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
GAUGES = {
    "chunks": "Chunks on the NVMe",
    "used_bytes": "NVMe space taken, free regions included",
    "staging_free_bytes": "Device staging memory that is free",
}
LATENCIES = {
    "write_seconds": "Time of one batch from staging memory to the NVMe",
    "read_seconds": "Time of one batch from the NVMe to staging memory, verified",
    "submit_seconds": "Time that a store spends in the engine's thread for the NVMe",
}
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@cache
def _families(labels: tuple[str, ...]) -> dict[str, Any]:
    """The metrics of this process: Prometheus takes each name once."""
    made: dict[str, Any] = {}
    for name, text in COUNTERS.items():
        made[name] = prometheus_client.Counter(_PREFIX + name, text, labels)
    for name, text in GAUGES.items():
        made[name] = prometheus_client.Gauge(
            _PREFIX + name, text, labels, multiprocess_mode="livesum"
        )
    for name, text in LATENCIES.items():
        made[name] = prometheus_client.Histogram(
            _PREFIX + name, text, labels, buckets=_BUCKETS
        )
    return made


def metrics_of(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata
) -> dict[str, Any]:
    """Return the metrics of one worker, by the names in this module.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's metadata, for its labels.
    """
    labels = PrometheusLogger.GetOrCreate(metadata, config=config).labels
    return {
        name: family.labels(**labels)
        for name, family in _families(tuple(labels)).items()
    }
