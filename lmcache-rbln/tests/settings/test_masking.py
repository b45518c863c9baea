# SPDX-License-Identifier: Apache-2.0
"""What may be printed of a setting."""

# Future
from __future__ import annotations

# Standard
from typing import Any
import random
import string

# Third Party
import pytest

# First Party
from lmcache_rbln.settings.masking import (
    MASK,
    show,
    show_name,
    show_named,
    without_users,
)

SECRET = "hunter2-Zx9"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (True, "True"),
        (256, "256"),
        (5.5, "5.5"),
        ("", "''"),
        ("LRU", "'LRU'"),
        ("lru", "'lru'"),
        (["LRU", 1], "['LRU', 1]"),
        ({"size": 1, "on": True}, "{size: 1, on: True}"),
        ("redis://host:6379", "redis://host:6379"),
        ("tcp://[::1]:6555", "tcp://[::1]:6555"),
    ],
)
def test_what_is_known_to_be_harmless_is_shown(value: Any, shown: str) -> None:
    assert show(value, ("LRU",)) == shown


@pytest.mark.parametrize("value", ["-1", "abc", "five", "5GB", "1e3", "yes", "nan"])
def test_what_people_write_for_numbers_is_shown_there_alone(value: str) -> None:
    assert show(value, kind="number") == repr(value)
    assert show(value) == MASK


@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        [SECRET],
        {"a": SECRET},
        {"a": {"b": [{"c": SECRET}]}},
        {SECRET + "!": 1},
        f"redis://user:{SECRET}@host:1",
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
        object(),
        b"hunter2-Zx9",
        f"{{'redis_password': '{SECRET}'}}",
    ],
)
@pytest.mark.parametrize("kind", ["", "number", "path"])
def test_what_may_be_a_secret_is_not(value: Any, kind: str) -> None:
    assert SECRET not in show(value, ("LRU",), kind)
    assert "hunter2" not in show(value, ("LRU",), kind)


def test_the_host_of_a_url_stays() -> None:
    assert show(f"redis://user:{SECRET}@host:1") == "redis://***@host:1"


@pytest.mark.parametrize(
    "name",
    ["apikey", "api_key", "token", "pwd", "s3_key", "redis_password", "auth", "sas"],
)
def test_a_number_under_a_secret_name_is_not_shown(name: str) -> None:
    assert show_named(name, 123456) == MASK
    assert show({name: 123456}) == f"{{{name}: {MASK}}}"
    assert show_named("max_local_cpu_size", 5) == "5"


def test_names_that_are_none() -> None:
    assert show_name("lmcache.chunk_size") == "lmcache.chunk_size"
    assert show_name("redis://u:p@h") == "redis://***@h"
    assert show_name("two words") == MASK
    assert show_name(1) == "1"


def test_any_text_can_be_shown_and_passwords_are_not() -> None:
    dice = random.Random(14)
    letters = string.printable + "é\ud800\0"
    for _ in range(3000):
        text = "".join(dice.choices(letters, k=dice.randrange(40)))
        password = "Zx9" + "".join(dice.choices(string.ascii_letters, k=9))
        for value in (
            text,
            text + password,
            f"redis://{text}:{password}@h:1",
            {text: [password]},
        ):
            for kind in ("", "number", "path"):
                shown = show(value, (), kind)
                if isinstance(value, str) and value.startswith("/") and kind == "path":
                    continue
                assert password not in shown
    assert "digits" in show(10**5000)


def test_messages_of_others_lose_their_users() -> None:
    text = f"can't reach redis://user:{SECRET}@host:1, http://host:2"
    assert without_users(text) == "can't reach redis://***@host:1, http://host:2"
