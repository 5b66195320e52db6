"""Archives: an untrusted zip or tar into memory, or a tar of ours into a folder."""

import bz2
import gzip
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

PIECE = 1024 * 1024
MAX_NAME_BYTES = 255
MAGIC: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
    *(EOFError, OSError),
)


class ArchiveError(ValueError):
    """The archive is broken, too big, or tries to leave its folder."""


@dataclass(frozen=True)
class UnpackLimits:
    """How much an archive may hold once unpacked."""

    files: int = 2_000
    total_bytes: int = 256 * 1024 * 1024


def is_archive(upload: BinaryIO) -> bool:
    """Tell zip, tar and compressed tar from text, by content. The position is kept."""
    head = upload.read(265)
    upload.seek(0)
    return (
        head.startswith((b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b", b"BZh", b"\xfd7zXZ"))
        or head[257:262] == b"ustar"
    )


def read_archive(upload: BinaryIO, limits: UnpackLimits) -> dict[str, bytes]:
    """Return the regular files of an archive by their relative path.

    Raises:
        ArchiveError: A path with `..` or a root, a link or device, a file that is there twice, too
            many files, too many bytes, or a broken archive; the message names the member.
    """
    files: dict[str, bytes] = {}
    folders: set[str] = set()
    left = limits.total_bytes
    try:
        is_zip = zipfile.is_zipfile(upload)
        members = _zip(upload, limits) if is_zip else _tar(upload, limits)
        for name, content in members:
            path = _safe(name)
            if path in files:
                raise ArchiveError(f"{name!r} is in the archive twice")
            above = [parent.as_posix() for parent in PurePosixPath(path).parents][:-1]
            inside = next((parent for parent in above if parent in files), None)
            if inside or path in folders:
                raise ArchiveError(f"{inside or path!r} is in the archive as a file and a folder")
            folders.update(above)
            # Sizes in headers can lie: what counts is what comes out.
            files[path] = _read(content, left, limits)
            left -= len(files[path])
    except BROKEN as error:
        raise ArchiveError(f"broken archive: {error}") from None
    except (NotImplementedError, RuntimeError):
        raise ArchiveError("encrypted or unusually compressed archives are not read") from None
    return files


def unpack_tar(archive: Path, folder: Path, *, without_top: bool = False) -> None:
    """Write the regular files of a tar below a folder, a piece at a time.

    Args:
        archive: The tar.
        folder: Where its files go.
        without_top: Leave out the one folder that all of it lies in.

    (`extractall(filter=…)` would do, but came only with Python 3.11.4.)

    Raises:
        ArchiveError: A member is neither file nor folder, or would leave the folder.
    """
    with archive.open("rb") as opened:
        for name, content in _tar(opened, None):
            top, *below = PurePosixPath(_safe(name)).parts
            target = folder.joinpath(*(below if without_top and below else (top, *below)))
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file, PIECE)


def _read(content: IO[bytes], left: int, limits: UnpackLimits) -> bytes:
    pieces = []
    while piece := content.read(PIECE):
        left -= len(piece)
        if left < 0:
            raise ArchiveError(f"more than {limits.total_bytes} bytes when unpacked")
        pieces.append(piece)
    return b"".join(pieces)


def _zip(upload: BinaryIO, limits: UnpackLimits) -> Iterator[tuple[str, IO[bytes]]]:
    upload.seek(0)
    with zipfile.ZipFile(upload) as archive:
        if len(archive.infolist()) > limits.files:
            raise ArchiveError(f"more than {limits.files} files and folders in the archive")
        for member in archive.infolist():
            if member.is_dir():
                _safe(member.filename)
                continue
            mode = member.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise ArchiveError(f"{member.filename!r} is a link or a device, not a file")
            with archive.open(member) as content:
                yield member.filename, content


def _tar(upload: BinaryIO, limits: UnpackLimits | None) -> Iterator[tuple[str, IO[bytes]]]:
    upload.seek(0)
    opened = _decompressed(upload)
    counted = _Counted(opened, limits.total_bytes if limits else None)
    try:
        archive = tarfile.open(fileobj=cast("IO[bytes]", counted), mode="r:")  # noqa: SIM115
    except tarfile.ReadError as error:
        if opened is upload:
            raise
        raise ArchiveError(f"it is compressed, but no tar archive is in it: {error}") from None
    with archive:
        for at, member in enumerate(archive):
            if limits and at >= limits.files:
                raise ArchiveError(f"more than {limits.files} files and folders in the archive")
            if member.isdir():
                if member.name not in ("", "."):  # `tar -C folder .` begins with it
                    _safe(member.name)
                continue
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                raise ArchiveError(f"{member.name!r} is a link or a device, not a file")
            yield member.name, content


def _decompressed(upload: BinaryIO) -> IO[bytes]:
    head = upload.read(6)
    upload.seek(0)
    for magic, opener in MAGIC.items():
        if head.startswith(magic):
            return cast("IO[bytes]", opener(upload))
    return upload


class _Counted:
    """What `tarfile` reads from, in small pieces: headers are as long as they say themselves."""

    def __init__(self, file: IO[bytes], total: int | None) -> None:
        self._file, self._total = file, total

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= PIECE:
            raise ArchiveError("a header in the archive is too long")
        self._require_room()
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        position = self._file.seek(offset, whence)
        self._require_room()
        return position

    def tell(self) -> int:
        return self._file.tell()

    def _require_room(self) -> None:
        # Headers and padding come on top of what the files hold.
        if self._total is not None and self._file.tell() > 2 * self._total + PIECE:
            raise ArchiveError(f"more than {self._total} bytes when unpacked")


def _safe(name: str) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    unsafe = path.is_absolute() or ".." in path.parts or ":" in name or "\0" in name
    if unsafe or len(name) > 500:
        raise ArchiveError(f"{name[:500]!r} would leave the suite's folder")
    try:
        encoded = [part.encode() for part in path.parts]
    except UnicodeEncodeError:
        raise ArchiveError(f"the name {name!r} is not UTF-8 text") from None
    if any(len(part) > MAX_NAME_BYTES for part in encoded):
        raise ArchiveError(f"the name {name[:100]!r}… is longer than {MAX_NAME_BYTES} bytes")
    if not path.parts:
        raise ArchiveError(f"{name!r} is no name of a file")
    return path.as_posix()
