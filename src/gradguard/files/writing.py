"""Write a file, or a directory of files, in one piece: a reader finds the old version, the new one, or none.

A directory is begun (`begin_directory`), filled under another name (`beside_name`), and renamed (`end_directory`).
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

_USED = "it exists already, and is not empty"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BufferedWriter]:
    """Yield a file that replaces ``path`` at the end of the block, if no exception was raised.

    **Guarantees**: until then ``path`` is unchanged. A full disk, an exception or the end of the process leaves it
    unchanged, and the first two leave no other file behind. Nothing is written through a link, a pipe or a device.

    Args:
        path: The file to write; its folder must exist.

    Yields:
        The file, open for writing bytes.

    Raises:
        OSError: If it cannot be written, or ``path`` is a link, a folder, a pipe or a device.
    """
    path = Path(path)
    refuse_link(path)
    beside = _beside(path)
    try:
        with beside.open("xb") as file:
            yield file
            sync(file)
        refuse_link(path)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file in one piece, as `replacing` does.

    Raises:
        OSError: If the file cannot be written.
    """
    with replacing(path) as file:
        file.write(content)


def sync(file: BufferedWriter) -> None:
    """Flush an open file to the disk, where a full disk raises at the latest.

    Raises:
        OSError: If the bytes do not reach the disk.
    """
    file.flush()
    os.fsync(file.fileno())


def refuse_link(path: Path) -> None:
    """Refuse an existing path that is not a regular file.

    Raises:
        OSError: If the path is a link, a folder, a pipe, or a device.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            aim = os.readlink(path)
            raise OSError(errno.ELOOP, f"it is a link to {aim!r}: name the file itself, or remove the link", str(path))
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def beside_name(directory: Path, number: int) -> Path:
    """Return the name under which a directory is filled before it is renamed; one for each ``number``."""
    directory = directory.absolute()
    return directory.with_name(f".{directory.name[:100]}.part-{number:014x}")


def begin_directory(directory: Path, filled: Path) -> None:
    """Create the directory that `beside_name` names, with the permissions of ``directory`` if that exists.

    Raises:
        FileExistsError: If ``directory`` exists and is not empty.
        OSError: If the directory cannot be created.
    """
    refuse_used(directory)
    filled.parent.mkdir(parents=True, exist_ok=True)
    filled.mkdir()
    if directory.is_dir():
        filled.chmod(stat.S_IMODE(directory.stat().st_mode))


def end_directory(directory: Path, filled: Path) -> None:
    """Rename a filled directory in one piece; if two processes try at once, only one succeeds.

    Raises:
        FileExistsError: If ``directory`` exists and is not empty, for instance because another process was first.
        OSError: If the directory cannot be renamed.
    """
    try:
        if os.name == "nt" and directory.is_dir():
            directory.rmdir()
        os.rename(filled, directory)  # replaces an empty directory, never one with content
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, _USED, str(directory)) from error
        raise
    _sync_folder(directory.absolute().parent)


def drop_directory(filled: Path) -> None:
    """Remove a directory of `begin_directory` if an error prevents `end_directory`."""
    shutil.rmtree(filled, ignore_errors=True)


def refuse_used(directory: Path) -> None:
    """Refuse a path that exists and is not an empty directory.

    Raises:
        FileExistsError: If the path has any content, or is not a directory.
    """
    if os.path.lexists(directory) and (directory.is_symlink() or not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(errno.EEXIST, _USED, str(directory))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.part-{os.getpid()}-{secrets.token_hex(4)}")


def _sync_folder(folder: Path) -> None:
    """Flush the folder's list of names to the disk, on systems where a folder can be opened."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
