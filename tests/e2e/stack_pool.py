# SPDX-License-Identifier: Apache-2.0
"""The stacks that the end-to-end tests share, one running at a time."""

# Standard
from dataclasses import replace
from pathlib import Path
import os

# First Party
from tests.e2e.stack import BLOCK_SIZE, Stack, StackConfig
from tests.support.serving import tiny_models
from tests.support.serving.runtime import Runtime

# On the NPU where vLLM-RBLN keeps windows in blocks.
HYBRID = StackConfig(
    "hybrid",
    model="gemma3",
    size=tiny_models.Size(layers=3, window=BLOCK_SIZE),
    objects_per_chunk=3,
    env={"RBLN_FORCE_NPU_NAME": "RBLN-CR13"},
    num_blocks=40,
)
STACKS = {
    # As the user page says, prefix caching included; blocks-first KV, pinned backend.
    "blocks-first": StackConfig("blocks-first", blocks_per_chunk=2),
    # The custom kernel's KV layout; two NPUs of which one is visible; LMCache finds
    # the backend by itself; the worker in a process of its own; the NPU keeps parts of
    # blocks too.
    "kv-first": StackConfig(
        "kv-first",
        block_axis=1,
        transfer_mode="auto",
        backend=None,
        env={
            "RBLN_USE_CUSTOM_KERNEL": "1",
            "RBLN_SIM_DEVICES": "2",
            "RBLN_VISIBLE_DEVICES": "1",
        },
        engine_args=("--distributed-executor-backend", "mp"),
        max_batched_tokens=64,
    ),
    # Without the NPU's own cache, as the demo starts it; a load that fails fails its
    # request, as vLLM does by default.
    "mla": StackConfig(
        "mla", model="mla", prefix_caching=False, load_failure_policy=None
    ),
    # Full attention beside windows of a chunk and a part of one. vLLM-RBLN takes the
    # scheduler's blocks for them where it finds parts of blocks too.
    "hybrid": replace(
        HYBRID, size=tiny_models.Size(layers=3, window=200), max_batched_tokens=64
    ),
    # Windows of a block, where it does not; half of a chunk. Without shared memory.
    "hybrid-inline": replace(
        HYBRID, name="hybrid-inline", blocks_per_chunk=2, shm=False
    ),
    # As the user page says, with the KV cache that vLLM-RBLN makes after its warm-up.
    "sized": StackConfig("sized", num_blocks=None),
}


class StackPool:
    """Hands out running stacks, one at a time."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder
        self._current: Stack | None = None
        self._failed: dict[str, Exception] = {}

    def get(self, name: str) -> Stack:
        """Return the stack of this name, started if it does not run."""
        if name in self._failed:
            raise self._failed[name]
        if self._current is not None and self._current.config.name == name:
            return self._current
        self.stop()
        stack = Stack(
            STACKS[name],
            self._runtime,
            self._folder / name,
            shm_name=f"rbln_e2e_{os.getpid()}_{name}",
        )
        self._current = stack
        try:
            stack.start()
        except Exception as error:
            # Not once more for every test.
            self._failed[name] = error
            self.stop()
            raise
        return stack

    def stop(self) -> None:
        """Stop the stack that runs, if any."""
        if self._current is not None:
            stack, self._current = self._current, None
            stack.stop()
