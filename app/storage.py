"""The artifact store: files under the hash of their content, so equal files are kept once.

A directory, or a bucket of any S3-compatible service. Which files may go is not decided here: see
`app.artifacts.blobs`.
"""

import asyncio
import hashlib
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

CHUNK = 1 << 20
LEAST_FREE = 50_000_000  # bytes; less is a full disk
PART = 16 << 20  # S3 takes 10,000 parts: files up to 160 GB
PARTS_AT_ONCE = 4
LINK_LIFETIME = timedelta(minutes=15)
S3 = "s3://"


class ChecksumMismatch(OSError):
    """What arrived is not what was announced."""


class StorageUnavailable(OSError):
    """The store does not answer, or not as it should; another try may help."""


class Storage(ABC):
    """Every write is whole or not at all; no file is ever changed.

    Every method raises `FileNotFoundError` for a file that is not there, and `StorageUnavailable`.
    """

    @abstractmethod
    def put_file(self, source: Path, expected_sha256: str) -> None:
        """Copy a file in, checking it on the way.

        Raises:
            ChecksumMismatch: The file is not the announced one; nothing was stored.
        """

    @abstractmethod
    def put_bytes(self, data: bytes) -> str:
        """Store bytes and return their key."""

    @abstractmethod
    def read_from(self, sha256: str) -> Iterator[bytes]:
        """A file's bytes, a chunk at a time."""

    @abstractmethod
    def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Bytes `start` up to `end`, a chunk at a time."""

    @abstractmethod
    async def link(self, sha256: str) -> str | None:
        """Where a file can be downloaded for some minutes without us; None: only through us."""

    @abstractmethod
    def remove(self, sha256: str) -> None:
        """Forget a file, if it is there."""

    @abstractmethod
    def check(self) -> None:
        """Whether the store can be used at all."""

    def fetch(self, sha256: str, target: Path) -> None:
        """Copy a stored file out, checking it on the way.

        Raises:
            ChecksumMismatch: The store has another content under this key; there is no target then.
        """
        try:
            with target.open("wb") as file:
                for chunk in _checked(self.read_from(sha256), sha256, "the stored file"):
                    file.write(chunk)
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def read(self, sha256: str) -> bytes:
        """A small file, whole.

        Raises:
            ChecksumMismatch: The store has another content under this key.
        """
        return b"".join(_checked(self.read_from(sha256), sha256, "the stored file"))


def open_storage(where: str, *, links: bool) -> Storage:
    """The store of a directory, or of `s3://bucket/prefix`.

    Args:
        where: Endpoint, region and credentials of a bucket come from the usual `AWS_…` variables.
        links: Whether downloads from a bucket may go past us.
    """
    if where.startswith(S3):
        return BucketStorage(where, links=links)
    return DirectoryStorage(Path(where))


class DirectoryStorage(Storage):
    """A directory, shared by the API and all workers."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, sha256: str) -> Path:
        """Where a stored file lies."""
        return self._root / _key(sha256)

    def put_file(self, source: Path, expected_sha256: str) -> None:  # noqa: D102
        if self.path(expected_sha256).is_file():
            return
        with self._partial() as partial:
            shutil.copyfile(source, partial)
            with partial.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != expected_sha256:
                raise _mismatch(source.name, expected_sha256, actual)
            self._keep(partial, actual)

    def put_bytes(self, data: bytes) -> str:  # noqa: D102
        sha256 = hashlib.sha256(data).hexdigest()
        with self._partial() as partial:
            partial.write_bytes(data)
            self._keep(partial, sha256)
        return sha256

    def read_from(self, sha256: str) -> Iterator[bytes]:  # noqa: D102
        with self.path(sha256).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    async def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:  # noqa: D102
        with self.path(sha256).open("rb") as file:
            file.seek(start)
            while start < end:
                chunk = await asyncio.to_thread(file.read, min(CHUNK, end - start))
                if not chunk:
                    raise StorageUnavailable(f"{sha256} is shorter than it was")
                start += len(chunk)
                yield chunk

    async def link(self, sha256: str) -> str | None:  # noqa: ARG002, D102
        return None

    def remove(self, sha256: str) -> None:  # noqa: D102
        self.path(sha256).unlink(missing_ok=True)

    def check(self) -> None:  # noqa: D102
        self._root.mkdir(parents=True, exist_ok=True)
        if not os.access(self._root, os.W_OK):
            raise StorageUnavailable(f"{self._root} cannot be written to")
        if shutil.disk_usage(self._root).free < LEAST_FREE:
            raise StorageUnavailable(f"the disk of {self._root} is full")

    @contextmanager
    def _partial(self) -> Iterator[Path]:
        """A place to write to; what is still there in the end is removed, also when it failed."""
        folder = self._root / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / uuid.uuid4().hex
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)

    def _keep(self, partial: Path, sha256: str) -> None:
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        target = self.path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)


class BucketStorage(Storage):
    """A bucket of an S3-compatible service. Big files go in parts, some at a time."""

    def __init__(self, url: str, *, links: bool) -> None:
        self._url, self._links = url, links
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        self._bucket = S3Store.from_url(
            url,
            # A request is given up when nothing comes any longer, however long it takes in all.
            client_options={
                "timeout": "7days",
                "read_timeout": "60s",
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=30)},
        )

    def put_file(self, source: Path, expected_sha256: str) -> None:  # noqa: D102
        with self._answering():
            if self._has(expected_sha256):
                return
            with source.open("rb") as file:
                chunks = iter(lambda: file.read(PART), b"")
                # A wrong checksum is an error within the upload, which then never becomes a file.
                self._put(
                    expected_sha256, _checked(chunks, expected_sha256, source.name), source.name
                )

    def put_bytes(self, data: bytes) -> str:  # noqa: D102
        sha256 = hashlib.sha256(data).hexdigest()
        with self._answering():
            if not self._has(sha256):
                self._put(sha256, data, sha256)
        return sha256

    def read_from(self, sha256: str) -> Iterator[bytes]:  # noqa: D102
        with self._answering():
            yield from obstore.get(self._bucket, _key(sha256)).stream(CHUNK)

    async def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:  # noqa: D102
        if start == end:
            return
        with self._answering():
            found = await obstore.get_async(
                self._bucket, _key(sha256), options={"range": (start, end)}
            )
            async for chunk in found.stream(CHUNK):
                yield chunk

    async def link(self, sha256: str) -> str | None:  # noqa: D102
        if not self._links:
            return None
        with self._answering():
            return await obstore.sign_async(self._bucket, "GET", _key(sha256), LINK_LIFETIME)

    def remove(self, sha256: str) -> None:  # noqa: D102
        with self._answering():
            obstore.delete(self._bucket, _key(sha256))

    def check(self) -> None:  # noqa: D102
        with self._answering():
            obstore.list_with_delimiter(self._bucket, "partial")

    def _has(self, sha256: str) -> bool:
        try:
            obstore.head(self._bucket, _key(sha256))
        except FileNotFoundError:
            return False
        return True

    def _put(self, sha256: str, content: bytes | Iterator[bytes], name: str) -> None:
        try:
            obstore.put(
                self._bucket,
                _key(sha256),
                content,
                # What a browser calls the file that it downloads by a link.
                attributes={"Content-Disposition": f'attachment; filename="{name}"'},
                chunk_size=PART,
                max_concurrency=PARTS_AT_ONCE,
            )
        except FileNotFoundError as error:
            raise StorageUnavailable(f"{self._url}: there is no such bucket") from error

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except BaseError as error:
            said = str(error).split("\n\n", 1)[0][:500]
            raise StorageUnavailable(f"{self._url}: {said}") from error


def _key(sha256: str) -> str:
    return f"objects/{sha256[:2]}/{sha256}"


def _checked(chunks: Iterator[bytes], expected_sha256: str, name: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != expected_sha256:
        raise _mismatch(name, expected_sha256, digest.hexdigest())


def _mismatch(name: str, expected: str, actual: str) -> ChecksumMismatch:
    return ChecksumMismatch(f"{name}: expected the checksum {expected}, read {actual}")
