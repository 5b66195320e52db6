"""The artifact store, in a directory and in a bucket of a real S3-compatible server."""

import asyncio
import hashlib
import os
import subprocess
import sys
import uuid

import httpx2
import psycopg
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from app.artifacts import blobs
from app.artifacts.download import Range, asked_range
from app.db.engine import create_engine, create_sessions, unit_of_work
from app.exceptions import RangeNotSatisfiable
from app.main import create_app
from app.storage import ChecksumMismatch, StorageUnavailable, open_storage
from tests.conftest import ROOT
from tests.s3_server import S3Server
from tests.servers import bearer


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3, monkeypatch):
    """A new bucket's name; the environment leads to its server."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex}"
    s3.make_bucket(name)
    return name


@pytest.fixture(params=["directory", "bucket"])
def where(request, tmp_path):
    if request.param == "directory":
        return str(tmp_path / "store")
    return f"s3://{request.getfixturevalue('bucket')}/some/prefix"


@pytest.fixture
def storage(where):
    return open_storage(where, links=True)


def big_file(folder, size=40 << 20):
    """More than two parts."""
    path = folder / "model.gguf"
    path.write_bytes(os.urandom(size))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_comes_back_as_it_was(storage, tmp_path):
    path, sha256 = big_file(tmp_path)
    storage.put_file(path, sha256)
    storage.put_file(path, sha256)  # the same once more is nothing new
    storage.fetch(sha256, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()

    async def piece(start, end):
        return b"".join([chunk async for chunk in storage.stream(sha256, start, end)])

    assert (
        asyncio.run(piece(17 << 20, (18 << 20) + 5)) == path.read_bytes()[17 << 20 : (18 << 20) + 5]
    )
    assert asyncio.run(piece(5, 5)) == b""
    storage.remove(sha256)
    storage.remove(sha256)
    with pytest.raises(FileNotFoundError):
        storage.read(sha256)


STREAM = """
import asyncio, os, resource, sys
from app.storage import open_storage
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
async def go(storage, sha256, size):
    return sum([len(chunk) async for chunk in storage.stream(sha256, 0, size)])
storage = open_storage(sys.argv[1], links=False)
small, big = sys.argv[2].split(","), sys.argv[3].split(",")
asyncio.run(go(storage, small[0], int(small[1])))
before = peak()
assert asyncio.run(go(storage, big[0], int(big[1]))) == int(big[1])
print(peak() - before, flush=True)
os._exit(0)  # obstore's threads may outlive the interpreter's end, which then aborts
"""


def test_memory_is_that_of_a_piece_whatever_the_file(storage, where, tmp_path):
    files = []
    for size in (1 << 20, 200 << 20):
        path, sha256 = big_file(tmp_path, size)
        storage.put_file(path, sha256)
        files.append(f"{sha256},{size}")
    command = [sys.executable, "-c", STREAM, where, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) < 60 << 20


def test_a_file_that_is_not_the_announced_one_is_not_stored(storage, tmp_path):
    path, _ = big_file(tmp_path)
    wrong = "0" * 64
    with pytest.raises(ChecksumMismatch, match=r"model\.gguf"):
        storage.put_file(path, wrong)
    with pytest.raises(FileNotFoundError):
        storage.read(wrong)


def test_nothing_of_a_refused_upload_is_left_in_the_bucket(bucket, s3, tmp_path):
    path, _ = big_file(tmp_path)
    with pytest.raises(ChecksumMismatch):
        open_storage(f"s3://{bucket}", links=True).put_file(path, "0" * 64)
    assert s3.keys(bucket) == []
    assert not s3.unfinished(bucket)


def test_equal_contents_are_kept_once(bucket, s3):
    storage = open_storage(f"s3://{bucket}/p", links=True)
    assert storage.put_bytes(b"same") == storage.put_bytes(b"same")
    assert len(s3.keys(bucket)) == 1


def test_what_was_changed_in_the_store_is_noticed(tmp_path):
    storage = open_storage(str(tmp_path), links=True)
    sha256 = storage.put_bytes(b"right")
    storage.path(sha256).write_bytes(b"wrong")
    with pytest.raises(ChecksumMismatch):
        storage.read(sha256)
    with pytest.raises(ChecksumMismatch):
        storage.fetch(sha256, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bucket_that_is_not_there_or_away_says_so(bucket, monkeypatch):
    other = open_storage("s3://no-such-bucket/p", links=True)
    with pytest.raises(StorageUnavailable, match="NoSuchBucket"):
        other.check()
    with pytest.raises(StorageUnavailable, match="there is no such bucket"):
        other.put_bytes(b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    away = open_storage(f"s3://{bucket}", links=True)
    for work in (away.check, lambda: away.put_bytes(b"x"), lambda: away.read("0" * 64)):
        with pytest.raises(StorageUnavailable, match="error sending request"):
            work()


@given(
    size=st.integers(1, 300),
    first=st.none() | st.integers(0, 400),
    last=st.none() | st.integers(0, 400),
)
def test_ranges_are_those_of_the_rfc(size, first, last):
    content = bytes(i % 256 for i in range(size))
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if first is None and last is None:
        expected = None
    elif first is None:
        expected = content[-last:] if last else b""
    elif last is not None and last < first:
        expected = None
    else:
        expected = content[first : size if last is None else last + 1]
    try:
        got = asked_range(header, size)
    except RangeNotSatisfiable:
        assert expected == b""
        return
    if expected is None:
        assert got is None
    else:
        assert isinstance(got, Range)
        assert content[got.start : got.end] == expected != b""


@pytest.mark.parametrize("header", ["", "bytes=1-2,4-5", "items=1-2", "bytes=a-b", "bytes=-"])
def test_what_is_no_single_range_of_bytes_is_the_whole_file(header):
    assert asked_range(header, 10) is None


@pytest.fixture
def with_file(settings, where, arithmetic, job_spec):
    """`with_file(links=…)`: a service on the store, with a job that has a file."""
    opened = []

    def go(*, links=True):
        chosen = settings.model_copy(update={"storage": where, "storage_links": links})
        client = TestClient(create_app(chosen), headers=bearer("operator"))
        client.__enter__()
        opened.append(client)
        suite = client.post(
            "/suites", params={"name": "arithmetic"}, content=arithmetic.to_archive()
        )
        assert suite.status_code == 201, suite.text
        job = client.post("/jobs", json=job_spec).json()["id"]
        content = os.urandom(3 << 20)
        sha256 = open_storage(where, links=False).put_bytes(content)
        with psycopg.connect(settings.database_url) as connection:
            connection.execute("UPDATE jobs SET status = 'succeeded', finished_at = now()")
            connection.execute(
                "INSERT INTO artifacts (id, job_id, kind, name, size, sha256) "
                "VALUES ('artifact_1', %s, 'gguf', 'model.gguf', %s, %s)",
                (job, len(content), sha256),
            )
        return client, f"/jobs/{job}/artifacts/model.gguf", content

    yield go
    for client in opened:
        client.__exit__(None, None, None)


def test_downloads_through_the_api_are_ranged_tagged_and_named(with_file):
    api, url, content = with_file(links=False)
    whole = api.get(url)
    assert whole.content == content
    assert whole.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'
    assert whole.headers["content-disposition"] == 'attachment; filename="model.gguf"'
    part = api.get(url, headers={"Range": "bytes=100-299"})
    assert (part.status_code, part.content) == (206, content[100:300])
    assert part.headers["content-range"] == f"bytes 100-299/{len(content)}"
    tail = api.get(url, headers={"Range": "bytes=-7"})
    assert (tail.status_code, tail.content) == (206, content[-7:])
    beyond = api.get(url, headers={"Range": f"bytes={len(content)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(content)}")
    same = {"Range": "bytes=0-0", "If-Range": whole.headers["etag"]}
    assert api.get(url, headers=same).status_code == 206
    other = {"Range": "bytes=0-0", "If-Range": '"other"'}
    assert api.get(url, headers=other).content == content
    assert api.get(url, headers={"If-None-Match": whole.headers["etag"]}).status_code == 304


def test_downloads_from_a_bucket_go_past_the_api(bucket, settings, with_file, where):
    if not where.startswith("s3://"):
        pytest.skip("a directory has no links")
    api, url, content = with_file()
    answer = api.get(url, follow_redirects=False)
    assert answer.status_code == 307
    link = answer.headers["location"]
    assert "X-Amz-Expires=900" in link
    direct = httpx2.get(link, headers={"Range": "bytes=5-9"})  # without any key
    assert (direct.status_code, direct.content) == (206, content[5:10])
    assert "attachment" in direct.headers["content-disposition"]


def test_a_store_that_is_away_is_a_503_and_stores_nothing(
    settings, bucket, arithmetic, monkeypatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    away = settings.model_copy(update={"storage": f"s3://{bucket}"})
    with TestClient(create_app(away), headers=bearer("operator")) as api:
        answer = api.post("/suites", params={"name": "x"}, content=arithmetic.to_archive())
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        assert api.get("/suites").json()["items"] == []
        assert api.get("/readyz").status_code == 503
        assert api.get("/healthz").status_code == 200


@pytest.fixture
def files(database_url, tmp_path):
    """Steps on the store and its notes, each in its own transaction."""
    sessions = create_sessions(
        create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"), pooled=False)
    )
    return Files(sessions, open_storage(str(tmp_path / "store"), links=False), database_url)


class Files:
    def __init__(self, sessions, storage, database_url):
        self.sessions, self.storage, self._database_url = sessions, storage, database_url

    async def do(self, step, shas):
        async with unit_of_work(self.sessions) as session:
            await step(session, shas)

    async def sweep(self):
        return await blobs.sweep(self.sessions, self.storage)

    def has(self, sha256):
        return self.storage.path(sha256).is_file()

    def age(self):
        """The grace of everything noted so far is over."""
        with psycopg.connect(self._database_url) as connection:
            connection.execute("UPDATE orphan_blobs SET due = now() - interval '1 second'")

    def point_to(self, sha256):
        with psycopg.connect(self._database_url) as connection:
            connection.execute(
                "INSERT INTO suites (id, team, name, version, content_hash, storage_key, "
                "case_count, size, tools, environments, measures, reward_functions, "
                "rollout_funcs) VALUES ('s', 'default', 's', 1, 'h', %s, 1, 1, '[]', '[]', '[]', "
                "'[]', '[]')",
                (sha256,),
            )


def test_what_was_stored_and_never_registered_goes_after_its_grace(files):
    sha256 = hashlib.sha256(b"orphan").hexdigest()

    async def go():
        await blobs.store_bytes(files.sessions, files.storage, b"orphan")
        await files.sweep()
        assert files.has(sha256)
        files.age()
        await files.sweep()
        assert not files.has(sha256)

    asyncio.run(go())


def test_what_is_let_go_goes_unless_something_points_to_it(files):
    async def go():
        free, used = files.storage.put_bytes(b"free"), files.storage.put_bytes(b"used")
        files.point_to(used)
        await files.do(blobs.mark_unreferenced, [free, used])
        assert await files.sweep() == 2
        assert (files.has(free), files.has(used)) == (False, True)
        assert await files.sweep() == 0

    asyncio.run(go())


def test_who_is_about_to_store_the_same_keeps_it(files):
    """A job is deleted while another one makes an equal file, in either order."""

    async def go():
        sha256 = files.storage.put_bytes(b"same")
        await files.do(blobs.mark_unreferenced, [sha256])
        await files.do(blobs.reserve, [sha256])
        await files.sweep()
        assert files.has(sha256)
        await files.do(blobs.mark_unreferenced, [sha256])
        await files.sweep()
        assert files.has(sha256)

    asyncio.run(go())


def test_a_file_that_is_just_being_removed_is_stored_again(files):
    """Who announces it waits for the sweep to end, and then finds it gone."""

    async def go():
        sha256 = files.storage.put_bytes(b"same")
        await files.do(blobs.mark_unreferenced, [sha256])
        removing, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        remove = files.storage.remove

        def slow(key):
            loop.call_soon_threadsafe(removing.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            remove(key)

        files.storage.remove = slow
        sweep = asyncio.create_task(files.sweep())
        await removing.wait()
        storing = asyncio.create_task(blobs.store_bytes(files.sessions, files.storage, b"same"))
        await asyncio.sleep(0.3)
        assert not storing.done()
        go_on.set()
        await asyncio.gather(sweep, storing)
        assert files.has(sha256)

    asyncio.run(go())


def test_a_sweep_that_cannot_reach_the_store_forgets_nothing(files):
    def away(key):
        raise StorageUnavailable("away")

    async def go():
        sha256 = files.storage.put_bytes(b"x")
        await files.do(blobs.mark_unreferenced, [sha256])
        files.storage.remove, right = away, files.storage.remove
        with pytest.raises(StorageUnavailable):
            await files.sweep()
        files.storage.remove = right
        assert await files.sweep() == 1
        assert not files.has(sha256)

    asyncio.run(go())


def test_a_suite_is_deleted_when_no_job_uses_it_and_its_number_is_not_given_again(
    api, suite, job_spec, arithmetic
):
    job = api.post("/jobs", json=job_spec).json()["id"]
    refused = api.delete("/suites/arithmetic@1")
    assert (refused.status_code, refused.json()["code"]) == (409, "suite_in_use")
    assert "1 jobs use arithmetic@1" in refused.json()["detail"]
    api.post(f"/jobs/{job}/cancel")
    api.delete(f"/jobs/{job}")
    assert api.delete("/suites/arithmetic@1").status_code == 204
    assert api.get("/suites/arithmetic").status_code == 404
    again = api.post("/suites", params={"name": "arithmetic"}, content=arithmetic.to_archive())
    assert (again.status_code, again.json()["version"]) == (201, 2)


def test_a_suite_of_another_team_cannot_be_deleted(api, suite, settings):
    api.put("/teams/other", json={})
    key = api.post("/keys", json={"team": "other"}).json()["secret"]
    answer = api.delete(f"/suites/{suite['id']}", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 404
    assert api.get(f"/suites/{suite['id']}").status_code == 200


def test_a_relative_store_is_refused_at_start(settings):
    with pytest.raises(ValueError, match="absolute path or s3://"):
        settings.__class__(**{**settings.model_dump(), "storage": "artifacts"})
