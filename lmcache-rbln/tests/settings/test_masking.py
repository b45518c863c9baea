# SPDX-License-Identifier: Apache-2.0
"""What may be printed of a setting."""

# Standard
from typing import Any
import random
import string

# Third Party
import pytest

# First Party
from lmcache_rbln.settings.masking import MASK, show, show_name, without_users

SECRET = "hunter2-Zx9"


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (None, "", "None"),
        (True, "", "True"),
        (5.5, "", "5.5"),
        ("", "", "''"),
        ("LRU", "", "'LRU'"),
        (["LRU", 1], "", "['LRU', 1]"),
        ("redis://host:6379", "", "redis://host:6379"),
        ("tcp://[::1]:6555", "", "tcp://[::1]:6555"),
        (f"redis://user:{SECRET}@host:1", "", "redis://***@host:1"),
        *((text, "number", repr(text)) for text in ("-1", "five", "5GB", "1e3", "yes")),
        *((text, "", MASK) for text in ("-1", "five", "5GB")),
    ],
)
def test_what_is_known_to_be_harmless_is_shown(
    value: Any, kind: str, shown: str
) -> None:
    assert show(value, ("LRU",), kind) == shown


@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        [SECRET],
        {"a": SECRET},
        f"redis://{SECRET}@host:1",
        [f"redis://:{SECRET}@host:1"],
        f"redis://user:p@{SECRET}@host:1",
        f"redis://user:p/{SECRET}@host:1",
        f"redis://user:p?{SECRET}@host:1",
        f"redis://user:p#{SECRET}@host:1",
        f"http://host:1/?token={SECRET}",
        f"http://host:1/?a=b@{SECRET}",
        f"http://host:1/{SECRET}",
        f"redis://user:{SECRET}@a:1,redis://user:{SECRET}@b:2",
        b"hunter2-Zx9",
    ],
)
@pytest.mark.parametrize("kind", ["", "number"])
def test_what_may_be_a_secret_is_not(value: Any, kind: str) -> None:
    assert "hunter2" not in show(value, ("LRU",), kind)


def test_any_text_can_be_shown_and_passwords_are_not() -> None:
    dice = random.Random(14)
    letters = string.printable + "é\ud800\0"
    for _ in range(1000):
        text = "".join(dice.choices(letters, k=dice.randrange(40)))
        password = "Zx9" + "".join(dice.choices(string.ascii_letters, k=9))
        for value in (
            text,
            text + password,
            f"redis://{text}:{password}@h:1",
            {text: [password]},
        ):
            for kind in ("", "number"):
                assert password not in show(value, (), kind)


def test_names_and_messages_of_others() -> None:
    assert show_name("lmcache.chunk_size") == "lmcache.chunk_size"
    assert show_name("two words") == MASK
    assert show_name(1) == "1"
    text = f"can't reach redis://user:{SECRET}@host:1, http://host:2"
    assert without_users(text) == "can't reach redis://***@host:1, http://host:2"
