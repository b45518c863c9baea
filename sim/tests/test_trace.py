# SPDX-License-Identifier: Apache-2.0
"""Reading, summing up and drawing the simulated NPU's traces."""

# Standard
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Third Party
import pytest
from rbln_sim import trace

MS = 1_000_000


def line(kind: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    """Return one operation; times are in ms."""
    operation = {
        "pid": 7,
        "thread": 70,
        "kind": kind,
        "bytes": 0,
        "descriptors": 0,
        "device": 0,
        "stream": None,
        "via": "link" if kind in trace.COPIES else None,
        "begin": int(begin * MS),
        "end": int(end * MS),
    }
    return operation | more


#: Two overlapping copies on two streams; the host works from 1 to 6 ms, then waits.
LINES = [
    line("h2d", 0, 1, bytes=4096, descriptors=1),
    line("d2h", 1, 5, bytes=8 << 20, descriptors=4, stream=1),
    line("d2h", 3, 9, bytes=8 << 20, descriptors=4, stream=2),
    line("wait", 6, 9),
]


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))
    return path


def test_totals_count_time_once_where_copies_overlap(tmp_path: Path) -> None:
    operations = trace.read(written(tmp_path / "t", LINES))
    sums = trace.totals(operations)
    assert sums["d2h"] == trace.Total(2, 16 << 20, 8, 8 * MS)
    assert sums["h2d"] == trace.Total(1, 4096, 1, MS)
    assert list(sums) == ["d2h", "h2d", "wait"]


def test_what_did_not_take_the_link_is_summed_up_apart(tmp_path: Path) -> None:
    lines = [
        *LINES,
        line("h2d", 10, 11, bytes=64, descriptors=1, via="hidden"),
        line("h2d", 11, 12, bytes=32, descriptors=1, via="host"),
    ]
    operations = trace.read(written(tmp_path / "t", lines))
    sums = trace.totals(operations)
    assert list(sums) == ["d2h", "h2d", "h2d hidden", "h2d host", "wait"]
    assert sums["h2d"] == trace.Total(1, 4096, 1, MS)
    assert sums["h2d hidden"].bytes == 64
    assert "\nh2d hidden " in trace.report(operations)


def test_the_host_works_between_its_operations(tmp_path: Path) -> None:
    operations = trace.read(written(tmp_path / "t", LINES))
    assert trace.host_work(operations) == [(MS, 6 * MS)]
    # Streams were busy from 1 to 9 ms, the host worked for 5 of these 8.
    assert "8.00 ms, during 62 % of which the host worked" in trace.report(operations)


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        ([], [(0, 5)], []),
        ([(0, 5)], [(5, 9)], []),
        ([(0, 5), (7, 9)], [(4, 8)], [(4, 5), (7, 8)]),
        ([(0, 9)], [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    ],
)
def test_common(left: Any, right: Any, wanted: Any) -> None:
    assert trace.common(left, right) == wanted
    assert trace.common(right, left) == wanted


def test_covered_joins_what_touches() -> None:
    assert trace.covered([(5, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (5, 6)]


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    path = written(tmp_path / "t", LINES)
    run = subprocess.run(
        [sys.executable, "-m", "rbln_sim.trace", str(path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "16.00" in run.stdout and "timeline:" in run.stdout
    assert Path(f"{path}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(LINES[0]) + '\n{"pid": 1}\n', "t:2"),
        (json.dumps(LINES[0]) + "\n" + json.dumps(LINES[1])[:40], "t:2"),
        ("5\n", "t:1"),
        ("", "has no operations"),
    ],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    assert trace.main([str(path)]) == 1
    assert message in capsys.readouterr().err
    assert trace.main([str(tmp_path / "missing")]) == 1


GRAPH = """
import torch
from rebel.core.torch_compile import rbln_backend

def double(x):
    return x * 2

double = torch.compile(double, backend="rbln", dynamic=False, fullgraph=True)
bound = torch.empty(256, dtype=torch.float16, device="rbln")
torch.rbln.bind_device_memory(bound)
bound.copy_(torch.ones(256, dtype=torch.float16))
pinned = torch.full((256,), 3, dtype=torch.float16, pin_memory=True)
double(bound)  # compiles
lazy = torch.ones(256, dtype=torch.float16).to("rbln")
open(__import__("os").environ["RBLN_SIM_TRACE"], "w").close()

bound.copy_(pinned, non_blocking=True)
assert double(bound)[0].item() == 6
assert double(lazy)[255].item() == 2
"""


@pytest.mark.sim
def test_graphs_are_traced_and_uploads_inside_them_are_hidden(
    rbln_sim_fork: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    done = rbln_sim_fork(GRAPH, RBLN_SIM_TRACE=str(path))
    assert done.returncode == 0, done.stderr
    operations = trace.read(path)
    graphs = [o for o in operations if o.kind == "graph"]
    assert len(graphs) == 2
    assert all(o.stream is None and o.device == 0 for o in graphs)
    # The asynchronous copy into the first graph's input ends before the graph begins.
    [asynchronous] = [o for o in operations if o.stream is not None]
    assert asynchronous.kind == "h2d" and asynchronous.bytes == 512
    assert asynchronous.end <= graphs[0].begin
    # The second graph's input waited on the host and is brought down inside the graph.
    [hidden] = [o for o in operations if o.kind == "h2d" and o.via == trace.HIDDEN]
    assert hidden.bytes == 512
    assert graphs[1].begin <= hidden.begin <= hidden.end <= graphs[1].end
    assert {o.thread for o in graphs} == {hidden.thread}


@pytest.mark.sim
def test_loans_are_traced_as_hidden_copies(rbln_sim_fork: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    code = """
    import torch
    cache = torch.zeros(256, device="rbln")
    torch.rbln.bind_device_memory(cache)
    cache.add_(1)  # no device kernel: torch-rbln borrows the bytes
    print(cache.cpu().sum().item())
    """
    done = rbln_sim_fork(code, RBLN_SIM_TRACE=str(path))
    assert done.stdout == "256.0\n", done.stderr
    assert [(o.label, o.bytes) for o in trace.read(path)] == [
        ("d2h hidden", 1024),
        ("h2d hidden", 1024),
        ("d2h", 1024),
    ]


@pytest.mark.sim
def test_a_trace_that_cannot_be_written_is_named(
    rbln_sim_fork: Any, tmp_path: Path
) -> None:
    code = "import torch; torch.ones(4).to('rbln')"
    done = rbln_sim_fork(code, RBLN_SIM_TRACE=str(tmp_path))
    assert done.returncode != 0
    assert f"cannot open RBLN_SIM_TRACE='{tmp_path}': Is a directory" in done.stderr
