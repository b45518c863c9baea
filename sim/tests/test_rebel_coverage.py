# SPDX-License-Identifier: Apache-2.0
"""What the installed vllm-rbln and torch-rbln use of ``rebel`` is accounted for."""

# Standard
import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Third Party
import pytest
import torch

pytest.importorskip("rebel._device", reason="tests the simulator itself")
pytest.importorskip("rebel.ops")

pytestmark = pytest.mark.sim

README = Path(__file__).parents[1] / "src" / "rbln_sim/site/rebel/README.md"
OPERATORS = re.compile(r"torch\.ops\.rbln(_custom_ops|_triton_ops)?\.(?!default)\w+")
NAME = re.compile(r"^\| `([\w.*]+)`", re.MULTILINE)


def tables() -> tuple[set[str], set[str]]:
    """The names in the README's tables: provided, unsupported."""
    text = README.read_text(encoding="utf-8")
    provided, rest = text.split("## Provided")[1].split("## Unsupported")
    # Behind the two comes what neither vllm-rbln nor torch-rbln uses.
    unsupported = rest.partition("\n## ")[0]
    return set(NAME.findall(provided)), set(NAME.findall(unsupported))


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local and full names that a file imports from ``rebel``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rebel":
                    local = alias.asname or "rebel"
                    yield local, alias.name if alias.asname else "rebel"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.split(".")[0] == "rebel":
                for alias in node.names:
                    yield alias.asname or alias.name, f"{module}.{alias.name}"


def used(tree: ast.AST) -> Iterator[str]:
    """Full names of ``rebel`` and of its operators that a file uses."""
    names = dict(imported(tree))
    yield from names.values()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        text = ast.unparse(node)
        head, _, rest = text.partition(".")
        if head in names and re.fullmatch(r"[\w.]+", rest):
            yield f"{names[head]}.{rest}"
        elif OPERATORS.fullmatch(text):
            yield text


@pytest.fixture(scope="module")
def names() -> set[str]:
    """All leaf names: not the modules that others lie in."""
    found: set[str] = set()
    for package in ("vllm_rbln", "torch_rbln"):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{package} is not installed")
        for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if "rebel" in source or "torch.ops.rbln" in source:
                found.update(used(ast.parse(source)))
    return {n for n in found if not any(other.startswith(f"{n}.") for other in found)}


def covers(rows: set[str], name: str) -> bool:
    return name in rows or f"{name.rpartition('.')[0]}.*" in rows


def test_every_name_is_in_one_table(names: set[str]) -> None:
    provided, unsupported = tables()
    assert not {n for n in names if n not in provided and not covers(unsupported, n)}
    assert not provided & unsupported


def test_every_row_is_used(names: set[str]) -> None:
    provided, unsupported = tables()
    for row in provided | unsupported:
        prefix = row.removesuffix("*")
        assert row in names or any(n.startswith(prefix) for n in names), row


def resolve(name: str) -> object:
    if name.startswith("torch.ops."):
        namespace, _, operator = name.removeprefix("torch.ops.").partition(".")
        return getattr(getattr(torch.ops, namespace), operator)
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(importlib.import_module(module), attribute)


def test_what_is_provided_is_there() -> None:
    # Third Party
    from rebel.ops.torch_custom_ops.attn import custom_kernel

    for name in tables()[0]:
        if name.startswith("torch.ops.rbln_triton_ops."):
            # vllm-rbln defines those; the backend replaces them.
            assert callable(custom_kernel(name.rpartition(".")[2]))
        else:
            assert resolve(name) is not None


def test_what_is_unsupported_is_not_there(names: set[str]) -> None:
    # Third Party
    from rebel.ops.torch_custom_ops.attn import custom_kernel

    provided, _ = tables()
    for name in names - provided:
        if name.startswith("torch.ops.rbln_triton_ops."):
            with pytest.raises(NotImplementedError, match=name.rpartition(".")[2]):
                custom_kernel(name.rpartition(".")[2])
        else:
            with pytest.raises(AttributeError, match=name.rpartition(".")[2]):
                resolve(name)
