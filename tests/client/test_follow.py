"""`Client.follow` over connections that break."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dressage.client import ApiError, Client
from dressage.client import client as module

END = b"event: end\ndata: {}\n\n"


def frame(seq):
    event = {"seq": seq, "type": "log", "time": "2026-11-02T00:00:00Z", "data": {"message": "x"}}
    return f"id: {seq}\nevent: log\ndata: {json.dumps(event)}\n\n".encode()


@pytest.fixture
def service(monkeypatch):
    """`service([bytes, …])`: a client, and what each connection asked; it sends and hangs up."""
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.01)
    servers = []

    def go(answers, status=200):
        asked, left = [], list(answers)

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                asked.append(int(self.headers["Last-Event-ID"]))
                answer = left.pop(0)
                self.send_response(status)
                # More is announced than comes: the connection breaks in the middle.
                missing = 0 if answer.endswith(END) or status >= 400 else 100
                self.send_header("Content-Length", str(len(answer) + missing))
                self.end_headers()
                self.wfile.write(answer)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return Client(f"http://127.0.0.1:{server.server_port}", key="k"), asked

    yield go
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_broken_stream_is_taken_up_after_the_last_whole_event(service):
    torn = frame(3)[:-20]
    client, asked = service([frame(1) + frame(2) + torn, b"", frame(3) + frame(4) + END])
    assert [event.seq for event in client.follow("job_1")] == [1, 2, 3, 4]
    assert asked == [0, 2, 2]


def test_it_begins_where_it_is_told_and_skips_what_is_no_event(service):
    client, asked = service([b"retry: 1000\n\n: keep-alive\n\n" + frame(8) + END])
    assert [event.seq for event in client.follow("job_1", after=7)] == [8]
    assert asked == [7]


def test_a_refusal_is_no_reason_to_try_again(service):
    problem = {"code": "not_found", "detail": "there is no job 'x'", "errors": []}
    client, asked = service([json.dumps(problem).encode()], status=404)
    with pytest.raises(ApiError, match="there is no job") as refused:
        list(client.follow("x"))
    assert (refused.value.status, refused.value.code, asked) == (404, "not_found", [0])
