# SPDX-License-Identifier: Apache-2.0
"""Serving goes on while the NVMe fails, and the cache comes back when it is well.

One server for all of it, under ``rds_failure_policy: ignore``. A chunk of the model is
1 MiB, so that its staging memory holds two.
"""

# Standard
from collections.abc import Iterator
from pathlib import Path
import re

# Third Party
import pytest

# First Party
from tests.e2e.clear_prompts import ClearPrompt
from tests.e2e.messages import assert_logged
from tests.e2e.rds_server import (
    CHUNK,
    READ_FAILURES,
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
from tests.support.serving.client import Completion
from tests.support.serving.runtime import Runtime

pytestmark = pytest.mark.sim

BUFFER_MIB = 3
# What LMCache and this backend say when a wait has come to its end.
TIMED_OUT = re.compile(r"(?i)timed? ?out|No RDS staging memory|under pressure")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model and of compiled graphs, for all tests of direct storage."""
    return tmp_path_factory.getbasetemp() / "rds"


@pytest.fixture(scope="module")
def server(
    runtime: Runtime, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server; each test leaves its NVMe well."""
    folder = tmp_path_factory.mktemp("rds-faults")
    settings = extra_config(rds_buffer_size=BUFFER_MIB)
    with running(Server(runtime, shared, folder, settings)) as made:
        yield made


def test_twice_the_buffer(server: Server) -> None:
    prompts = [prompt_of(number, 2 * CHUNK + 50) for number in range(4)]
    assert len(prompts) * 2 > 2 * BUFFER_MIB
    told = len(server.process.log())
    trouble = (STAGING_FAILURES, WRITE_FAILURES, READ_FAILURES, REJECTED)
    before = [server.total(counter) for counter in trouble]

    cold = server.store(*prompts)
    hits = server.total(HITS)
    for prompt, answer in zip(prompts, cold, strict=True):
        [warm] = server.ask(prompt)
        assert warm.token_ids == answer.token_ids
        assert warm.cached_tokens == 2 * CHUNK
    assert server.total(HITS) - hits == 8 * CHUNK

    # No wait came to its end, and each of them has one: at most nine seconds for
    # staging memory (test_rds_settings.py), and that once per store or restore
    # (test_rds_waits.py).
    assert [server.total(counter) for counter in trouble] == before
    assert not TIMED_OUT.findall(server.process.log()[told:])


def test_a_prompt_of_more_chunks_than_staging_memory_holds(server: Server) -> None:
    prompt = prompt_of("long", (BUFFER_MIB + 2) * CHUNK + 50)
    [cold] = server.store(prompt)
    [warm] = server.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert 0 < warm.cached_tokens <= BUFFER_MIB * CHUNK
    assert_logged("rds-long-prompt", server.process.log())


FAULTS = {
    "eio": ("eio:write:1+sticky", "Input/output error"),
    "enospc": (
        "enospc:alloc:1+sticky,enospc:write:1+sticky",
        "No space left on device",
    ),
    "lost": ("lost:0", "No such device"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_serving_goes_on_and_the_cache_recovers(
    server: Server, shared: Path, fault: str
) -> None:
    prompt = uncached(shared)[list(FAULTS).index(fault)]
    rules, reason = FAULTS[fault]
    told = len(server.failed_writes())
    failures, written = server.total(WRITE_FAILURES), server.total(WRITTEN)

    server.set_faults(rules)
    [failing] = server.ask(prompt.tokens)
    server.wait_for(WRITE_FAILURES, failures + 1)
    [(number, why)] = server.failed_writes()[told:]
    assert number == 1
    assert reason in why
    assert_logged("rds-failed-write", server.process.log())
    assert server.total(WRITTEN) == written

    server.set_faults("")
    [stored] = server.store(prompt.tokens)  # nothing of it was there
    [restored] = server.ask(prompt.tokens)
    assert_right(prompt, failing, stored, restored)
    assert restored.cached_tokens == CHUNK
    assert server.total(WRITE_FAILURES) == failures + 1


def assert_right(prompt: ClearPrompt, *answers: Completion) -> None:
    """Answers are those of the model without a cache."""
    assert {answer.token_ids for answer in answers} == {prompt.answer}


def restore(server: Server, prompt: ClearPrompt) -> Completion:
    """The answer to a prompt whose chunk is restored; stored first if need be."""
    written = server.total(WRITTEN)
    [answer] = server.ask(prompt.tokens)
    if not answer.cached_tokens:
        server.wait_for(WRITTEN, written + 1)
        [answer] = server.ask(prompt.tokens)
    assert answer.cached_tokens == CHUNK
    return answer


def test_failing_reads_are_misses(server: Server, shared: Path) -> None:
    """A lost NVMe is met by a prompt that is stored: read, recompute, store again."""
    prompt = uncached(shared)[0]
    restored = restore(server, prompt)
    read_failures, failures = server.total(READ_FAILURES), server.total(WRITE_FAILURES)
    told = len(server.failed_writes())

    server.set_faults("lost:0")
    [lost] = server.ask(prompt.tokens)
    assert server.total(READ_FAILURES) == read_failures + 1
    server.wait_for(WRITE_FAILURES, failures + 1)
    assert sum(number for number, _ in server.failed_writes()[told:]) == 1
    server.set_faults("")

    [stored] = server.store(prompt.tokens)
    [again] = server.ask(prompt.tokens)
    assert_right(prompt, restored, lost, stored, again)
    assert again.cached_tokens == CHUNK


def test_damaged_chunks_are_computed_anew(server: Server, shared: Path) -> None:
    prompt = uncached(shared)[1]
    restored = restore(server, prompt)
    rejected, written = server.total(REJECTED), server.total(WRITTEN)
    damage(server.nvme)
    [damaged] = server.ask(prompt.tokens)
    assert server.total(REJECTED) == rejected + 1
    server.wait_for(WRITTEN, written + 1)
    [again] = server.ask(prompt.tokens)
    assert_right(prompt, restored, damaged, again)
    assert again.cached_tokens == CHUNK
    server.process.check_running()


def damage(nvme: Path) -> None:
    """Flip a bit every 10,000 bytes of all that is stored."""
    most = 32 << 20
    with nvme.open("r+b") as file:
        data = bytearray(file.read(most))
        for at in range(0, len(data), 10_000):
            data[at] ^= 1
        file.seek(0)
        file.write(data)
