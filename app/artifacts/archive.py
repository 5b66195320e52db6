"""Many files as one tar, made while it is sent: memory is that of one chunk."""

import tarfile
from collections.abc import AsyncIterator, Sequence

from app.db.models import ArtifactRow
from app.storage import Storage

END = b"\0" * (2 * tarfile.BLOCKSIZE)


async def stream_tar(storage: Storage, rows: Sequence[ArtifactRow]) -> AsyncIterator[bytes]:
    """The bytes of a tar with these files."""
    for row in rows:
        header = tarfile.TarInfo(row.name)
        header.size, header.mtime = row.size, int(row.created_at.timestamp())
        yield header.tobuf(tarfile.PAX_FORMAT)
        async for chunk in storage.stream(row.sha256, 0, row.size):
            yield chunk
        yield b"\0" * (-row.size % tarfile.BLOCKSIZE)
    yield END
