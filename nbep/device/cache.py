"""Compiled kernels on disk. They are code, so what another user could have written is not used.

As with the keys of ssh: a file, and the folder that it is in, belong to the user or to root, and no one else may write
them. A file is a regular one, and no link.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path

DIGEST_BYTES = hashlib.sha256().digest_size  # behind each cubin


def cache_folder() -> Path:
    """Where compiled kernels are kept: environment variable NBEP_CACHE_DIR, or nbep in the user's cache folder."""
    given = os.environ.get("NBEP_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbep"


def why_unsafe(found: os.stat_result) -> str | None:
    """Why a file or folder is not used; None if it is."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    return f"others may write it: mode {mode:o}" if mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def why_not_used(folder: Path) -> str | None:
    """Why nothing in a folder is used; None if it is, or if there is no such folder."""
    try:
        return why_unsafe(folder.stat())
    except OSError:
        return None


def read(name: str) -> bytes | None:
    """The kernel of that name; None if it is not there, or not used. A warning says why a file is not used."""
    path = cache_folder() / name
    if not _is_used(path.parent):
        return None
    try:
        cubin, why = _look_into(path)
    except OSError:
        return None
    if why is not None:
        warnings.warn(f"{path} {why}; its kernel is compiled anew", RuntimeWarning, stacklevel=3)
    return cubin


def _look_into(path: Path) -> tuple[bytes | None, str | None]:
    """The kernel of a file, or what is wrong with it. Raises: OSError"""
    if path.is_symlink():
        return None, "is not used: it is a symbolic link"
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait
    with os.fdopen(file, "rb") as kept:
        found = os.fstat(file)
        unsafe = why_unsafe(found) if stat.S_ISREG(found.st_mode) else "it is no regular file"
        if unsafe:
            return None, f"is not used: {unsafe}"
        data = kept.read()
    cubin, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(cubin).digest() != digest:
        return None, "is damaged"  # a driver would refuse it at every start
    return cubin, None


def keep(name: str, cubin: bytes) -> None:
    """Write a kernel for later processes. A cache that cannot be written only costs time."""
    path = cache_folder() / name
    try:
        _make(path.parent)
        if why_not_used(path.parent):
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # for the user alone
        with ExitStack() as undo:
            undo.callback(os.unlink, temporary)
            with os.fdopen(handle, "wb") as file:
                file.write(cubin + hashlib.sha256(cubin).digest())
            Path(temporary).replace(path)  # processes that race write the same bytes
            undo.pop_all()
    except OSError:
        pass


def _make(folder: Path) -> None:
    """Make a folder and those above it, for the user alone: mkdir(parents=True) leaves those to the umask."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _is_used(folder: Path) -> bool:
    why = why_not_used(folder)
    if why:
        advice = f"; `chmod go-w {folder}` lets it be used" if why.startswith("others") else ""
        warnings.warn(f"{folder} is not used: {why}; kernels are compiled anew{advice}", RuntimeWarning, stacklevel=4)
    return why is None
