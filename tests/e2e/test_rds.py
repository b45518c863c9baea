# SPDX-License-Identifier: Apache-2.0
"""Direct storage end to end: vLLM with its KV cache on NVMe, without a CPU tier."""

# Standard
from pathlib import Path

# Third Party
import pytest

# First Party
from tests.e2e.messages import assert_logged
from tests.e2e.rds_server import (
    CHUNK,
    REJECTED,
    STAGING_FAILURES,
    WRITE_FAILURES,
    WRITTEN,
    Server,
    extra_config,
    prompt_of,
    running,
    uncached,
)
from tests.e2e.stack import HITS
from tests.support.serving.client import RequestFailedError, post_json
from tests.support.serving.runtime import Runtime
from tests.support.serving.servers import HOST

pytestmark = pytest.mark.sim


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model and of compiled graphs, for all tests of direct storage."""
    return tmp_path_factory.getbasetemp() / "rds"


def test_the_documented_launch(runtime: Runtime, shared: Path, tmp_path: Path) -> None:
    with running(Server(runtime, shared, tmp_path, prefix_caching=True)) as server:
        prompt = prompt_of("documented", 2 * CHUNK + 100)
        [cold] = server.store(prompt)
        hits = server.total(HITS)
        [again] = server.ask(prompt)
        assert again.token_ids == cold.token_ids
        assert server.total(HITS) == hits, "the NPU's own cache comes first"
        server.evict_npu_cache()
        [warm] = server.ask(prompt)
        assert warm.token_ids == cold.token_ids
        assert warm.cached_tokens == 2 * CHUNK
        assert server.total(HITS) - hits == 2 * CHUNK
        clear = uncached(shared)[0]
        [cold] = server.store(clear.tokens)
        server.evict_npu_cache()
        [warm] = server.ask(clear.tokens)
        assert cold.token_ids == warm.token_ids == clear.answer
        assert warm.cached_tokens == CHUNK
        check_tenants(server)
        assert server.total(WRITE_FAILURES) == server.total(REJECTED) == 0
    log = server.process.log()
    assert "Stored 1024 out of total" in log
    assert "Retrieved 2048 out of 2048 required tokens" in log
    assert "RDS batched write failed" not in log
    assert "degraded mode" not in log


def check_tenants(server: Server) -> None:
    """Each finds what it stored itself, and nothing else."""
    url = f"http://{HOST}:{server.port}/v1/completions"
    body = {"model": "m", "prompt": prompt_of("tenants", CHUNK + 100), "max_tokens": 1}
    salts: list[dict[str, str]] = [{"cache_salt": "A"}, {"cache_salt": "B"}, {}]
    written = server.total(WRITTEN)
    for hits in (0, CHUNK):
        for salt in salts:
            usage = post_json(url, body | salt, timeout_s=300)["usage"]
            details = usage["prompt_tokens_details"] or {}
            assert (details.get("cached_tokens") or 0) == hits
        server.wait_for(WRITTEN, written + len(salts))


def test_two_npus_answer_as_none_cached_and_raise(
    runtime: Runtime, shared: Path, tmp_path: Path
) -> None:
    """Two ranks on one NVMe; under ``raise`` the first failure ends the engine.

    A prompt longer than the limit is no failure: its beginning is what stays.
    """
    server = Server(
        runtime,
        shared,
        tmp_path,
        {
            "OMP_NUM_THREADS": "1",  # two workers, and few cores
            **extra_config(
                rds_buffer_size=4, rds_max_chunks=3, rds_failure_policy="raise"
            ),
        },
        npus=2,
    )
    with running(server):
        prompts = uncached(shared)
        tokens = [prompt.tokens for prompt in prompts]
        cold = server.store(*tokens)
        warm = server.ask(*tokens)
        want = [prompt.answer for prompt in prompts]
        assert [answer.token_ids for answer in cold] == want
        assert [answer.token_ids for answer in warm] == want
        assert [answer.cached_tokens for answer in warm] == [CHUNK] * 3
        assert server.total(REJECTED) == server.total(STAGING_FAILURES) == 0

        long = prompt_of("long", 4 * CHUNK + 20)
        answers = [server.ask(long)[0] for _ in range(3)]
        assert [answer.cached_tokens for answer in answers] == [0, 3 * CHUNK, 3 * CHUNK]
        assert len({answer.token_ids for answer in answers}) == 1
        assert server.total(WRITE_FAILURES) == server.total(REJECTED) == 0
        # Another chunk costs its end.
        server.store(prompt_of("short", CHUNK + 20))
        [answer] = server.ask(long)
        assert answer.cached_tokens == 2 * CHUNK

        server.set_faults("eio:write:1+sticky")
        with pytest.raises(RequestFailedError):
            server.ask(prompt_of("raise", CHUNK + 20))
        server.process.wait_ended(120)
    log = server.process.log()
    # One per rank, with half of the heads each; writes do not overlap collectives.
    assert log.count("RDSBackend on rbln:0") == 2
    assert log.count("slots of 524288 bytes, synchronous writes") == 2
    assert "rds_failure_policy is raise: an RDS transfer failed" in log
    assert_logged("rds-over-its-cap", log)
    reasons = [why for _, why in server.failed_writes()]
    assert reasons and all("Input/output error" in why for why in reasons)
