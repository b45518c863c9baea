# SPDX-License-Identifier: Apache-2.0
"""The messages that the documents quote, by the start whose log shows them.

``tests/docs`` wants every quoted message to be here, and every start here to be that of
a test, which calls :func:`assert_logged` with its log.
"""

#: As quoted; ``...`` stands for what differs.
LOGGED: dict[str, tuple[str, ...]] = {
    # lmcache server
    "server-without-torch-rbln": (
        "LMCACHE_DEVICE_BACKEND=rbln, but torch_rbln is not installed",
    ),
    "server-without-autoload": (
        "LMCACHE_DEVICE_BACKEND=rbln, but torch did not load torch_rbln",
    ),
    "server-without-npu": ("LMCACHE_DEVICE_BACKEND=rbln, but torch.rbln sees no NPU",),
    "server-without-runtime": (
        "LMCACHE_DEVICE_BACKEND=rbln, but torch-rbln lacks its runtime",
    ),
    "unpinned-server-without-npu": (
        "torch-rbln is installed, but LMCache does not use RBLN",
    ),
    "server-with-another-torch": ("this LMCache was built for torch",),
    "server-with-the-memory-of-another": (
        "this LMCache server; got that of another one that is running",
    ),
    # LMCacheMPConnector
    "lmcache-driven": ("MP transfer mode 'lmcache_driven' is not supported",),
    "unserved": (
        "The LMCache server answers, but not to the registration of an engine-driven "
        "worker",
    ),
    "misfit": ("LMCache chunk size ... must be a multiple of",),
    "held": ("rbln_register_device_id failed",),
    "windows": ("a sliding window of ... is not supported on RBLN, wanted full",),
    # RBLNLMCacheConnectorV1
    "without-model-impl": ("Unsupported connector type: RBLNLMCacheConnectorV1",),
    "without-hash-seed": ("PYTHONHASHSEED must have a fixed value",),
    "chunk-is-no-multiple": (
        "LMCache's chunk size is ... tokens, wanted a multiple of vLLM's block size",
    ),
    "layer-wise": ("is not supported on RBLN, wanted",),
    "another-device": (
        "LMCACHE_DEVICE_BACKEND=... is registered but not available on this host",
    ),
    "windows-in-process": ("the KV cache is of ... wanted full attention",),
    "no-tier": ("no storage tier is on",),
    "too-small-a-tier": ("the CPU tier has ... bytes, wanted ... for one chunk",),
    "broken-plugin": (
        "LMCache could not start",
        "is configured but could not be created",
    ),
    "misspelt": ("is not a name that LMCache reads", "has no effect"),
    "odd-request": ("kv_transfer_params ignored",),
    "failed-store": ("KV not stored: ... KV of ... chunks",),
    "failed-load": ("KV not loaded: ... KV of ... chunks",),
    "lost-prefix": ("KV not stored: it was computed on KV that could not be",),
    # RDSBackend
    "rds-without-service": ("no RDS device is available",),
    "rds-without-rebel-rds": ("direct storage needs rebel.rds",),
    "rds-too-much-staging": (
        "rds_buffer_size of ... does not fit into the memory that is left",
    ),
    "rds-too-little-staging": ("rds_buffer_size of ... holds no chunk",),
    "rds-with-a-cpu-tier": ("RDSBackend works without LMCache's CPU tier",),
    "rds-long-prompt": ("is restored up to chunk",),
    "rds-over-its-cap": ("RDS has no space for",),
    "rds-failed-write": ("RDS batched write failed for 1 keys",),
}


def assert_logged(start: str, log: str) -> None:
    """Fail unless a start's log shows every message that stands for it.

    Args:
        start: A key of ``LOGGED``.
        log: Its log.
    """
    lines = log.splitlines()
    for message in LOGGED[start]:
        assert any(_shows(line, message) for line in lines), (
            f"the log of {start} does not say {message!r}:\n{log[-4000:]}"
        )


def assert_logged_last(start: str, log: str) -> None:
    """Fail unless a refused start's log ends with one of its messages.

    Args:
        start: A key of ``LOGGED``.
        log: Its log.
    """
    assert_logged(start, log)
    last = log.strip().splitlines()[-1]
    assert any(_shows(last, message) for message in LOGGED[start]), last


def _shows(line: str, message: str) -> bool:
    at = 0
    for part in message.split("..."):
        at = line.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True
