"""The LLM judge against a real HTTP server that answers as endpoints do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dressage.authoring.measure import AssistantMessage, MeasureContext
from dressage.measuring.judge import Judge
from dressage.sandbox.process import Failure
from dressage.spec.measure import LlmJudge


@pytest.fixture
def endpoint():
    """A server that sends the given replies in order, and keeps what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.asked.append((self.path, dict(self.headers), json.loads(body)))
            status, headers, reply = server.replies.pop(0)
            content = reply.encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": len(content)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.replies = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def says(text):
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]})


GOOD = '```json\n{"score": 0.75, "reason": "polite"}\n```'


@pytest.fixture
def judge(endpoint):
    waits = []
    spec = LlmJudge(
        type="llm_judge",
        base_url=f"http://127.0.0.1:{endpoint.server_port}/v1/",
        model="judge-1",
        rubric="Is it polite?",
        requests_per_minute=100_000,
    )
    judge = Judge(spec, api_key="k3y", sleep=waits.append)
    judge.waits = waits
    yield judge
    judge.close()


def context(answer="Yes, please."):
    return MeasureContext("Would you?", {"tone": "polite"}, final=AssistantMessage(answer))


def test_the_verdict_is_the_judges(endpoint, judge):
    endpoint.replies = [says(GOOD)]
    assert judge.verdict(context()).value == {"value": 0.75, "reason": "polite"}
    path, headers, body = endpoint.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k3y"
    assert body["model"] == "judge-1"
    shown = json.loads(body["messages"][-1]["content"])
    assert shown["rubric"] == "Is it polite?"
    assert shown["answer"] == "Yes, please."
    assert shown["expected"] == {"tone": "polite"}


def test_the_same_question_is_asked_once(endpoint, judge):
    endpoint.replies = [says(GOOD), says('{"score": 0}')]
    assert [judge.verdict(context()).value["value"] for _ in range(3)] == [0.75] * 3
    assert judge.verdict(context("No.")).value["value"] == 0
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(
    "reply",
    [
        '```json\n{"score": 0.75}\n```',
        '<think>{"score": 0}?</think>\n{"score": 0.75, "reason": "x"}',
    ],
)
def test_an_object_may_stand_in_a_fence_or_after_a_thought(endpoint, judge, reply):
    endpoint.replies = [says(reply)]
    assert judge.verdict(context()).value["value"] == 0.75


def test_an_empty_answer_scores_nothing_and_is_not_asked_about(endpoint, judge):
    assert judge.verdict(context(" \n")).value["value"] == 0
    assert endpoint.asked == []


def test_a_busy_endpoint_is_asked_again_after_the_time_it_names(endpoint, judge):
    endpoint.replies = [(429, {"Retry-After": 7}, ""), (503, {}, ""), says(GOOD)]
    assert judge.verdict(context()).value["value"] == 0.75
    assert [wait for wait in judge.waits if wait >= 1] == [7, 2]


@pytest.mark.parametrize(
    "reply",
    [
        *("very nice!", '{"score": 7}', '{"score": "high"}', '{"score": true}', "{}", "[1]"),
        '{"score": 1.0} {"score": 0.0}',
        'The answer says {"score": 1.0}.',
        '<think>{"score": 1.0}</think> I cannot say.',
        '{"score": 1.0, "score": 0.0}',
        '{"a": ' + "[" * 3000,
    ],
)
def test_a_reply_that_breaks_the_contract_is_asked_for_again_and_then_fails(endpoint, judge, reply):
    endpoint.replies = [says(reply)] * 4
    outcome = judge.verdict(context())
    assert outcome.failure is Failure.NO_JUDGEMENT
    assert len(endpoint.asked) == 4
    endpoint.replies = [says(GOOD)]
    assert judge.verdict(context()).value["value"] == 0.75


@pytest.mark.parametrize("reply", [(401, {}, "bad key"), (302, {"Location": "http://x/"}, "")])
def test_refusals_and_redirects_fail_at_once(endpoint, judge, reply):
    endpoint.replies = [reply]
    outcome = judge.verdict(context())
    assert outcome.failure is Failure.NO_JUDGEMENT
    assert f"HTTP {reply[0]}" in outcome.message
    assert len(endpoint.asked) == 1


def test_requests_are_spread_over_the_minute(endpoint):
    waits = []
    spec = LlmJudge(
        type="llm_judge",
        base_url=f"http://127.0.0.1:{endpoint.server_port}",
        model="m",
        rubric="r",
        requests_per_minute=30,
    )
    judge = Judge(spec, sleep=waits.append)
    endpoint.replies = [says(GOOD)] * 3
    for answer in ("a", "b", "c"):
        judge.verdict(context(answer))
    judge.close()
    assert [round(wait) for wait in waits] == [2, 4]
