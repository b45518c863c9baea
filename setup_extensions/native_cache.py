# SPDX-License-Identifier: Apache-2.0
"""Compiled extensions kept between builds.

An extension is compiled again when its sources, the headers it can see, its flags,
the compiler or torch change, and for nothing else: a build that only differs in
Python files takes seconds instead of minutes.
"""

# Standard
from pathlib import Path
from typing import TYPE_CHECKING
import hashlib
import os
import shutil
import subprocess
import sysconfig

# Third Party
from torch.utils import cpp_extension
import torch

if TYPE_CHECKING:
    # Third Party
    from setuptools.extension import Extension

CACHE_VARIABLE = "LMCACHE_BUILD_CACHE"
HEADER_SUFFIXES = {".h", ".hh", ".hpp", ".hxx", ".inc", ".inl", ".cuh"}
FLAG_VARIABLES = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")


def compiler_identity() -> str:
    """Return what the C++ compiler says about itself, and the flags it gets.

    Returns:
        Version text, target and flags, one a line.

    Raises:
        FileNotFoundError: There is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "c++").split()
    says = [
        subprocess.run(
            [*compiler, option], check=True, capture_output=True, text=True
        ).stdout
        for option in ("--version", "-dumpmachine")
    ]
    says += compiler[1:] + [os.environ.get(name, "") for name in FLAG_VARIABLES]
    return "\n".join(says)


def torch_identity() -> str:
    """Return which torch, and which Python's C API, an extension is built for."""
    python = sysconfig.get_config_var("EXT_SUFFIX")
    return f"{torch.__version__} {torch.version.git_version} {python}"


def native_files(extension: "Extension", root: Path) -> list[Path]:
    """List the sources of an extension and the headers that it can see.

    Args:
        extension: The extension.
        root: Source tree; headers outside it belong to torch or the system.

    Returns:
        Existing files, sorted.
    """
    files = {root / source for source in extension.sources}
    for folder in map(Path, extension.include_dirs):
        if folder.is_relative_to(root):
            files.update(
                path for path in folder.rglob("*") if path.suffix in HEADER_SUFFIXES
            )
    return sorted(files)


def cache_key(extension: "Extension", root: Path) -> str:
    """Return the name under which a compiled extension is kept.

    Args:
        extension: The extension.
        root: Source tree, absolute.

    Returns:
        A hexadecimal digest.
    """
    flags = (
        extension.extra_compile_args,
        extension.extra_link_args,
        extension.define_macros,
        extension.libraries,
    )
    parts = [extension.name, repr(flags), compiler_identity(), torch_identity()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in native_files(extension, root):
        digest.update(b"\0" + path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


class CachedBuildExtension(cpp_extension.BuildExtension):
    """``build_ext`` that takes an extension from the cache where it can.

    Without ``LMCACHE_BUILD_CACHE`` it compiles as usual.
    """

    def build_extension(self, ext: "Extension") -> None:
        """Build one extension, or copy it from the cache.

        Args:
            ext: The extension.
        """
        cache = os.environ.get(CACHE_VARIABLE)
        if not cache:
            super().build_extension(ext)
            return
        built = Path(self.get_ext_fullpath(ext.name))
        # torch's build_ext edits the flags while compiling: take the key before.
        kept = Path(cache, "native", cache_key(ext, Path.cwd()), built.name)
        if kept.is_file():
            print(f"native cache: {ext.name} taken from {kept.parent.name}")
            built.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, built)
            return
        print(f"native cache: compiling {ext.name}")
        super().build_extension(ext)
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(built, partial)
        os.replace(partial, kept)
