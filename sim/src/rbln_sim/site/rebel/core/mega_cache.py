# SPDX-License-Identifier: Apache-2.0
"""The on-disk cache of compiled artefacts: always empty.

Graphs of the simulator are traced anew in every process and leave no artefact.
"""

from typing import BinaryIO

from .._unsupported import missing_attribute


def set_dir(path: str) -> None:
    """Name the folder of the cache; nothing is read from or written to it.

    Args:
        path: Folder.
    """


def read_bundle(source: BinaryIO) -> None:
    """Read a bundle of artefacts.

    Args:
        source: Open file.

    Returns:
        None: no bundle is readable, and the caller compiles.
    """


def write_bundle(destination: BinaryIO) -> bool:
    """Write a bundle of all artefacts.

    Args:
        destination: Open file; left empty.

    Returns:
        False: there was nothing to write.
    """
    return False


__getattr__ = missing_attribute("rebel.core.mega_cache")
