# SPDX-License-Identifier: Apache-2.0
"""Dynamic symbols of a 64-bit little-endian ELF file, without binutils."""

# Standard
import struct
from pathlib import Path
from typing import NamedTuple

_DYNSYM = 11
_BIND_GLOBAL = 1
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class DynamicSymbols(NamedTuple):
    """Names in the dynamic symbol table; undefined ones if they must resolve."""

    defined: frozenset[str]
    undefined: frozenset[str]


def dynamic_symbols(path: Path) -> DynamicSymbols:
    """Read the dynamic symbols of the shared library at ``path``.

    Args:
        path: A shared library.

    Returns:
        The names it defines, and the ones it needs from another library. Weak needs are
        left out: the loader does without them.

    Raises:
        ValueError: the file is not a 64-bit little-endian ELF file with such a table.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
    (section_offset,) = struct.unpack_from("<Q", data, 0x28)
    section_size, section_count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        _SECTION.unpack_from(data, section_offset + i * section_size)
        for i in range(section_count)
    ]
    table = next((section for section in sections if section[1] == _DYNSYM), None)
    if table is None:
        raise ValueError(f"{path} has no dynamic symbol table")
    _, _, _, _, start, size, link, _, _, _ = table
    names = sections[link][4]
    defined, undefined = set(), set()
    for offset in range(start, start + size, _SYMBOL.size):
        name_at, info, _, section, _, _ = _SYMBOL.unpack_from(data, offset)
        if name_at == 0:
            continue
        begin = names + name_at
        name = data[begin : data.index(b"\0", begin)].decode()
        if section != 0:
            defined.add(name)
        elif info >> 4 == _BIND_GLOBAL:
            undefined.add(name)
    return DynamicSymbols(frozenset(defined), frozenset(undefined))
