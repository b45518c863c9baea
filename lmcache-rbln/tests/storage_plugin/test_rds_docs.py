# SPDX-License-Identifier: Apache-2.0
"""What ``docs/rds.md`` says of settings, metrics and messages is so."""

# Standard
from dataclasses import fields
from pathlib import Path
import re

# First Party
from lmcache_rbln.storage_plugin import rds_metrics
from lmcache_rbln.storage_plugin.rds_settings import RDSSettings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/rds.md").read_text(encoding="utf-8")
COUNTERS = {
    "lmcache:rds_written_bytes_total",
    "lmcache:rds_read_bytes_total",
    "lmcache:rds_written_chunks_total",
    "lmcache:rds_read_chunks_total",
    "lmcache:rds_lookup_hits_total",
    "lmcache:rds_lookup_misses_total",
    "lmcache:rds_evicted_chunks_total",
    "lmcache:rds_rejected_chunks_total",
    "lmcache:rds_write_failures_total",
    "lmcache:rds_read_failures_total",
    "lmcache:rds_staging_failures_total",
}


def test_every_setting_is_in_the_table_with_its_default() -> None:
    rows = re.findall(r"(?m)^\| `rds_(\w+)` \| .*? \| `?([\w.]+)`? \| ", TEXT)
    defaults = {field.name: str(field.default) for field in fields(RDSSettings)}
    defaults["wait_timeout"] = "5"
    assert dict(rows) == defaults


def test_every_metric_is_in_the_table() -> None:
    named = set(re.findall(r"lmcache:rds_\w+", TEXT))
    counters = {f"lmcache:rds_{name}_total" for name in rds_metrics._COUNTERS}
    assert counters == COUNTERS
    others = {*rds_metrics._GAUGES, *rds_metrics._LATENCIES}
    assert named == counters | {f"lmcache:rds_{name}" for name in others}


def test_every_message_is_one_of_ours() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "src/lmcache_rbln/storage_plugin").glob("*.py")
    )
    flat = re.sub(r'"\s*f?"', "", sources)
    rows = re.findall(r"(?m)^\| `([^`]+)` \| ", TEXT.split("## Troubleshooting")[1])
    messages = [row for row in rows.copy() if " " in row]
    assert len(messages) > 6
    for message in messages:
        for part in re.split(r"\.\.\.|\d", message):
            assert part.strip() in flat, part
