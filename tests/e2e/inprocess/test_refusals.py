# SPDX-License-Identifier: Apache-2.0
"""What LMCache would go on without stops the engine instead."""

# Standard
from dataclasses import replace
from pathlib import Path
import json

# Third Party
import pytest

# First Party
from tests.e2e.inprocess.engines import CONFIGS, EnginePool, InProcessEngine
from tests.e2e.messages import assert_logged, assert_logged_last
from tests.e2e.serving import SLIDING_WINDOWS
from tests.support.serving.processes import ServerFailedError
from tests.support.serving.runtime import Runtime

BROKEN_PLUGIN = {
    "LMCACHE_STORAGE_PLUGINS": "Broken",
    "LMCACHE_EXTRA_CONFIG": json.dumps(
        {
            # A class that is there, and can't be made of what LMCache gives it.
            "storage_plugin.Broken.module_path": "fractions",
            "storage_plugin.Broken.class_name": "Fraction",
        }
    ),
}


def start_and_end(engine: InProcessEngine, how: str) -> None:
    """Start an engine that ends by itself, and look at how it does."""
    try:
        with pytest.raises(ServerFailedError, match=how):
            engine.start()
    finally:
        engine.stop()


def test_a_tier_that_cannot_be_made(
    runtime: Runtime, tmp_path: Path, engines: EnginePool
) -> None:
    """The engine ends by itself, threads of LMCache notwithstanding."""
    engines.stop()  # an NPU has one owner
    config = replace(CONFIGS["small"], name="refused", probe=False)
    refused = InProcessEngine(config, runtime, tmp_path, BROKEN_PLUGIN)
    start_and_end(refused, "ended with status")
    assert_logged("broken-plugin", refused.log())
    assert "lmcache_rbln.allow_degraded" in refused.log()


def test_a_start_that_fails_behind_the_registration(
    runtime: Runtime, tmp_path: Path, engines: EnginePool
) -> None:
    """vLLM shuts no connector down then; the engine must end all the same."""
    engines.stop()
    config = replace(CONFIGS["small"], name="failed", probe=False)
    failed = InProcessEngine(config, runtime, tmp_path, {"VLLM_RBLN_COMPILE_ONLY": "1"})
    start_and_end(failed, "ended with status")
    assert "KV cache on rbln:0" in failed.log()
    assert "mode='compile_only'" in failed.log()


def test_a_model_of_sliding_windows(
    runtime: Runtime, tmp_path: Path, engines: EnginePool
) -> None:
    engines.stop()
    config = replace(
        CONFIGS["small"],
        name="windows",
        model="llama",
        probe=False,
        args=SLIDING_WINDOWS,
    )
    refused = InProcessEngine(config, runtime, tmp_path)
    start_and_end(refused, "ended with status 1")
    assert_logged_last("windows-in-process", refused.log())
