"""Messages about jobs: signed, repeated, and only to addresses that the operator allows."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpcore2
import psycopg
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from app.db.engine import create_engine, create_sessions
from app.egress import AddressRefused, AllowedAddresses, UrlError, normalized, post
from app.main import create_app
from app.webhooks.delivery import PER_WEBHOOK, Sender, deliver_due
from tests.servers import bearer

LOOPBACK = AllowedAddresses.of(["127.0.0.0/8"])


@pytest.fixture
def receiver():
    """A server that keeps what it gets and answers as it is told."""
    got, answers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((dict(self.headers), body))
            status, headers = answers.pop(0) if answers else (200, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.got, server.answers = got, answers
    server.url = f"http://127.0.0.1:{server.server_port}/hook"
    yield server
    server.shutdown()


@pytest.fixture
def api(settings):
    app = create_app(settings.model_copy(update={"outbound_networks": ["127.0.0.0/8"]}))
    with TestClient(app, headers=bearer("submitter")) as client:
        yield client


@pytest.fixture
def deliver(settings):
    def go(allowed=LOOPBACK):
        async def inside():
            engine = create_engine(settings.sqlalchemy_url)
            try:
                return await deliver_due(create_sessions(engine), allowed)
            finally:
                await engine.dispose()

        return asyncio.run(inside())

    return go


@pytest.fixture
def cancelled(api, job_spec, receiver, arithmetic):
    """A webhook, and a job that ended."""
    api.post("/suites", params={"name": "arithmetic"}, content=arithmetic.to_archive())
    hook = api.post("/webhooks", json={"url": receiver.url, "statuses": ["cancelled"]}).json()
    job = api.post("/jobs", json=job_spec).json()["id"]
    api.post(f"/jobs/{job}/cancel")
    return hook, job


def test_a_change_is_told_once_and_signed(api, cancelled, receiver, deliver):
    hook, job = cancelled
    assert (deliver(), deliver()) == (1, 0)
    ((headers, body),) = receiver.got
    told = json.loads(body)
    assert told["type"] == "job.cancelled"
    assert (told["data"]["job_id"], told["data"]["reason"]) == (job, "cancelled_by_user")
    # As https://github.com/standard-webhooks says, by hand.
    key = base64.b64decode(hook["secret"].removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    (delivery,) = api.get(f"/webhooks/{hook['id']}/deliveries").json()["items"]
    assert (delivery["status"], delivery["attempts"]) == ("delivered", 1)
    assert delivery["last_status"] == 200
    assert hook["secret"] not in api.get("/webhooks").text


def test_a_receiver_that_fails_is_asked_again_later_with_the_same_id(
    api, cancelled, receiver, deliver, database_url
):
    hook, _ = cancelled
    receiver.answers += [(500, {}), (302, {"Location": "http://127.0.0.1:1/"}), (204, {})]
    ids = []
    for attempt in (1, 2, 3):
        assert deliver() == 1
        assert deliver() == 0  # not before its time
        ids.append(receiver.got[-1][0]["webhook-id"])
        (delivery,) = api.get(f"/webhooks/{hook['id']}/deliveries").json()["items"]
        assert delivery["attempts"] == attempt
        if attempt < 3:
            assert delivery["status"] == "pending"
            assert delivery["last_error"].startswith(("answered 500", "answered 302"))
        with psycopg.connect(database_url) as connection:
            connection.execute("UPDATE deliveries SET next_at = now()")
    assert delivery["status"] == "delivered"
    assert len(set(ids)) == 1


def test_after_the_last_try_and_after_gone_a_message_has_failed(
    api, cancelled, receiver, deliver, database_url
):
    hook, _ = cancelled
    receiver.answers += [(500, {})] * 20
    for _ in range(10):
        with psycopg.connect(database_url) as connection:
            connection.execute("UPDATE deliveries SET next_at = now()")
        assert deliver() == 1
    assert deliver() == 0
    (delivery,) = api.get(f"/webhooks/{hook['id']}/deliveries").json()["items"]
    assert (delivery["status"], delivery["attempts"]) == ("failed", 10)


def test_only_wanted_changes_of_ones_own_team_are_told(api, job_spec, receiver, cancelled, deliver):
    deliver()
    job = api.post("/jobs", json=job_spec).json()["id"]
    api.post(f"/jobs/{job}/pause")
    assert deliver() == 0
    api.post(f"/jobs/{job}/cancel")
    api.delete(f"/webhooks/{cancelled[0]['id']}")
    assert deliver() == 0
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://example.com/x", "http:// or https://"),
        ("https://user:pw@example.com/x", "user name"),
        ("http://[::1]/x", "does not let the service call"),
        ("http://169.254.169.254/latest/meta-data", "does not let the service call"),
        ("http://10.0.0.1/", "does not let the service call"),
        ("http://[::ffff:10.0.0.1]/", "does not let the service call"),
        ("http://0.0.0.0/", "does not let the service call"),
        ("http://example.com:99999/", "not a URL"),
        ("nonsense", "http:// or https://"),
        ("http://a..b/", "is no name"),
        (f"http://{'x' * 64}.example.com/", "is no name"),
        ("http://ex ample.com/", "spaces or control characters"),
        ("http://example.com/\u00e9\n", "spaces or control characters"),
        ("http://\u2260\u2260.example/", "is no name"),
        ("http://example.com:0/", "port 0"),
        *(
            (f"http://[{address}]/", "does not let the service call")
            for address in (
                *("64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:a00:1::", "::a00:1", "::1"),
                *("::ffff:0:a00:1", "fec0::1", "fe80::1", "fd00::1", "ff02::1", "100::1"),
            )
        ),
    ],
)
def test_addresses_that_are_refused_at_once(api, url, sentence):
    answer = api.post("/webhooks", json={"url": url})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "url")
    assert sentence in answer.json()["detail"]


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://ci.example.com/x", "https://ci.example.com/x"),
        ("https://Bücher.example/é?q=ü", "https://xn--bcher-kva.example/%C3%A9?q=%C3%BC"),
        ("http://my_host.example:8080", "http://my_host.example:8080/"),
        ("http://[2606:4700::1111]/a%20b", "http://[2606:4700::1111]/a%20b"),
        ("http://[64:ff9b::808:808]/", "http://[64:ff9b::808:808]/"),
    ],
)
def test_a_public_address_is_accepted_as_it_goes_over_the_wire(api, url, kept):
    answer = api.post("/webhooks", json={"url": url})
    assert (answer.status_code, answer.json()["url"]) == (201, kept)


@given(st.text(max_size=40), st.sampled_from(["http://", "https://", "http://[", ""]))
def test_whatever_is_given_is_refused_or_can_be_sent(text, scheme):
    try:
        url = normalized(scheme + text)
    except UrlError:
        return
    httpcore2.Request("POST", url)
    assert url.isascii()
    assert normalized(url) == url


@given(st.ip_addresses(v=4), st.sampled_from(["::{}", "::ffff:{}", "64:ff9b::{}", "::ffff:0:{}"]))
def test_an_ipv4_address_is_judged_in_every_disguise(address, form):
    dressed = ipaddress.ip_address(form.format(address))
    assert AllowedAddresses().allows(dressed) == AllowedAddresses().allows(address)


@pytest.mark.usefixtures("cancelled")
def test_a_url_that_cannot_be_sent_hinders_no_other_and_fails_by_name(
    api, receiver, deliver, database_url
):
    """As one that was stored before there was a check."""
    bad = api.post("/webhooks", json={"url": receiver.url, "statuses": ["cancelled"]}).json()
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE webhooks SET url = 'http://b\u00fccher.example/' WHERE id = %s", (bad["id"],)
        )
        connection.execute(
            "INSERT INTO deliveries (id, webhook_id, status, attempts, next_at, payload) "
            "SELECT 'bad', %s, status, attempts, now() - interval '1 hour', payload "
            "FROM deliveries",
            (bad["id"],),
        )
    assert deliver() == 2
    assert len(receiver.got) == 1
    (failed,) = api.get(f"/webhooks/{bad['id']}/deliveries").json()["items"]
    assert failed["last_error"]


def test_a_receiver_that_never_ends_its_answer_is_given_up_and_delays_nobody(
    api, cancelled, receiver, settings, monkeypatch, database_url
):
    monkeypatch.setattr("app.egress.TOTAL_SECONDS", 2.0)
    slow = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_drip, args=(slow,), daemon=True).start()
    hook, _ = cancelled
    bad = api.post(
        "/webhooks",
        json={"url": f"http://127.0.0.1:{slow.getsockname()[1]}/", "statuses": ["cancelled"]},
    ).json()
    with psycopg.connect(database_url) as connection:
        for number in range(30):
            connection.execute(
                "INSERT INTO deliveries (id, webhook_id, status, attempts, next_at, payload) "
                "SELECT %s, %s, 'pending', 0, now() - interval '1 hour', payload "
                "FROM deliveries WHERE webhook_id = %s",
                (f"slow{number}", bad["id"], hook["id"]),
            )

    async def inside():
        engine = create_engine(settings.sqlalchemy_url)
        sender = Sender(create_sessions(engine), LOOPBACK)
        assert await sender.start_due() == PER_WEBHOOK + 1
        while not receiver.got:
            await asyncio.sleep(0.05)
        assert await sender.start_due() == 0  # while its two are out, the slow one gets no more
        await sender.finish()
        await engine.dispose()

    asyncio.run(inside())
    errors = {d["last_error"] for d in api.get(f"/webhooks/{bad['id']}/deliveries").json()["items"]}
    assert errors == {None, "no whole answer within 30 seconds"}
    slow.close()


def _drip(server):
    open_ = []
    while True:
        connection, _ = server.accept()
        open_.append(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        threading.Thread(target=_a_byte_now_and_then, args=(connection,), daemon=True).start()


def _a_byte_now_and_then(connection):
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"x")
            time.sleep(0.2)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_address_is_checked_where_the_connection_is_made(receiver, host):
    url = receiver.url.replace("127.0.0.1", host)
    with pytest.raises(AddressRefused):
        asyncio.run(post(AllowedAddresses(), url, {}, b"{}"))
    assert receiver.got == []
    assert asyncio.run(post(LOOPBACK, url, {}, b"{}"))[0] == 200


def test_a_name_that_changes_its_address_between_check_and_connection_gains_nothing(
    receiver, monkeypatch
):
    """DNS rebinding: what is connected to is the very address that was checked."""
    asked = []

    async def resolve(loop, host, port, **_):
        asked.append(host)
        address = "10.9.9.9" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    url = f"http://rebind.example:{receiver.server_port}/"
    with pytest.raises(AddressRefused):
        asyncio.run(post(LOOPBACK, url, {}, b"{}"))
    assert asked == ["rebind.example"]
    assert receiver.got == []


def test_a_message_to_a_refused_address_says_so(api, cancelled, deliver, receiver):
    hook, _ = cancelled
    deliver(AllowedAddresses())
    (delivery,) = api.get(f"/webhooks/{hook['id']}/deliveries").json()["items"]
    assert "does not let the service call 127.0.0.1" in delivery["last_error"]
    assert receiver.got == []


def test_nobody_there(receiver):
    receiver.shutdown()
    receiver.server_close()
    with pytest.raises(httpcore2.ConnectError):
        asyncio.run(post(LOOPBACK, receiver.url, {}, b"{}"))
