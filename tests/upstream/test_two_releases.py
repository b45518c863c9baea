# SPDX-License-Identifier: Apache-2.0
"""Chunks that one release of LMCache has stored are found and read by the other.

Both compute keys and chunks of the same prompt and the same KV here, each in its own
environment. Server and workers are of one release all the same: LMCache's messages
carry packed tokens since 0.5.7.
"""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
import json
import subprocess

# Third Party
import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = [ROOT / venv / "bin" / "python" for venv in (".venv", ".venv-next")]
_STORED = """
import hashlib, json, logging, sys
logging.disable()
from importlib import metadata
import torch
from kv_reference import LAYOUTS, Case
from lmcache.v1.gpu_connector.kv_format import detect_format
from lmcache.utils import EngineType
from lmcache.lmcache_native import TransferDirection
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps
from lmcache_rbln._lmcache import in_process

found = {}
for layout in LAYOUTS:
    case = Case(layout, num_layers=2, num_blocks=5)
    count = torch.Size(case.layer_shape).numel()
    layers = [
        torch.arange(i * count, (i + 1) * count, dtype=torch.int16)
        .view(torch.bfloat16)
        .view(case.layer_shape)
        for i in range(case.num_layers)
    ]
    detected, views = detect_format(layers, EngineType.VLLM)
    chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype)
    RblnDeviceOps().multi_layer_block_kv_transfer(
        views, [chunk], [3, 1], "cpu", TransferDirection.D2H, case.shape_desc(), 8,
        detected, 0,
    )
    stored = chunk.view(torch.uint8).numpy().tobytes()
    found[layout] = hashlib.sha256(stored).hexdigest()

tokens = list(range(64))
hasher = TokenHasher(chunk_size=16, hash_algorithm="blake3")
found["keys of the server"] = [h.hex() for h in hasher.compute_chunk_hashes(tokens)]
database = in_process("v1.token_database").ChunkedTokenDatabase(
    LMCacheEngineConfig.from_defaults(
        chunk_size=16, pre_caching_hash_algorithm="sha256_cbor"
    ),
    LMCacheMetadata(
        model_name="m", world_size=1, local_world_size=1, worker_id=0,
        local_worker_id=0, kv_dtype=torch.bfloat16, kv_shape=(2, 2, 16, 2, 8),
        engine_id="e",
    ),
)
keys = [key.to_string() for _, _, key in database.process_tokens(tokens)]
found["keys in process"] = keys
print(json.dumps([metadata.version("lmcache"), found]))
"""


def test_both_store_the_same_under_the_same_keys() -> None:
    if not PYTHONS[1].exists():
        pytest.skip("no .venv-next here: `make setup-next` makes it")
    results = []
    for python in PYTHONS:
        done = subprocess.run(
            [str(python), "-c", _STORED],
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": f"{ROOT}/tests/support",
                "PYTHONHASHSEED": "0",
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    (one, stored), (other, stored_by_other) = results
    assert one != other
    assert len(stored["keys of the server"]) == len(stored["keys in process"]) == 4
    assert stored == stored_by_other
