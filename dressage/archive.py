"""Archives: an untrusted zip or tar into memory, or a tar of ours into a folder."""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO


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
    left = limits.total_bytes
    try:
        members = _zip(upload) if zipfile.is_zipfile(upload) else _tar(upload)
        for name, content in members:
            path = _safe(name)
            if path in files:
                raise ArchiveError(f"{name!r} is in the archive twice")
            if len(files) == limits.files:
                raise ArchiveError(f"more than {limits.files} files in the archive")
            # Sizes in headers can lie: what counts is what comes out.
            files[path] = content.read(left + 1)
            left -= len(files[path])
            if left < 0:
                raise ArchiveError(f"more than {limits.total_bytes} bytes when unpacked")
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ArchiveError(f"broken archive: {error}") from None
    except (NotImplementedError, RuntimeError):
        raise ArchiveError("encrypted or unusually compressed archives are not read") from None
    return files


def unpack_tar(archive: Path, folder: Path) -> None:
    """Write the regular files of a tar below a folder, a piece at a time.

    (`extractall(filter=…)` would do, but came only with Python 3.11.4.)

    Raises:
        ArchiveError: A member is neither file nor folder, or would leave the folder.
    """
    with archive.open("rb") as opened:
        for name, content in _tar(opened):
            target = folder / _safe(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)


def _zip(upload: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    upload.seek(0)
    with zipfile.ZipFile(upload) as archive:
        for member in archive.infolist():
            if member.is_dir():
                _safe(member.filename)
                continue
            mode = member.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise ArchiveError(f"{member.filename!r} is a link or a device, not a file")
            with archive.open(member) as content:
                yield member.filename, content


def _tar(upload: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    upload.seek(0)
    with tarfile.open(fileobj=upload, mode="r:*") as archive:
        for member in archive:
            if member.isdir():
                _safe(member.name)
                continue
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                raise ArchiveError(f"{member.name!r} is a link or a device, not a file")
            yield member.name, content


def _safe(name: str) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    unsafe = path.is_absolute() or ".." in path.parts or ":" in name or "\0" in name
    if unsafe or len(name) > 500:
        raise ArchiveError(f"{name[:500]!r} would leave the suite's folder")
    return path.as_posix()
