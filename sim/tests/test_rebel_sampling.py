# SPDX-License-Identifier: Apache-2.0
"""Sampling on the device: ``torch.ops.rbln``."""

# Third Party
import pytest
import torch

rebel = pytest.importorskip("rebel", reason="tests the simulator itself")
pytest.importorskip("rebel.ops")

pytestmark = pytest.mark.sim

DRAWS = 4000


def draw(
    probs: list[float], k: int | None = None, p: float | None = None
) -> torch.Tensor:
    rows = torch.tensor(probs).expand(DRAWS, -1)
    ks = None if k is None else torch.full((DRAWS,), k, dtype=torch.int32)
    ps = None if p is None else torch.full((DRAWS,), p)
    drawn: torch.Tensor = torch.ops.rbln.top_k_top_p(rows, ks, ps)
    return drawn


@pytest.mark.parametrize("device", ["cpu", "rbln:0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_argmax(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-4.0, -9.0, -9.0, -5.0]]).to(dtype)
    out = torch.ops.rbln.argmax(logits.to(device))
    assert out.device == torch.device(device)
    assert out.dtype == torch.int32
    assert out.tolist() == [1, 0]  # of equals the first


@pytest.mark.parametrize(
    ("k", "p", "possible"),
    [
        (None, None, {0, 1, 2, 3}),
        (1, None, {1}),
        (2, None, {1, 3}),
        (99, None, {0, 1, 2, 3}),
        (None, 0.3, {1}),
        (None, 0.5, {1, 3}),
        (None, 1.0, {0, 1, 2, 3}),
        (3, 0.75, {1, 3}),
        (None, 0.0, {1}),
    ],
)
def test_top_k_top_p_draws_exactly_from_what_is_left(
    k: int | None, p: float | None, possible: set[int]
) -> None:
    out = draw([0.125, 0.4375, 0.0625, 0.375], k, p)
    assert out.dtype == torch.int32
    assert set(out.tolist()) == possible


def test_draws_follow_the_probabilities_that_are_left() -> None:
    rebel.manual_seed(1)
    out = draw([0.125, 0.375, 0.125, 0.375], k=2)
    assert 0.45 < (out == 1).float().mean() < 0.55


def test_rows_have_their_own_k_and_p() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    k, p = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0.4, 1.0])
    for _ in range(50):
        assert torch.ops.rbln.top_k_top_p(probs, k, p).tolist() == [0, 2]


def test_seeded_apart_from_torch() -> None:
    torch.manual_seed(5)
    untouched = torch.rand(3)
    torch.manual_seed(5)
    rebel.manual_seed(11)
    first = draw([0.25] * 4)
    assert torch.equal(torch.rand(3), untouched)
    assert not torch.equal(draw([0.25] * 4), first)
    rebel.manual_seed(11)
    assert torch.equal(draw([0.25] * 4), first)


def test_top_k_of_one_is_argmax_when_two_are_equal() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.4, 0.1]])
    out = torch.ops.rbln.top_k_top_p(probs, torch.tensor([1], dtype=torch.int32), None)
    assert torch.equal(out, torch.ops.rbln.argmax(probs))


def rejection(
    drafts: list[list[int]],
    probs: list[list[float]],
    k: list[int] | None = None,
    p: list[float] | None = None,
    width: int = 2,
    device: str = "cpu",
) -> tuple[list[list[int]], list[int]]:
    """Sequences' drafts and a row of probabilities for each, packed and padded."""
    packed = [token for sequence in drafts for token in sequence]
    missing = len(drafts) * width - len(packed)
    # What pads is what an earlier step left there.
    ids = torch.tensor(packed + [1] * missing, dtype=torch.int32)
    rows = torch.tensor(probs + [[1.0, 0.0, 0.0]] * missing)
    ends = torch.tensor([len(d) for d in drafts], dtype=torch.int32).cumsum(0)
    ks = None if k is None else torch.tensor(k, dtype=torch.int32).to(device)
    ps = None if p is None else torch.tensor(p).to(device)
    recovered, accepted = torch.ops.rbln.rejection_sample(
        ids.to(device), rows.to(device), ends.int().to(device), ks, ps
    )
    assert recovered.device == accepted.device == torch.device(device)
    assert recovered.dtype == accepted.dtype == torch.int32
    return recovered.tolist(), accepted.tolist()


@pytest.mark.parametrize("device", ["cpu", "rbln:0"])
def test_greedy_drafts_are_accepted_up_to_the_first_wrong_one(device: str) -> None:
    a, b, c = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]
    recovered, accepted = rejection(
        [[0, 1], [2, 0], [0, 1], [], [2]],
        [a, b, a, b, a, c, c],
        k=[1] * 5,
        device=device,
    )
    assert accepted == [2, 0, 1, 0, 1]
    # Of the second sequence's first draft, and of the third's second.
    assert recovered == [[0, 0], [0, 0], [0, 2], [0, 0], [0, 0]]


def test_a_draft_is_accepted_with_the_target_s_probability() -> None:
    rebel.manual_seed(2)
    accepted, others = 0, set()
    for _ in range(50):
        recovered, counts = rejection([[0]] * 40, [[0.25, 0.5, 0.25]] * 40, width=1)
        accepted += sum(counts)
        others |= {
            row[0] for row, count in zip(recovered, counts, strict=True) if not count
        }
    assert 0.2 < accepted / 2000 < 0.3
    assert others == {1, 2}, "what was rejected is not drawn again"


def test_what_top_k_and_top_p_leave_out_is_rejected() -> None:
    rows = [[0.5, 0.375, 0.125]] * 3
    assert rejection([[2]] * 3, rows, k=[2] * 3, width=1)[1] == [0, 0, 0]
    assert rejection([[1]] * 3, rows, p=[0.5] * 3, width=1) == ([[0]] * 3, [0] * 3)
