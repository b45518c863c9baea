# SPDX-License-Identifier: Apache-2.0
"""The environment of servers under test."""

# Future
from __future__ import annotations

# Standard
from functools import cache
from pathlib import Path
import atexit
import json
import shutil
import tempfile

# First Party
from tests.support.serving import runtime as demo

#: Makes a model of sliding windows of the tiny ``llama``.
SLIDING_WINDOWS = (
    "--hf-overrides",
    json.dumps({"layer_types": ["sliding_attention"] * 2, "sliding_window": 128}),
)


def serving_environment(
    runtime: demo.Runtime, cache_dir: Path, backend: str | None = "rbln"
) -> dict[str, str]:
    """The demo's, of the same arguments, with one thing that servers share.

    It is what vLLM has found out about a model's class. It starts a process for that,
    which takes a third of a server's start. Compiled graphs are not shared: sizes of
    the KV cache hang on them.
    """
    environment = demo.serving_environment(runtime, cache_dir, backend)
    model_infos = Path(environment["VLLM_CACHE_ROOT"], "modelinfos")
    model_infos.parent.mkdir(parents=True, exist_ok=True)
    if not model_infos.exists():
        model_infos.symlink_to(_model_infos(), target_is_directory=True)
    return environment


@cache
def _model_infos() -> Path:
    """Make the folder that all servers of this test run share."""
    folder = Path(tempfile.mkdtemp(prefix="model-infos-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
