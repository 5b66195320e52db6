"""What stands between a client and the service: proxies, and services that are being started."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dressage.client import ApiError, Client, ServiceUnreachable


@pytest.fixture
def server():
    """Answers as it is told, then with an empty list of jobs."""
    answers = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, kind, body = answers.pop(0) if answers else (200, "application/json", EMPTY)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.url = answers, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()


EMPTY = b'{"items": [], "next_cursor": null}'
PAGE = b"<html><body>502 Bad Gateway</body></html>"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_what_is_on_this_machine_is_never_asked_through_a_proxy(server, monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with Client(server.url) as client:
        assert client.jobs().items == ()


def test_a_proxy_that_cannot_be_used_is_a_sentence(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "nonsense://127.0.0.1:9")
    with pytest.raises(ServiceUnreachable, match="the proxy that the environment names"):
        Client("http://service.example")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_read_is_repeated_while_the_service_is_being_started(server, monkeypatch, status):
    monkeypatch.setattr("dressage.client.client.RECONNECT_SECONDS", 0.01)
    server.answers += [(status, "text/html", PAGE)] * 3
    with Client(server.url) as client:
        assert client.jobs().items == ()


def test_a_page_of_a_proxy_is_never_printed_and_a_change_never_repeated(server):
    server.answers += [(502, "text/html", PAGE)]
    with Client(server.url) as client, pytest.raises(ApiError) as refused:
        client.cancel("job_x")
    assert "<html>" not in str(refused.value)
    assert str(refused.value).startswith("HTTP 502 from 127.0.0.1")
    assert server.answers == []
