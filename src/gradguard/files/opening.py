"""Open a file of unknown origin: only a regular one, so that no call waits for a pipe or a device."""

import errno
import os
import stat
import zipfile
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read its bytes.

    **Guarantees**: a pipe, a socket, a device or a folder is refused and never waited for, even if it replaces a file
    just before the call: the kind is read from the open file. A link to a regular file is followed.

    Args:
        path: The file.

    Returns:
        The file, open at its start.

    Raises:
        OSError: If there is no such file, it cannot be read, or it is not a regular one; ``strerror`` names its kind.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        OSError: [Errno 22] it is a device, and a regular file was expected: '/dev/null'
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, f"it is {_kind(mode)}, and a regular file was expected", os.fspath(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_whole(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file.
        most: The largest accepted size, in bytes.

    Raises:
        OSError: If the file cannot be read, or is larger.
    """
    with open_regular(path) as file:
        if (size := size_of(file)) > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} were expected", os.fspath(path))
        return file.read(most)  # the file may grow meanwhile


def size_of(file: BufferedReader) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def is_regular(path: Path) -> bool:
    """Tell whether ``path`` is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def refuse_compressed(file: BufferedReader) -> None:
    """Refuse an archive, such as torch.save writes, that would take more memory than it has bytes.

    Args:
        file: The open file, at its start, where it also ends. A file that is not an archive is accepted.

    Raises:
        ValueError: If a part of the archive is compressed, or its parts together are longer than the file.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
        if any(one.compress_type != zipfile.ZIP_STORED for one in parts):
            raise ValueError("a part of the archive is compressed")
        if sum(one.file_size for one in parts) > size_of(file):
            raise ValueError("the parts of the archive are longer than the file")
    file.seek(0)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
