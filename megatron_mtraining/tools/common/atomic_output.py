# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Output files and folders that appear whole or not at all.

Everything is written into a new private folder beside the target, ``.NAME.partial``, and renamed at the
end. The folder is locked: a second run with the same target is refused. Whether the target may be replaced
is checked under that lock, before writing and again before renaming. Symbolic links are not followed: a
link in the place of the private folder is refused, a link in the place of the target is replaced itself.

On errors, and on signals where these raise exceptions (see :mod:`.signals`; ``mtraining`` does so for all
its commands), the private folder is removed. What a killed process leaves is not locked, and the next run
removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ...errors import ConfigError

LOCK, NEW, OLD = "lock", "new", "old"
"""Names in the private folder: its lock, what is being written, and the folder that it replaces."""
MARK = b"An unfinished output of megatron-mtraining. The next run removes this folder.\n"
"""What is in the lock: a folder of the same name without it is a stranger's."""

Check = Callable[[Path], None]
"""Raises :class:`ConfigError` if what is at the target may not be replaced."""


@contextmanager
def atomic_file(
    path: Path, *, option: str = "--output", overwrite: bool = False
) -> Iterator[BinaryIO]:
    """A binary file to write, which becomes ``path`` if the context ends without an exception.

    Args:
        path: the target. Parent folders are made, and removed again if the context fails.
        option: how messages call the target: an option or a positional argument.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: the target exists, is in use by another run, or cannot be written.
    """
    check = _refuse_existing(option, overwrite, "file")
    with _private_folder(path.with_name(f".{path.name}.partial"), path, option) as private:
        check(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(private / NEW, flags, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check(path)
        os.replace(private / NEW, path)


@contextmanager
def atomic_folder(
    path: Path, *, option: str = "--output", overwrite: bool = False, check: Check | None = None
) -> Iterator[Path]:
    """A new folder to write into, which becomes ``path`` if the context ends without an exception.

    A folder that is replaced stays until the new one is complete, and is put back if the process is killed
    between the two renames: by the next run with this target.

    Args, Raises: as for :func:`atomic_file`. ``check`` is asked in place of ``overwrite``.
    """
    check = check or _refuse_existing(option, overwrite, "folder")
    with _private_folder(path.with_name(f".{path.name}.partial"), path, option) as private:
        check(path)
        new, old = private / NEW, private / OLD
        new.mkdir()
        yield new
        check(path)
        try:
            if os.path.lexists(path):
                os.rename(path, old)
            os.rename(new, path)
        except BaseException:
            _put_back(path, old)
            raise


@contextmanager
def atomic_files(
    folder: Path, *, option: str = "--output", overwrite: bool = True, names: Iterable[str] = ()
) -> Iterator[Path]:
    """A new folder to write into, whose files move into ``folder`` if the context ends without an exception.

    Other files in ``folder`` stay; files of the same names are replaced. It is made if it does not exist.

    Args, Raises: as for :func:`atomic_file`. ``names`` are those of files that are known before, and looked
        for before writing, not only before moving.
    """
    check = _refuse_existing(option, overwrite, "folder", of_files=True)
    with _private_folder(folder / ".partial", folder, option) as private:
        for name in names:
            check(folder / name)
        new = private / NEW
        new.mkdir()
        yield new
        files = sorted(new.iterdir())
        for file in files:
            check(folder / file.name)
        for file in files:
            os.replace(file, folder / file.name)


@contextmanager
def locked_folder(path: Path, option: str) -> Iterator[Path]:
    """Make or open a folder of this process alone, and lock it. It is not removed.

    Raises:
        ConfigError: another run holds it, or what is there is a link, of another user, or was not made here.
    """
    descriptors: list[int] = []
    try:
        while not _try_lock(path, option, descriptors):
            _close(descriptors)
        yield path
    finally:
        _close(descriptors)


def is_of_a_run(folder: Path) -> bool:
    """Whether a folder is one that :func:`locked_folder` has made."""
    lock = folder / LOCK
    return lock.is_file() and lock.read_bytes()[: len(MARK)] == MARK


def refuse_to_replace_input(option: str, path: Path, read: Iterable[Path]) -> None:
    """Raise :class:`ConfigError` if ``path`` is a file that is read, or is in a folder that is."""
    if not os.path.exists(path):
        return
    real = Path(os.path.realpath(path))
    for each in read:
        source = Path(os.path.realpath(each))
        if real == source or source in real.parents:
            raise ConfigError(
                f"{option} is {path}, which is read, as {each} is given: name another file"
            )


def cannot_write(option: str, path: Path, error: OSError) -> ConfigError:
    """What an error in writing the target means for the user."""
    return ConfigError(
        f"{option} is {path}, which cannot be written: {error.strerror or error}; name another place, or "
        "make room"
    )


@contextmanager
def writing(option: str, target: Path, folder: Path, *own: Path) -> Iterator[None]:
    """Make a folder with its parents, which are removed again if the context fails and leaves them empty.

    Args:
        target: what messages name.
        own: files and folders that nobody else writes.

    Raises:
        ConfigError: for an OSError of writing here, and not of some file that was read meanwhile.
    """
    missing: list[Path] = []
    try:
        missing += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for parent in missing:
            with suppress(OSError):  # in use
                parent.rmdir()
        if isinstance(error, OSError) and _is_about(error, target, own):
            raise cannot_write(option, target, error) from error
        raise


@contextmanager
def _private_folder(private: Path, target: Path, option: str) -> Iterator[Path]:
    """The folder, locked and empty; removed at the end, as are new parents of a target that failed."""
    with writing(option, target, private.parent, private), locked_folder(private, option):
        try:
            if _put_back(target, private / OLD):
                print(f"{target} is back: a killed run had moved it away", file=sys.stderr)
            _empty(private)
            yield private
        finally:
            _remove(private, target)


def _is_about(error: OSError, target: Path, own: tuple[Path, ...]) -> bool:
    if error.errno in (None, errno.EPIPE):  # a library's own, or of standard output
        return False
    if not isinstance(error.filename, str | os.PathLike):  # of an open file
        return True
    file = Path(error.filename)
    return file in (target, *target.parents) or not {file, *file.parents}.isdisjoint(own)


def _try_lock(path: Path, option: str, descriptors: list[int]) -> bool:
    """Lock the folder; False if it was removed meanwhile."""
    foreign = ConfigError(
        f"{path} is needed for {option}, and is a link, a file or another user's folder: remove it"
    )
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        about = os.lstat(path)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            raise foreign from None
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        descriptors.append(folder)
        there = os.listdir(folder)
        if there and LOCK not in there:
            raise _stranger(path, option, there)
        create = 0 if there else os.O_CREAT
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | create, 0o600, dir_fd=folder)
        descriptors.append(lock)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise foreign if error.errno in (errno.ELOOP, errno.ENOTDIR) else error from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is in use by another run with the same {option}: wait for it, or name another place"
        ) from None
    try:
        if not os.path.samestat(os.fstat(lock), os.stat(path / LOCK, follow_symlinks=False)):
            return False
    except FileNotFoundError:
        return False
    if os.pread(lock, len(MARK), 0) != MARK:
        # A run that was killed before it wrote this has left nothing else either.
        if os.fstat(lock).st_size or os.listdir(folder) != [LOCK]:
            raise _stranger(path, option, os.listdir(folder))
        os.pwrite(lock, MARK, 0)
    os.fchmod(folder, 0o700)  # one that was there may let others put links into it
    return True


def _stranger(path: Path, option: str, there: list[str]) -> ConfigError:
    return ConfigError(
        f"{path} is needed for {option}, and has {min(there)}, which no run of mtraining has put there: move "
        f"it, or name another place for {option}"
    )


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _remove(private: Path, target: Path) -> None:
    """Remove the locked folder, the lock last; say so if that fails: it may have what was replaced."""
    try:
        _empty(private)
        (private / LOCK).unlink(missing_ok=True)
        private.rmdir()
    except OSError as error:
        print(
            f"{private} cannot be removed ({error.filename or private}: {error.strerror}): it has what "
            f"{target} replaced, or an unfinished output; remove it yourself",
            file=sys.stderr,
        )


def _empty(private: Path) -> None:
    """Remove what a killed run has left."""
    for name in (NEW, OLD):
        path = private / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _put_back(target: Path, old: Path) -> bool:
    """Give a folder its name back that was moved away and not replaced; True if there was one."""
    if os.path.lexists(target) or not os.path.lexists(old):
        return False
    os.rename(old, target)
    return True


def _refuse_existing(option: str, overwrite: bool, kind: str, *, of_files: bool = False) -> Check:
    def check(path: Path) -> None:
        if not os.path.lexists(path):
            return
        if not overwrite:
            raise ConfigError(
                f"{option} is {path}, which exists: name another {kind}, or --overwrite it"
            )
        if os.path.isdir(path) and not os.path.islink(path) and (kind == "file" or of_files):
            raise ConfigError(f"{option} is {path}, which is a folder: name a file")
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise ConfigError(
                f"{option} is {path}, a device, a pipe or a socket, which is not replaced: name a file"
            )
        if of_files:
            return
        if not os.path.isdir(path) and kind == "folder":
            raise ConfigError(f"{option} is {path}, which is not a folder: name another")

    return check
