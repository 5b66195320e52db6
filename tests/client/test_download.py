"""Downloads over connections that break."""

import hashlib
import os
import re
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dressage.client import Client, DownloadCorrupt, ServiceUnreachable
from dressage.spec.artifact import Artifact, ArtifactKind

CONTENT = os.urandom(100_000)
FILE = Artifact(
    id="artifact_1",
    kind=ArtifactKind.GGUF,
    name="model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    created_at=datetime.now(UTC),
)


class Server:
    """Serves CONTENT in ranges, and hangs up after `pieces[n]` bytes of the n-th answer."""

    def __init__(self, pieces, content=CONTENT):
        self.pieces, self.content, self.asked = list(pieces), content, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                header = self.headers.get("Range")
                server.asked.append(header)
                start = int(re.fullmatch(r"bytes=(\d+)-", header).group(1)) if header else 0
                rest = server.content[start:]
                piece = server.pieces.pop(0) if server.pieces else len(rest)
                self.send_response(206 if header else 200)
                self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                self.wfile.write(rest[:piece])

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr("dressage.client.download.AGAIN_SECONDS", 0)


def test_a_connection_that_breaks_is_taken_up_until_all_is_there(tmp_path):
    with Server([30_000, 0, 0, 50_000]) as server, Client(server.url, key="k") as client:
        path = client.download("job_1", FILE, tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, *["bytes=30000-"] * 3, "bytes=80000-"]
    assert [*tmp_path.iterdir()] == [path]


def test_what_came_is_kept_for_the_next_time_when_nothing_more_comes(tmp_path):
    with Server([40_000, *[0] * 5]) as server, Client(server.url, key="k") as client:
        with pytest.raises(ServiceUnreachable, match="broke off at 40000 of 100000 bytes"):
            client.download("job_1", FILE, tmp_path)
        assert client.download("job_1", FILE, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=40000-"


def test_another_content_is_noticed_and_removed(tmp_path):
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with Server([], wrong) as server, Client(server.url, key="k") as client:
        with pytest.raises(DownloadCorrupt, match="the checksum is wrong"):
            client.download("job_1", FILE, tmp_path)
        assert [*tmp_path.iterdir()] == []
