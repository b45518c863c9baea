# SPDX-License-Identifier: Apache-2.0
"""The stacks that the end-to-end tests share, one running at a time."""

# Standard
from pathlib import Path
import os

# First Party
from tests.e2e.stack import Stack, StackConfig
from tests.support.serving.runtime import Runtime

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
