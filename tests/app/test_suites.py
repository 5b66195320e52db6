import io
import json
import zipfile

import pytest


def upload(api, content, name="mine", **params):
    return api.post("/suites", params={"name": name, **params}, content=content)


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "."), content)
    return buffer.getvalue()


CASE = '{"input": "q", "expect": {}}'


def test_tools_and_measures_are_found_in_the_code(suite, api):
    assert suite["version"] == 1
    assert suite["case_count"] == 384
    assert [tool["name"] for tool in suite["tools"]] == ["calculate"]
    assert suite["measures"] == ["correct_answer"]
    # A chat template renders keys in their order: it must be the one the trainer uses.
    assert json.dumps(suite["tools"][0]["parameters"]) == (
        '{"type": "object", "required": ["expression"], "properties": {"expression": '
        '{"type": "string", "description": "The expression."}}}'
    )
    assert api.get(f"/suites/{suite['id']}").json() == suite
    assert api.get("/suites/arithmetic@1").json() == suite
    assert api.get("/suites/arithmetic").json() == suite


def test_same_content_is_the_same_version_and_other_content_the_next(api):
    first = upload(api, CASE)
    again = upload(api, CASE)
    other = upload(api, CASE + "\n" + '{"input": "r"}')
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 201)
    assert first.json() == again.json()
    assert other.json()["version"] == 2
    assert api.get("/suites/mine").json()["version"] == 2
    assert api.get("/suites/mine@1").json()["version"] == 1


def test_cases_come_in_pages(api):
    rows = [json.dumps({"input": f"q{n}"}) for n in range(5)]
    upload(api, "\n".join(rows))
    first = api.get("/suites/mine/cases", params={"limit": 3}).json()
    second = api.get(
        "/suites/mine/cases", params={"limit": 3, "cursor": first["next_cursor"]}
    ).json()
    assert [c["input"] for c in first["items"] + second["items"]] == [f"q{n}" for n in range(5)]
    assert second["next_cursor"] is None


def test_broken_lines_are_listed_and_nothing_is_stored(api):
    rows = [CASE.replace("q", f"q{n}") for n in range(8)]
    rows[6] = "{broken"
    response = upload(api, "\n".join(rows))
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == "suite_invalid"
    assert [error["line"] for error in problem["errors"]] == [7]
    assert api.get("/suites").json()["items"] == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no cases"),
        (zipped(cases__jsonl=CASE, **{"../evil__py": "x"}), "would leave"),
        (zipped(tools__py="x = 1"), "a suite has one of cases.jsonl"),
        (
            zipped(
                cases__jsonl=CASE,
                tools__py="from dressage.authoring import function_tool\n"
                '@function_tool\ndef look(city):\n    """Look."""\n',
            ),
            "tools.py line 2: tool 'look': parameter 'city' has no type annotation",
        ),
        (zipped(cases__jsonl=CASE, tools__py="import os; os._exit(1)"), "ended its process"),
        (b"PK\x03\x04 this is no zip", "broken archive"),
    ],
)
def test_a_bad_upload_is_refused_with_a_sentence(api, content, sentence):
    response = upload(api, content)
    assert response.status_code == 422
    assert sentence in response.json()["detail"]
    assert api.get("/suites").json()["items"] == []


def test_a_declared_giant_is_refused_before_it_is_read(api):
    def never_read():
        raise AssertionError("the body was read")
        yield b""

    response = api.post(
        "/suites",
        params={"name": "big"},
        content=never_read(),
        headers={"Content-Length": str(10 * 1024**3)},
    )
    assert response.status_code == 413
    assert response.json()["code"] == "upload_too_large"


def test_an_undeclared_giant_is_cut_off(api):
    response = upload(api, (b"x" * 100_000 for _ in range(30)))
    assert response.status_code == 413


def test_foreign_columns_are_mapped(api):
    response = api.post(
        "/suites",
        params={"name": "csv", "input_field": "question", "expect_fields": "answer"},
        content="question,answer\nWhat?,42\n",
        headers={"Content-Type": "text/csv"},
    )
    assert response.status_code == 201
    case = api.get("/suites/csv/cases").json()["items"][0]
    assert (case["input"], case["expect"]) == ("What?", {"answer": "42"})


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 101])
def test_a_bad_name_is_refused(api, name):
    response = upload(api, CASE, name=name)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "name"


def test_what_is_not_there_is_not_found(api):
    for path in ("/suites/nothing", "/suites/nothing@2", "/suites/suite_x/cases"):
        assert api.get(path).status_code == 404
        assert api.get(path).json()["code"] == "not_found"


def test_a_form_is_answered_with_how_to_send_a_file(api):
    sent = api.post("/suites", params={"name": "s"}, files={"file": ("cases.jsonl", CASE.encode())})
    assert sent.status_code in (400, 422)
    assert "curl --data-binary @cases.jsonl" in sent.json()["detail"]
