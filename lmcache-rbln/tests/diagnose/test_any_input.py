# SPDX-License-Identifier: Apache-2.0
"""Whatever it is given, the command ends with a report or a usage error."""

# Standard
from pathlib import Path
from typing import Any
import json
import random

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose import __main__ as command, probe
from lmcache_rbln.diagnose.probe import Facts
from lmcache_rbln.diagnose.settings import check_settings, examine
from lmcache_rbln.settings import table

SECRET = "hunter2-Zx9"
ROUNDS = 400
TOPICS = ("build", "settings", "server", "torch", "rds", "vllm")
KEYS = (
    *("error", "chunk_size", "is_engine_driven", "problems", "values", "plugins"),
    *("torch", "broken", "loaded", "built_for", "simulated", "library", "npus"),
    *("devices", "refused", "unloadable", "chunk_place"),
)
WORDS = (
    *("--json", "--block-size", "--kv-transfer-config", "--server", "--timeout"),
    *("--bad", "positional"),
)
NAMES = (
    *("lmcache.mp.server_urls", "lmcache.mp.port", "lmcache.mp.host", "connectors"),
    *("lmcache.chunk_size", "lmcache.extra_config", "kv_connector", "kv_role"),
    *("kv_connector_extra_config", "rds_buffer_size", "lmcache_rbln.allow_degraded"),
)


def anything(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return dice.choice([None, True, False])
    if kind == 1:
        return dice.choice([-1, 0, 1, 256, 1 << 70, 10**400])
    if kind == 2:
        return dice.choice([1.5, float("nan"), float("inf"), -0.0])
    if kind in (3, 4, 5):
        texts = ["", "x", "a\0b", "\ud800", "tcp://[::1]:1", "é" * 300, "{", "[1]"]
        texts += ["RBLNLMCacheConnectorV1", "LMCacheMPConnector", "MultiConnector"]
        return dice.choice([*texts, SECRET, f"redis://u:{SECRET}@h:1"])
    if kind in (6, 7):
        return {
            dice.choice([*NAMES, *KEYS]): anything(dice, depth + 1)
            for _ in range(dice.randrange(4))
        }
    return [anything(dice, depth + 1) for _ in range(dice.randrange(4))]


def command_line(dice: random.Random) -> list[str]:
    words = []
    for _ in range(dice.randrange(5)):
        words.append(dice.choice(WORDS))
        value = anything(dice)
        if isinstance(value, dict):
            value.setdefault("kv_connector", dice.choice(["LMCacheMPConnector", 5]))
        if words[-1] != "--json":
            text = value if isinstance(value, str) else json.dumps(value)
            # pytest's standard error takes characters only.
            words.append(text.encode("utf-8", "replace").decode())
    return words


def test_any_command_line_and_any_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(14)
    codes: list[object] = []

    def probe(*_: Any) -> Facts:
        topics: dict[str, dict[str, Any]] = {}
        for topic in dice.sample(TOPICS, dice.randrange(len(TOPICS) + 1)):
            topics[topic] = {
                key: anything(dice) for key in dice.sample(KEYS, dice.randrange(6))
            }
        return Facts(topics, dice.choice(["", "no answer in 4 s"]))

    monkeypatch.setattr(command, "run_probe", probe)
    monkeypatch.setattr(command.npu, "ask_monitor", lambda _: {"error": "none"})
    # Nothing of what is given changes what is installed.
    monkeypatch.setattr(command.packages, "STACK", ("lmcache",))
    for _ in range(ROUNDS):
        words = command_line(dice)
        try:
            codes.append(command.main(words))
        except SystemExit as end:
            codes.append(end.code)
        out = capsys.readouterr().out
        assert codes[-1] in (0, 1, 2), words
        assert "Traceback" not in out
        if "--json" in words and codes[-1] != 2:
            assert json.loads(out)["ok"] is (codes[-1] == 0)
    assert {1, 2} <= set(codes)


def test_any_configuration(tmp_path: Path) -> None:
    dice = random.Random(15)
    file = tmp_path / "lmcache.yaml"
    names = list(table.definitions())
    for number in range(ROUNDS):
        environment = {
            f"LMCACHE_{dice.choice([*names, 'zz', '']).upper()}": str(anything(dice))
            for _ in range(dice.randrange(4))
        }
        # A plugin's name is shown.
        for kind in ("", "REMOTE_"):
            environment.pop(f"LMCACHE_{kind}STORAGE_PLUGINS", None)
        connector = {
            dice.choice([*NAMES, *(f"lmcache.{n}" for n in names), "é\n"]): anything(
                dice
            )
            for _ in range(dice.randrange(4))
        }
        if dice.random() < 0.4:
            environment["LMCACHE_CONFIG_FILE"] = str(file)
            text = dice.choice(
                [
                    json.dumps(anything(dice)),
                    "".join(dice.choices("a:[]{}-&*!|>'\"\n\t 1", k=30)),
                    f"{dice.choice(names)}: {json.dumps(anything(dice))}",
                ]
            )
            file.write_text(text)
        name = dice.choice(["RBLNLMCacheConnectorV1", "LMCacheMPConnector", "", "x"])
        block = dice.choice([None, 1, 128])
        facts = examine(environment, name, connector, block)
        result = check_settings(json.loads(json.dumps(facts, default=str)))
        shown = json.dumps(facts, default=str) + repr(result)
        assert SECRET not in shown, (number, environment, connector)
        for problem in facts["problems"]:
            assert problem["setting"] and problem["found"] and problem["wanted"]
            assert problem["fix"]
            assert "\n" not in problem["found"] + problem["fix"], problem


def test_what_a_probe_is_asked_is_not_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def run(*arguments: Any) -> tuple[str, str]:
        asked.append(arguments)
        return "", ""

    monkeypatch.setattr(probe, "run_command", run)
    config = {
        "kv_connector": "RBLNLMCacheConnectorV1",
        "kv_connector_extra_config": {"password": SECRET},
    }
    command.main(["--kv-transfer-config", json.dumps(config)])
    for words, _, _, text in asked:
        assert SECRET not in " ".join(words)
        assert SECRET in text
    assert len(asked) == 2
