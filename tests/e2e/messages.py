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
    # LMCacheMPConnector
    "lmcache-driven": ("MP transfer mode 'lmcache_driven' is not supported",),
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


def _shows(line: str, message: str) -> bool:
    at = 0
    for part in message.split("..."):
        at = line.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True
