# SPDX-License-Identifier: Apache-2.0
"""Values of settings as they may be printed: masked, unless known to be harmless."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable, Mapping
from typing import Any
import re

MASK = "***"
_LONGEST = 64
# A name of which even a number is a secret.
_SECRET = re.compile(
    r"passw|pwd|passphrase|secret|credential|cred|auth|token|key|sas|\bpin\b|connection_string",
    re.IGNORECASE,
)
# "5GB", "abc", "1e3", "-1", "yes": what people write for numbers and switches. Longer
# words and words with digits in them may be anything.
_NUMBER_LIKE = re.compile(r"[-+]?[\d.,_]{0,24}(?:[eE][-+]?\d{1,3})?\s?[A-Za-z%]{0,8}")
_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,120}")
_PATH = re.compile(r"(?:file://)?/[\w./\-]{0,200}")
_URL = re.compile(r"([A-Za-z][\w+.\-]{0,20})://(.*)", re.DOTALL)
_USER = re.compile(r"://\S*@")
_ADDRESS = re.compile(r"(?:[\w.\-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")


def show(value: Any, words: Iterable[str] = (), kind: str = "") -> str:
    """Return a value as it may be printed.

    Args:
        value: The value.
        words: Words that are no secret, in any case.
        kind: What the value should be, where that tells what it can't be: ``number``
            (also for switches), ``name`` or ``path``.
    """
    if value is None or isinstance(value, bool | int | float):
        try:
            text = str(value)
        except ValueError:  # more digits than Python converts
            return "a number of thousands of digits"
        return text if len(text) <= _LONGEST else f"a number of {len(text)} digits"
    if isinstance(value, str):
        return _show_text(value, words, kind)
    if isinstance(value, list | tuple):
        shown = ", ".join(show(entry, words, kind) for entry in value[:8])
        return f"[{shown}{', …' if len(value) > 8 else ''}]"
    if isinstance(value, Mapping):
        entries = list(value.items())
        shown = ", ".join(
            f"{show_name(key)}: {show_named(str(key), entry)}"
            for key, entry in entries[:8]
        )
        return f"{{{shown}{', …' if len(entries) > 8 else ''}}}"
    return MASK


def without_users(text: str) -> str:
    """Return a message of others without the users and passwords of URLs."""
    return _USER.sub(f"://{MASK}@", text)


def show_named(name: str, value: Any) -> str:
    """Return a value under a name of somebody else's; the name may say it is secret."""
    if isinstance(value, bool) or value is None:
        return show(value)
    return MASK if _SECRET.search(name) else show(value)


def show_name(name: object) -> str:
    """Return a setting's name as it may be printed; what is no name may be a value."""
    text = str(name)
    return text if _NAME.fullmatch(text) else show(name)


def _show_text(text: str, words: Iterable[str], kind: str) -> str:
    if text.strip() == "" or text.strip().casefold() in {w.casefold() for w in words}:
        return repr(text[:_LONGEST])
    pattern = {"number": _NUMBER_LIKE, "name": _NAME, "path": _PATH}.get(kind)
    if pattern is not None and pattern.fullmatch(text.strip()):
        return repr(text)
    url = _URL.fullmatch(text.strip())
    return f"{url[1]}://{_show_address(url[2])}" if url else MASK


def _show_address(rest: str) -> str:
    """Return the host and port of what follows ``://``, if it is sure which they are.

    A password may hold any of the characters that divide a URL.
    """
    if "@" in rest:
        user, address = MASK + "@", rest.rpartition("@")[2]
        if re.search(r"[?#]", rest):
            return MASK
    else:
        user, address = "", rest
    address, end = re.split(r"(?=[/?#,;])", address, maxsplit=1)[0], ""
    if len(address) < len(rest.rpartition("@")[2].rstrip("/")):
        end = f"/{MASK}"
    return f"{user}{address}{end}" if _ADDRESS.fullmatch(address) else MASK
