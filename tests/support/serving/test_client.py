# SPDX-License-Identifier: Apache-2.0
"""A counter that is missing is not zero."""

# Third Party
import pytest

# First Party
from tests.support.serving.client import RequestFailedError, parse_counters


def test_counters_add_up_over_labels_and_a_missing_one_is_not_zero() -> None:
    counters = parse_counters(
        "# TYPE vllm:hits_total counter\n"
        'vllm:hits_total{engine="0",model_name="a,b"} 5.0\n'
        'vllm:hits_total{engine="1",model_name="a \\"b\\""} 7e2\n'
    )
    assert counters.total("vllm:hits_total") == 705
    assert counters.total("vllm:hits_total", engine="1") == 700
    with pytest.raises(RequestFailedError, match="no metric vllm:misses_total"):
        counters.total("vllm:misses_total")
    with pytest.raises(RequestFailedError, match="'engine': '9'"):
        counters.total("vllm:hits_total", engine="9")
