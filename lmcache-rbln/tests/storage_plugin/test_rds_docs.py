# SPDX-License-Identifier: Apache-2.0
"""What ``docs/rds.md`` says of settings, metrics and messages is so."""

# Standard
from dataclasses import fields
from pathlib import Path
import re

# Third Party
import pytest

# First Party
from lmcache_rbln._lmcache import in_process
from lmcache_rbln.storage_plugin.rds import metrics as rds_metrics
from lmcache_rbln.storage_plugin.rds.settings import RDSSettings

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
    "lmcache:rds_unplaced_chunks_total",
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
    counters = {f"lmcache:rds_{name}_total" for name in rds_metrics.COUNTERS}
    assert counters == COUNTERS
    others = {*rds_metrics.GAUGES, *rds_metrics.LATENCIES}
    assert named == counters | {f"lmcache:rds_{name}" for name in others}


# What stands for a value in a message.
VARIABLE = re.compile(r"\.\.\.|rbln:\d|\d+|\bN\b")


def _flat(folder: Path) -> str:
    """Sources with string literals that span lines joined."""
    return "".join(
        re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    )


def _messages(section: str) -> list[str]:
    """Messages in the first column of a section's tables."""
    text = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| `([^`]+)` \| ", text)
    return [row for row in rows if " " in row]


@pytest.mark.parametrize(
    ("section", "count"), [("Watching it", 9), ("Troubleshooting", 8)]
)
def test_every_message_is_one_of_ours_or_of_lmcache(section: str, count: int) -> None:
    ours = _flat(ROOT / "src/lmcache_rbln")
    theirs = _flat(Path(str(in_process("v1.cache_engine").__file__)).parent)
    messages = _messages(section)
    assert len(messages) == count
    for message in messages:
        parts = [part.strip() for part in re.split(VARIABLE, message)]
        assert all(part in ours for part in parts) or (
            message.startswith(("Stored", "Retrieved"))
            and all(part in theirs for part in parts)
        ), message
