"""Downloads a file whole: taken up where it broke off, and checked."""

import hashlib
import time
from pathlib import Path

import httpx2

from dressage.client.errors import ApiError, DownloadCorrupt, ServiceUnreachable
from dressage.spec.artifact import Artifact

AGAIN_SECONDS = 1.0
TRIES_WITHOUT_PROGRESS = 5


def download(http: httpx2.Client, url: str, artifact: Artifact, folder: Path) -> Path:
    """Download a file; what a broken download left behind is continued, also later.

    Args:
        http: Knows the service and the key; the key is not sent on to a bucket.
        url: Of the file.
        artifact: What it has to be.
        folder: Where it goes.

    Raises:
        ApiError: The service refuses.
        ServiceUnreachable: Nothing more comes after several tries; what came is kept.
        DownloadCorrupt: The checksum is wrong; the partial file is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / artifact.name
    partial = target.with_name(f".{artifact.name}.{artifact.sha256[:12]}.partial")
    tries = 0
    while (have := _size(partial)) < artifact.size:
        try:
            _continue(http, url, partial)
        except httpx2.TransportError as error:
            tries = 0 if _size(partial) > have else tries + 1
            if tries == TRIES_WITHOUT_PROGRESS:
                raise ServiceUnreachable(
                    f"the download of {artifact.name} broke off at {_size(partial)} of "
                    f"{artifact.size} bytes ({error or type(error).__name__}); the same again goes "
                    "on from there"
                ) from None
            time.sleep(AGAIN_SECONDS)
            continue
        if _size(partial) <= have:
            break  # the service says that this is all
    with partial.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if checksum != artifact.sha256:
        partial.unlink()
        raise DownloadCorrupt(f"{artifact.name}: the checksum is wrong; download it again")
    partial.replace(target)
    return target


def _continue(http: httpx2.Client, url: str, partial: Path) -> None:
    have = _size(partial)
    headers = {"Range": f"bytes={have}-"} if have else {}
    with http.stream("GET", url, headers=headers, timeout=60, follow_redirects=True) as response:
        if response.status_code >= 400:
            response.read()
            raise ApiError.from_response(response)
        mode = "ab" if response.status_code == httpx2.codes.PARTIAL_CONTENT else "wb"
        with partial.open(mode) as file:
            for (
                chunk
            ) in response.iter_bytes():  # as it comes, so that nothing is lost with the rest
                file.write(chunk)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
