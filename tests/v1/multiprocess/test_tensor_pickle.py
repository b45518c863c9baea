# SPDX-License-Identifier: Apache-2.0
"""Messages bring tensors, and run nothing."""

# Standard
from pathlib import Path
from typing import Any
import io
import pickle

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.multiprocess.tensor_pickle import load_tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_tensors_come_as_they_are(dtype: torch.dtype) -> None:
    whole = torch.arange(2 * 3 * 5).reshape(2, 3, 5).to(dtype)
    sent = [whole, whole[:, 1:, ::2], whole[:0]]
    for got, wanted in zip(load_tensors(pickle.dumps(sent)), sent, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, wanted)


class Planted:
    """Makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


class PlantedStorage(Planted):
    """Hides it in what torch reads."""

    def __reduce__(self) -> Any:
        hidden = io.BytesIO()
        torch.save(Planted(self._path), hidden, _use_new_zipfile_serialization=False)
        return torch.storage._load_from_bytes, (hidden.getvalue(),)


@pytest.mark.parametrize("kind", [Planted, PlantedStorage])
def test_nothing_else_is_run(kind: type[Planted], tmp_path: Path) -> None:
    path = tmp_path / "made"
    data = pickle.dumps([kind(path)])
    with pytest.raises(pickle.UnpicklingError):
        load_tensors(data)
    assert not path.exists()
    pickle.loads(data)
    assert path.exists()


@pytest.mark.parametrize("sent", [[1], torch.zeros(1), {"a": torch.zeros(1)}])
def test_nothing_but_a_list_of_tensors_is_taken(sent: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="wanted a list of tensors"):
        load_tensors(pickle.dumps(sent))
