# SPDX-License-Identifier: Apache-2.0
"""What every attention operator takes besides its own arguments."""

# Standard
from collections.abc import Callable, Iterator

# Third Party
import pytest
import torch

pytest.importorskip("rebel._device", reason="tests the simulator itself")

# Third Party
from rebel.ops._register import define_attention
from rebel.ops.torch_custom_ops import attn

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def scaled() -> Iterator[Callable[..., torch.Tensor]]:
    """An operator with a kernel and a shape function that know no option."""
    library = torch.library.Library("rbln_sim_test", "FRAGMENT")
    define_attention(
        library,
        "scaled(Tensor q, Tensor? scale=None) -> Tensor",
        lambda q, scale: q * scale,
        lambda q, scale: torch.empty_like(q),
    )
    yield torch.ops.rbln_sim_test.scaled
    library._destroy()


@pytest.mark.parametrize("traced", [False, True], ids=["run", "traced"])
@pytest.mark.parametrize("device", ["cpu", "rbln:0"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_sorted_batch_gets_the_same(
    scaled: Callable[..., torch.Tensor], is_sorted: bool, device: str, traced: bool
) -> None:
    def layer(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scaled(q, scale, is_prompt_sorted=is_sorted)

    run = torch.compile(layer, backend="rbln", fullgraph=True) if traced else layer
    q, scale = torch.arange(6.0), torch.tensor(3.0)
    got = run(q.to(device), scale.to(device))
    assert torch.equal(got.cpu(), q * scale)


def test_every_attention_operator_takes_the_option() -> None:
    """vllm-rbln 0.12.1 passes it to all of them, 0.12.0 to none."""
    schemas = [
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{attn._LIBRARY.ns}::")
    ]
    assert len(schemas) >= 13
    for schema in schemas:
        option = schema.arguments[-1]
        assert (option.name, option.kwarg_only) == ("is_prompt_sorted", True), schema
        assert option.default_value is False, schema
