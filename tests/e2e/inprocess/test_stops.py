# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` is stopped while it answers: nothing is left, and a drain is whole.

``python -m tests.campaigns.start_stop`` does it of each kind many times.
"""

# Standard
import signal

# Third Party
import pytest

# First Party
from tests.campaigns.connector_trials import TIERS, problems
from tests.campaigns.engine_trials import Stop, serve
from tests.e2e.inprocess.engines import EnginePool
from tests.support.serving.runtime import Runtime

pytestmark = pytest.mark.sim

#: What ends at all is right here; how soon is the campaign's business.
PATIENCE_S = 300.0
STOPS = [
    Stop("killed", TIERS["rds"], signal.SIGTERM, busy=True),
    Stop("drained", TIERS["rds"], signal.SIGINT, drains=300, busy=True),
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.name)
def test_a_stop_while_requests_are_answered(
    runtime: Runtime,
    engines: EnginePool,
    tmp_path_factory: pytest.TempPathFactory,
    stop: Stop,
) -> None:
    engines.stop()  # for the memory of this machine
    result = serve(runtime, tmp_path_factory.mktemp("stop") / stop.name, stop)
    assert not problems(result, (0,), PATIENCE_S), result.log
    # vLLM lets storage be closed if it lets requests end.
    assert ("Storage backend RDSBackend closed" in result.log) == bool(stop.drains)
    assert "is not a name that LMCache reads" not in result.log
