# SPDX-License-Identifier: Apache-2.0
"""What a block transfer refuses, and that nothing has moved by then."""

# Standard
from typing import Any
import inspect

# Third Party
import numpy
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    as_bytes,
    random_bits,
    upload,
)
from torch._subclasses.fake_tensor import FakeTensorMode
import pytest
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps

D2H, H2D = TransferDirection.D2H, TransferDirection.H2D


class Call:
    """A valid call on a small cache, of which a test spoils one argument."""

    def __init__(self, layout: Layout = "blocks_first", device: str = "cpu") -> None:
        self.case = Case(layout, num_blocks=6)
        self.arguments: dict[str, Any] = {
            "paged_buffer_ptrs_tensor": [
                upload(random_bits(self.case.layer_shape, self.case.dtype, i), device)
                for i in range(2)
            ],
            "lmcache_objects_ptrs": [
                random_bits(self.case.chunk_shape(8), self.case.dtype, 10 + i)
                for i in range(2)
            ],
            "block_ids": [5, 0, 3, 1],
            "device": device,
            "direction": H2D,
            "shape_desc": self.case.shape_desc(),
            "lmcache_chunk_size": 8,
            "engine_kv_format": self.case.engine_kv_format,
            "skip_prefix_n_blocks": 0,
        }

    @property
    def layers(self) -> list[torch.Tensor]:
        return self.arguments["paged_buffer_ptrs_tensor"]

    @property
    def chunks(self) -> list[torch.Tensor]:
        return self.arguments["lmcache_objects_ptrs"]

    def run(self) -> None:
        RblnDeviceOps().multi_layer_block_kv_transfer(**self.arguments)

    def refuses(self, *parts: str, **spoiled: Any) -> None:
        """Fail unless the call raises, names every part and moves nothing."""
        layers, chunks = self.layers, self.chunks
        before = [as_bytes(t).clone() for t in (*layers, *chunks)]
        for direction in (
            [spoiled["direction"]] if "direction" in spoiled else [H2D, D2H]
        ):
            self.arguments |= spoiled | {"direction": direction}
            with pytest.raises(ValueError) as refused:
                self.run()
            for part in parts:
                assert part in str(refused.value)
        for tensor, bytes_before in zip((*layers, *chunks), before, strict=True):
            assert torch.equal(as_bytes(tensor), bytes_before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_call_that_tests_spoil_is_valid(device: str, layout: Layout) -> None:
    call = Call(layout, device)
    before = as_bytes(call.layers[0]).clone()
    call.run()
    assert not torch.equal(as_bytes(call.layers[0]), before)


def test_the_interface_is_the_base_class_s() -> None:
    ours = inspect.signature(RblnDeviceOps.multi_layer_block_kv_transfer)
    base = inspect.signature(DeviceOps.multi_layer_block_kv_transfer)
    assert list(ours.parameters) == list(base.parameters)
    # LMCache hands over tensors, not pointers, only because of this word.
    assert "Tensor" in str(ours.parameters["lmcache_objects_ptrs"].annotation)


def test_pointers_are_refused() -> None:
    Call().refuses("KV layers", paged_buffer_ptrs_tensor=torch.tensor([1, 2]))
    Call().refuses("chunks", "int at index 0", lmcache_objects_ptrs=[1, 2])


@pytest.mark.parametrize(
    "engine_kv_format",
    [
        EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
        EngineKVFormat.NL_X_NB_TWO_BS_NH_HS,
        EngineKVFormat.NL_X_TWO_NB_NH_BS_HS,
        EngineKVFormat.NL_X_NBBS_ONE_HS,
        EngineKVFormat.NB_NL_TWO_BS_NH_HS,
    ],
    ids=str,
)
def test_other_formats_are_refused(engine_kv_format: EngineKVFormat) -> None:
    Call().refuses(
        "[NB, 2, NH, 1, BS, HS]",
        "[2, NB, NH, 1, BS, HS]",
        "[NB, BS, HS]",
        "--model-impl vllm",
        engine_kv_format=engine_kv_format,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [
        (6, 2, 2, 2, 4, 8),
        (6, 3, 2, 1, 4, 8),
        (3, 6, 2, 1, 4, 8),
        (6, 2, 2, 1, 4, 8, 1),
        (6, 2, 4, 8),
        (48, 8),
        (6, 0, 8),
    ],
    ids=str,
)
def test_other_shapes_are_refused(layout: Layout, shape: tuple[int, ...]) -> None:
    layers = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    Call(layout).refuses(str(list(shape)), paged_buffer_ptrs_tensor=layers)


def test_one_hnd_layout_is_not_taken_for_the_other() -> None:
    Call("kv_first").refuses(
        "blocks-first", engine_kv_format=Case("blocks_first").engine_kv_format
    )
    Call("blocks_first").refuses(
        "K/V-first", engine_kv_format=Case("kv_first").engine_kv_format
    )


def test_no_layers_are_refused() -> None:
    Call().refuses("at least one KV layer", paged_buffer_ptrs_tensor=[])


def test_meta_layers_are_refused() -> None:
    call = Call()
    layers = [layer.to("meta") for layer in call.layers]
    call.refuses(
        "KV layer 0 is a meta tensor without memory",
        "VLLM_RBLN_USE_DEVICE_TENSOR=1",
        paged_buffer_ptrs_tensor=layers,
    )


@pytest.mark.npu
def test_layers_on_another_device_are_refused() -> None:
    Call().refuses("on cpu", "rbln:0", device="rbln:0")
    Call(device="rbln:0").refuses("on rbln:0", "cpu", device="cpu")
    Call(device="rbln:0").refuses("on rbln:0", "rbln:1", device="rbln:1")


@pytest.mark.npu
def test_a_device_without_an_index_is_the_current_one() -> None:
    call = Call(device="rbln:0")
    call.arguments["device"] = "rbln"
    call.run()
    if torch.rbln.device_count() > 1:
        Call(device="rbln:1").refuses("on rbln:1", "rbln", device="rbln")


def test_the_host_has_one_device() -> None:
    call = Call()
    call.arguments["device"] = "cpu:0"
    call.run()


def test_a_block_stride_that_disagrees_is_refused() -> None:
    call = Call()
    desc = call.case.shape_desc()
    desc.block_stride_elems = call.layers[0].stride(0)
    call.arguments["shape_desc"] = desc
    call.run()
    desc.block_stride_elems += 1
    Call().refuses("shape_desc.block_stride_elems", shape_desc=desc)


def test_layers_on_a_device_of_another_kind_are_refused() -> None:
    with FakeTensorMode():
        layers = [torch.empty(Case("mla").layer_shape, device="cuda") for _ in range(2)]
    Call("mla").refuses("rbln device", "cuda:0", paged_buffer_ptrs_tensor=layers)


@pytest.mark.parametrize("spoil", ["shape", "dtype", "strides"])
def test_layers_that_differ_are_refused(spoil: str) -> None:
    call = Call()
    first, second = call.layers
    other = {
        "shape": torch.zeros(7, *first.shape[1:], dtype=first.dtype),
        "dtype": second.to(torch.float16),
        "strides": torch.zeros(6, 4, *first.shape[2:], dtype=first.dtype)[:, :2],
    }[spoil]
    call.refuses("must agree", "layer 1", paged_buffer_ptrs_tensor=[first, other])


@pytest.mark.npu
def test_layers_on_two_devices_are_refused() -> None:
    call = Call(device="rbln:0")
    call.refuses(
        "must agree",
        "device",
        paged_buffer_ptrs_tensor=[call.layers[0], call.layers[1].cpu()],
    )


def test_head_blocks_that_are_not_dense_are_refused() -> None:
    call = Call()
    shape = list(call.case.layer_shape)
    token_padded = torch.zeros(*shape[:-1], 9, dtype=torch.bfloat16)[..., :8]
    transposed = torch.zeros(6, 2, 4, 1, 2, 8, dtype=torch.bfloat16).transpose(2, 4)
    expanded = torch.zeros(1, *shape[1:], dtype=torch.bfloat16).expand(*shape)
    strides = torch.empty(shape).stride()
    overlapping = torch.zeros(4096, dtype=torch.bfloat16).as_strided(
        shape, (strides[0] - 1, *strides[1:])
    )
    for layer in (token_padded, transposed, expanded, overlapping):
        assert tuple(layer.shape) == call.case.layer_shape
        Call().refuses("dense", paged_buffer_ptrs_tensor=[layer, layer])


@pytest.mark.parametrize(
    "name", ["kv_size", "nl", "nb", "bs", "nh", "hs", "element_size"]
)
def test_a_descriptor_that_disagrees_is_refused(name: str) -> None:
    call = Call()
    desc = call.case.shape_desc()
    setattr(desc, name, getattr(desc, name) * 2)
    call.refuses(f"shape_desc.{name}", shape_desc=desc)


@pytest.mark.parametrize(
    ("size", "hint"), [(0, 4), (-4, 4), (6, 8), (2, 4), (3, 4), (9, 12)]
)
def test_chunk_sizes_that_are_no_multiple_are_refused(size: int, hint: int) -> None:
    Call().refuses(
        "block_size=4 but chunk size", "is not a positive multiple",
        f"chunk size {size}", f"--chunk-size {hint}",
        lmcache_chunk_size=size,
    )  # fmt: skip


def test_chunks_of_another_dtype_or_device_are_refused() -> None:
    call = Call()
    good = call.chunks[0]
    call.refuses(
        "torch.float16", "torch.bfloat16", lmcache_objects_ptrs=[good, good.half()]
    )
    Call().refuses("meta", "cpu", lmcache_objects_ptrs=[good, good.to("meta")])
    Call().refuses(
        "strides",
        lmcache_objects_ptrs=[good, torch.zeros(2, 2, 16, 8).bfloat16().mT],
    )


@pytest.mark.npu
def test_chunks_in_device_memory_are_refused() -> None:
    call = Call(device="rbln:0")
    good = call.chunks[0]
    call.refuses(
        "chunk 1 is on rbln:0",
        lmcache_objects_ptrs=[good, upload(good, "rbln:0")],
    )


def test_a_negative_skip_is_refused() -> None:
    Call().refuses("skip_prefix_n_blocks=-1", skip_prefix_n_blocks=-1)


def test_an_unknown_direction_is_refused() -> None:
    for direction in ("sideways", 7, None):
        Call().refuses("none of", "D2H", direction=direction)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_enums_may_come_as_numbers(layout: Layout) -> None:
    call = Call(layout)
    call.arguments |= {
        "direction": int(D2H),
        "engine_kv_format": int(call.case.engine_kv_format),
    }
    before = as_bytes(call.chunks[0]).clone()
    call.run()
    assert not torch.equal(as_bytes(call.chunks[0]), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_prefix_n_blocks", 1.5),
        ("skip_prefix_n_blocks", None),
        ("lmcache_chunk_size", 8.0),
        ("lmcache_chunk_size", True),
        ("engine_kv_format", []),
        ("engine_kv_format", 999),
        ("device", "junk"),
        ("device", None),
        ("shape_desc", None),
        ("block_ids", None),
        ("block_ids", [5, 0, 3, 1.0]),
        ("block_ids", [5, 0, 3, True]),
        ("block_ids", [5, 0, 3, None]),
        ("block_ids", ["5", "0", "3", "1"]),
        ("block_ids", torch.tensor([5.0, 0.0, 3.0, 1.0])),
        ("block_ids", torch.tensor([[5, 0], [3, 1]])),
        ("block_ids", torch.tensor(5)),
    ],
)
def test_values_of_another_kind_are_refused(name: str, value: object) -> None:
    Call().refuses("block" if name == "block_ids" else name, **{name: value})


def test_block_ids_of_numpy_and_torch_are_accepted() -> None:
    for block_ids in (numpy.array([5, 0, 3, 1]), torch.tensor([5, 0, 3, 1])):
        call = Call()
        call.arguments |= {"block_ids": block_ids, "direction": D2H}
        call.run()


def test_elements_too_wide_to_copy_are_refused() -> None:
    call = Call()
    layers = [layer.to(torch.complex128) for layer in call.layers]
    chunks = [chunk.to(torch.complex128) for chunk in call.chunks]
    desc = call.case.shape_desc()
    desc.element_size = 16
    call.refuses(
        "complex128",
        paged_buffer_ptrs_tensor=layers,
        lmcache_objects_ptrs=chunks,
        shape_desc=desc,
    )


def test_a_gather_into_memory_that_is_used_twice_is_refused() -> None:
    call = Call()
    good = call.chunks[0]
    twice = [good, good]
    call.refuses("same memory", lmcache_objects_ptrs=twice, direction=D2H)
    call = Call()
    other = call.chunks[1]
    shared = other[:, :1].expand(-1, 2, -1, -1)
    overlapping = other.as_strided(other.shape, (256, 128, 8, 1))
    for chunk in (shared, overlapping):
        Call().refuses("overlap", lmcache_objects_ptrs=[good, chunk], direction=D2H)
    # One chunk may be restored to several places.
    call.arguments |= {"lmcache_objects_ptrs": twice, "direction": H2D}
    call.run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gather_into_chunks_that_overlap_in_part_is_refused(layout: Layout) -> None:
    call = Call(layout)
    shape = call.case.chunk_shape(8)
    count = torch.Size(shape).numel()
    pool = random_bits((3 * count,), call.case.dtype, 3)
    first = pool[:count].view(shape)
    wide = pool[: 2 * count].view(call.case.chunk_shape(16))
    for chunks in (
        [first, pool[1 : 1 + count].view(shape)],
        [pool[count - 1 : 2 * count - 1].view(shape), first],
        [wide[..., 0:8, :], wide[..., 7:15, :]],
        [wide[..., 8:16, :], first],
    ):
        Call(layout).refuses(
            "chunks 0 and 1 are the same memory",
            lmcache_objects_ptrs=chunks,
            direction=D2H,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gather_into_windows_that_interleave(layout: Layout) -> None:
    """Their extents overlap, their elements don't."""
    call = Call(layout)
    pool = random_bits(call.case.chunk_shape(16), call.case.dtype, 3)
    windows = [pool[..., 8:16, :], pool[..., 0:8, :]]
    apart = [torch.empty_like(window) for window in windows]
    for chunks in (windows, apart):
        call.arguments |= {"lmcache_objects_ptrs": chunks, "direction": D2H}
        call.run()
    for window, wanted in zip(windows, apart, strict=True):
        assert torch.equal(as_bytes(window), as_bytes(wanted))


def test_lmcache_may_free_memory_without_a_synchronize() -> None:
    """What keeps the server from claiming NPUs; transfers keep the promise."""
    assert RblnDeviceOps().transfers_complete_on_return


def test_nothing_to_move_is_no_error() -> None:
    call = Call()
    call.arguments |= {"lmcache_objects_ptrs": [], "block_ids": []}
    call.run()
