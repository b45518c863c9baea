# SPDX-License-Identifier: Apache-2.0
"""The simulated library exports what torch-rbln needs, and says how true each is."""

# Standard
import ctypes
import fnmatch

# Third Party
import pytest

# First Party
from rbln_sim import symbols
from rbln_sim.activation import library_path
from rbln_sim.doctor import symbol_problems

pytestmark = pytest.mark.sim
CONTROL = {
    "rbln_sim_allocation",
    "rbln_sim_check",
    "rbln_sim_device_opened",
    "rbln_sim_device_view",
    "rbln_sim_graph_begin",
    "rbln_sim_graph_end",
    "rbln_sim_host_view_known",
}


@pytest.fixture(scope="module")
def needed() -> frozenset[str]:
    return symbols.needed()


def test_exports_are_exactly_what_is_needed(needed: frozenset[str]) -> None:
    assert len(needed) > 90
    assert symbols.exported() == needed | symbols.LOOKED_UP | CONTROL


def test_every_needed_symbol_is_in_the_table(needed: frozenset[str]) -> None:
    assert symbol_problems(symbols.exported(), needed) == []
    used = {symbols.behaviour_of(name) for name in needed | symbols.LOOKED_UP}
    assert used == set(symbols.BEHAVIOURS)


def test_what_is_unsupported_fails_with_its_own_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    library = ctypes.CDLL(str(library_path()))
    unsupported = [
        name
        for name in sorted(symbols.exported() - CONTROL)
        if (entry := symbols.behaviour_of(name)) and entry.status == "unsupported"
    ]
    assert len(unsupported) == 12
    for name in unsupported:
        # None of them looks at its arguments, but the one that wants a true.
        assert library[name](*[ctypes.c_uint64(1)] * 7) != 0, name
        line = capfd.readouterr().err
        assert f"{symbols.base_name(name)}: " in line, name
        assert "not simulated" in line, name


def test_table_and_library_are_compared_by_whole_names() -> None:
    """A pattern of the table covers exports only, and no export has two entries."""
    exports = {symbols.base_name(name) for name in symbols.exported() - CONTROL}
    for entry in symbols.BEHAVIOURS:
        for pattern in entry.names:
            assert fnmatch.filter(exports, pattern), f"nothing is named {pattern}"
    for name in exports:
        entries = [
            entry
            for entry in symbols.BEHAVIOURS
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in entry.names)
        ]
        assert len(entries) == 1, name


def test_problems_are_named() -> None:
    exported = (
        frozenset({"rbln_new", "rbln_free", "rbln_sim_check"}) | symbols.LOOKED_UP
    )
    assert symbol_problems(exported, frozenset({"rbln_free", "rbln_rt_run"})) == [
        "missing: rbln_rt_run",
        "not needed: rbln_new",
        "not in the table of behaviours: rbln_new",
    ]
    assert symbol_problems(frozenset(), frozenset()) == [
        "looked up by torch-rbln, but not exported: rbln_abi_current",
        "looked up by torch-rbln, but not exported: rbln_abi_min_supported",
    ]


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("rbln_rt_run", "rbln_rt_run"),
        ("_ZN4rbln9rbln_freeEm", "rbln_free"),
        ("_ZN4rbln4RcclC1Ev", "Rccl"),
        ("_ZN4rbln4RcclD1Ev", "~Rccl"),
        ("_ZN4rbln4Rccl4InitEiiiRKSt6vectorIiSaIiEEi", "Init"),
        ("_ZNK4rbln11MemoryStats14GetMemoryStatsB5cxx11Ev", "GetMemoryStats"),
        ("_Z21rbln_get_memory_statsi", "rbln_get_memory_stats"),
    ],
)
def test_base_names(mangled: str, name: str) -> None:
    assert symbols.base_name(mangled) == name


def test_dynamic_symbols_of_the_library() -> None:
    offers, wants = symbols.dynamic_symbols(library_path())
    assert "rbln_abi_current" in offers
    assert "mmap" in wants
    assert not offers & wants
