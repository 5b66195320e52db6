import contextlib
import io
import json
import tarfile
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.archive import ArchiveError, UnpackLimits, read_archive, unpack_tar
from dressage.authoring import FieldMapping, Suite, SuiteError


def upload(text, **options):
    return Suite.from_upload(
        io.BytesIO(text if isinstance(text, bytes) else text.encode()), **options
    )


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    buffer.seek(0)
    return buffer


def lines(count):
    return [json.dumps({"input": f"question {n}", "expect": {"answer": n}}) for n in range(count)]


def test_every_broken_line_is_reported_with_its_number():
    rows = lines(9)
    rows[6] = '{"input": "cut off'
    rows[8] = '{"input": "x", "colour": 1}'
    with pytest.raises(SuiteError) as caught:
        upload("\n".join(rows))
    problems = caught.value.problems
    assert [problem.line for problem in problems] == [7, 9]
    assert problems[0].message == "broken JSON: Unterminated string starting at (column 11)"
    assert "unknown field colour" in problems[1].message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no cases"),
        ("[]", "no cases"),
        ('{"input": ""}', "input is empty"),
        ('{"expect": {}}', "input: Field required"),
        ('{"input": [{"role": "assistant", "content": "x"}]}', "must end with a user message"),
        ('"text"', "a case is an object, not str"),
        ('{"input": "x"}\n{"input": "x"}', "the case of line 1 again"),
        ('{"input": "a\\u0000b"}', "NUL"),
        (b'{"input": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"input": "x", "expect": {"answer": NaN}}', "NaN is not JSON"),
        ('{"input": "x", "expect": {"answer": 1e999}}', "1e999 is too large a number"),
    ],
)
def test_what_is_no_case_is_refused(text, sentence):
    with pytest.raises(SuiteError, match=sentence):
        upload(text)


def test_the_same_content_in_every_format_is_the_same_suite():
    rows = lines(3)
    as_lines = upload("\n".join(rows))
    as_array = upload("[" + ",".join(rows) + "]")
    as_zip = Suite.from_upload(zipped({"folder/cases.jsonl": "\n".join(rows)}))
    hashes = {suite.content_hash for suite in (as_lines, as_array, as_zip)}
    assert len(hashes) == 1
    assert Suite.from_upload(io.BytesIO(as_lines.to_archive())) == as_lines


def test_code_is_part_of_the_content():
    plain = {"cases.jsonl": lines(1)[0]}
    one = Suite.from_upload(zipped({**plain, "tools.py": "a = 1"}))
    other = Suite.from_upload(zipped({**plain, "tools.py": "a = 2"}))
    assert one.code == {"tools.py": b"a = 1"}
    assert one.content_hash != other.content_hash


def test_foreign_columns_are_mapped():
    mapping = FieldMapping("question", ("answer",))
    suite = upload("question,answer,source\nWhat?,42,book\n", csv_text=True, mapping=mapping)
    case = suite.cases[0]
    assert (case.input, case.expect, case.metadata) == (
        "What?",
        {"answer": "42"},
        {"source": "book"},
    )
    with pytest.raises(SuiteError, match="line 2: there is no field 'question'"):
        upload("q,answer\nWhat?,42\n", csv_text=True, mapping=mapping)


@pytest.mark.parametrize("name", ["../evil.py", "/etc/passwd", "a/../../b", "..\\evil.py", "C:/x"])
def test_an_archive_cannot_leave_its_folder(name):
    with pytest.raises(SuiteError, match="would leave"):
        Suite.from_upload(zipped({"cases.jsonl": lines(1)[0], name: "x"}))


def test_links_are_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        link = zipfile.ZipInfo("tools.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    buffer.seek(0)
    with pytest.raises(SuiteError, match=r"'tools\.py' is a link"):
        Suite.from_upload(buffer)

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("tools.py")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    buffer.seek(0)
    with pytest.raises(SuiteError, match=r"'tools\.py' is a link"):
        Suite.from_upload(buffer)


def test_a_bomb_is_stopped_while_it_unpacks():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cases.jsonl", b"0" * 10_000_000)
    with pytest.raises(ArchiveError, match="more than 1000000 bytes"):
        read_archive(buffer, UnpackLimits(total_bytes=1_000_000))
    many = zipped({f"{n}.py": "" for n in range(11)})
    with pytest.raises(ArchiveError, match="more than 10 files"):
        read_archive(many, UnpackLimits(files=10))


@given(st.binary(max_size=400))
def test_no_upload_breaks_the_parser(data):
    for head in (b"", b"PK\x03\x04", b"\x1f\x8b"):
        with contextlib.suppress(SuiteError):  # the one way to refuse
            upload(head + data)


@given(
    st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1
        ).filter(str.strip),
        min_size=1,
        max_size=5,
        unique=True,
    )
)
def test_cases_survive_storage(texts):
    suite = Suite.from_records([{"input": text} for text in texts])
    assert [c.input for c in Suite.from_upload(io.BytesIO(suite.to_archive())).cases] == texts


def test_a_tar_is_unpacked_below_its_folder_alone(tmp_path):
    good, bad = tmp_path / "good.tar", tmp_path / "bad.tar"
    for path, name in ((good, "adapter/weights"), (bad, "../outside")):
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    unpack_tar(good, tmp_path / "out")
    assert (tmp_path / "out" / "adapter" / "weights").read_bytes() == b"abc"
    with pytest.raises(ArchiveError, match="would leave"):
        unpack_tar(bad, tmp_path / "out")
    assert not (tmp_path / "outside").exists()


def parquet(rows):
    import pyarrow
    from pyarrow.parquet import write_table

    buffer = io.BytesIO()
    write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def test_parquet_is_read_alone_and_in_archives():
    rows = [
        {"input": "2 + 2?", "expect": {"answer": "4"}, "metadata": {"level": 1}},
        {"input": "3 + 3?", "expect": {"answer": "6"}, "metadata": None},
    ]
    suite = upload(parquet(rows))
    assert [case.expect for case in suite.cases] == [{"answer": "4"}, {"answer": "6"}]
    assert [case.metadata for case in suite.cases] == [{"level": 1}, {}]
    packed = Suite.from_upload(zipped({"cases.parquet": parquet(rows)}))
    assert packed.content_hash == suite.content_hash


def test_foreign_parquet_is_mapped_and_bad_rows_are_numbered():
    rows = [{"question": "a?", "answer": 1}, {"question": None, "answer": 2}]
    with pytest.raises(SuiteError) as caught:
        upload(parquet(rows), mapping=FieldMapping("question", ("answer",)))
    assert caught.value.problems[0].line == 2
    with pytest.raises(SuiteError, match="broken Parquet"):
        upload(b"PAR1 and then nothing")


def test_a_model_in_a_suites_folder_is_named_before_it_is_read(tmp_path):
    (tmp_path / "cases.jsonl").write_text('{"input": "x"}\n')
    assert len(Suite.from_path(tmp_path).cases) == 1
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(300 * 1024 * 1024)
    with pytest.raises(SuiteError, match="keep it elsewhere") as caught:
        Suite.from_path(tmp_path)
    (problem,) = caught.value.problems
    assert problem.file == "model/model.safetensors"
    assert "315 MB" in problem.message


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("input,answer\nWhat?\n", 2, "1 fields for 2 columns (input, answer)"),
        ("input,answer\nWhat?,4,5\n", 2, "3 fields for 2 columns"),
        ("input,input\na,b\n", 1, "columns named twice: input"),
        ("input;answer\na;b\n", 2, "there are: input;answer"),
    ],
)
def test_a_table_that_is_none_is_refused_with_line_and_columns(text, line, said):
    with pytest.raises(SuiteError) as refused:
        upload(text, csv_text=True, mapping=FieldMapping("input", ("answer",)))
    (problem,) = refused.value.problems
    assert (problem.line, said in problem.message) == (line, True), problem


@pytest.mark.parametrize(
    "where", ['{"input": "q", "input": "r"}', '{"input": "q", "expect": {"a": 1, "a": 2}}']
)
def test_a_key_twice_is_refused_with_its_line(where):
    for text in ('{"input": "p"}\n' + where, f"[{where}]"):
        with pytest.raises(SuiteError, match="is there twice"):
            upload(text)


def parquet_of(**columns):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def test_parquet_keeps_nulls_and_refuses_bytes_by_name():
    mapping = FieldMapping("question", ("answer",))
    data = parquet_of(question=["a", "b"], answer=[None, "x"], note=[None, None])
    first, second = Suite.from_upload(io.BytesIO(data), mapping=mapping).cases
    assert (first.expect, first.metadata) == ({"answer": None}, {"note": None})
    assert second.expect == {"answer": "x"}
    image = parquet_of(question=["a"], picture=[b"\x89PNG"], answer=["x"])
    with pytest.raises(SuiteError, match=r"columns of bytes, which no model reads: picture \("):
        Suite.from_upload(io.BytesIO(image), mapping=mapping)


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "2?"}]},
]


def test_chats_are_taken_as_the_wire_has_them_and_nothing_is_added():
    (case,) = Suite.from_records([{"input": CHAT}]).cases
    assert case.conversation("Add.") == [
        {"role": "system", "content": "Add."},
        CHAT[0],
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}},
                }
            ],
        },
        CHAT[2],
        CHAT[3],
        {"role": "user", "content": "And 2?"},
    ]
    again = Suite.from_records([json.loads(case.model_dump_json())]).cases
    assert again == (case,)


@pytest.mark.parametrize(
    ("turns", "sentence"),
    [
        ([], "must end with a user message"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "must end with",
        ),
        ([{"role": "user", "content": 7}], "input.0.content: Input should be a valid string"),
        ([{"role": "robot", "content": "x"}], "input.0.role: Input should be 'system', 'user'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "input.0.content: a part of type 'image_url': only text can be trained on",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "a user turn has tool_calls"),
        ([{"role": "tool", "content": "2"}], "comes after the call of a tool"),
        (
            [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}, CHAT[0]],
            "turn 1: a system message stands at the beginning",
        ),
        (
            [
                CHAT[0],
                {**CHAT[1], "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]},
                CHAT[2],
            ],
            "arguments: the text is not JSON",
        ),
    ],
)
def test_what_is_wrong_with_a_chat_is_said_of_the_field(turns, sentence):
    with pytest.raises(SuiteError) as caught:
        Suite.from_records([{"input": turns}])
    assert sentence in str(caught.value)


def test_csv_may_have_long_fields_and_other_text_says_how_it_is_read():
    long = "x" * 200_000
    data = f"id,input\n1,{long}\n".encode()
    (case,) = Suite.from_upload(io.BytesIO(data), csv_text=True).cases
    assert len(case.input) == 200_000
    with pytest.raises(SuiteError, match="for CSV say Content-Type: text/csv"):
        Suite.from_upload(io.BytesIO(b"id,input\n1,hello\n"))
