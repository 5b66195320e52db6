"""What one team or key may take of a process, so that others are served."""

import io
import threading
import time
import zipfile

import pytest

from app.jobs.dependencies import STREAMS_PER_KEY, StreamLimiter
from app.pools import TeamPool
from tests.servers import bearer

SLOW = b"""
import time
from dressage.authoring import measure, pass_reason

@measure
def slow(context):
    time.sleep(30)
    return pass_reason("late")
"""


@pytest.fixture
def slow_suite(api):
    cases = b'{"input": "q", "expect": {"answer": "x"}}\n'
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("cases.jsonl", cases)
        archive.writestr("m.py", SLOW)
    answer = api.post("/suites?name=slow", content=packed.getvalue())
    assert answer.status_code == 201
    return "slow"


def test_previews_of_one_team_leave_room_for_others(api, slow_suite):
    body = {
        "suite": slow_suite,
        "rewards": ["slow"],
        "rollouts": [{"answer": "x"}],
        "timeout": 5,
    }
    codes = []
    threads = [
        threading.Thread(
            target=lambda: codes.append(api.post("/measures/preview", json=body).status_code)
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    assert codes == [429] * 4  # two run
    upload = api.post("/suites?name=other", content=b'{"input": "q"}')
    assert upload.status_code == 201
    for thread in threads:
        thread.join()
    assert codes.count(200) == 2


def test_a_preview_ends_as_a_whole(api, slow_suite, monkeypatch):
    monkeypatch.setattr("app.measures.service.TOTAL_SECONDS", 2.0)
    body = {
        "suite": slow_suite,
        "rewards": ["slow"] * 2,
        "rollouts": [{"answer": str(n)} for n in range(40)],
        "timeout": 60,
    }
    items = api.post("/measures/preview", json=body).json()["items"]
    assert {v["error"] for item in items for v in item["verdicts"]} == {"timed_out"}
    assert items[-1]["verdicts"][-1]["reason"] == "the time for all of them is over"


def test_a_stream_ends_soon_after_its_key(api, job_spec, arithmetic):
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    job = api.post("/jobs", json=job_spec).json()["id"]
    key = api.post("/keys", json={"team": "default", "role": "viewer"}).json()

    class Cache:
        valid = 3

        async def identify(self, secret):
            assert secret == key["secret"]
            self.valid -= 1
            return True if self.valid >= 0 else None

    api.app.state.streams = StreamLimiter(Cache())
    headers = {"Authorization": f"Bearer {key['secret']}", "Accept": "text/event-stream"}

    def more():
        for _ in range(20):
            time.sleep(0.2)
            api.post(f"/jobs/{job}/pause")
            api.post(f"/jobs/{job}/resume")

    thread = threading.Thread(target=more)
    thread.start()
    with api.stream("GET", f"/jobs/{job}/events", headers=headers) as response:
        last = list(response.iter_lines())[-3:]
    thread.join()
    assert last[0] == "event: end"
    assert "not valid any longer" in last[1]


def test_a_key_has_so_many_streams(api, job_spec, arithmetic):
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    job = api.post("/jobs", json=job_spec).json()["id"]
    api.app.state.streams._open["key_operator"] = STREAMS_PER_KEY
    headers = {"Accept": "text/event-stream"}
    refused = api.get(f"/jobs/{job}/events", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
    api.post(f"/jobs/{job}/cancel")
    other = api.get(f"/jobs/{job}/events", headers={**headers, **bearer("viewer")})
    assert other.status_code == 200


def test_a_stream_shows_the_type_that_is_asked_for(api, job_spec, arithmetic):
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    job = api.post("/jobs", json=job_spec).json()["id"]
    api.post(f"/jobs/{job}/cancel")
    stream = api.get(f"/jobs/{job}/events?type=log", headers={"Accept": "text/event-stream"})
    assert "event: status" not in stream.text
    assert "event: end" in stream.text
    again = api.get(
        f"/jobs/{job}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": ""}
    )
    assert "event: status" in again.text


def test_one_team_does_not_take_the_threads_of_all():
    pool = TeamPool(2, per_team=1, what="things")
    assert pool._threads._max_workers == 2
    pool.close()
