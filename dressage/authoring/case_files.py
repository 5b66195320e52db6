"""Files of cases: JSONL, JSON, CSV or Parquet in; cases out, or every line that is wrong."""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from dressage import strict_json
from dressage.authoring.errors import Problem, SuiteError
from dressage.spec.base import JSON_NUL
from dressage.spec.suite import Case

PARQUET_MAGIC = b"PAR1"
CASE_FIELDS = ("id", "input", "expect", "metadata")
MAX_CASES, MAX_CASE_BYTES = 100_000, 64 * 1024 * 1024
PARQUET_ROWS = 16
INPUT_KINDS = ("text", "conversation")  # pydantic's words for which of two, not the user's
MAX_LINE = 4 * 1024 * 1024
Numbered = list[tuple[int, Any]]  # records, each with the line or position it came from


@dataclass(frozen=True)
class FieldMapping:
    """Which columns of a foreign dataset become `input` and `expect`.

    Attributes:
        input_field: The column that becomes `input`.
        expect_fields: The columns collected into the `expect` object. Other columns go to
            `metadata`.
    """

    input_field: str
    expect_fields: tuple[str, ...] = ()

    def apply(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """One foreign record in our shape.

        Raises:
            KeyError: A named column is missing.
        """
        used = {self.input_field, *self.expect_fields, "id"}
        mapped: dict[str, Any] = {
            "input": record[self.input_field],
            "expect": {name: record[name] for name in self.expect_fields},
            "metadata": {name: value for name, value in record.items() if name not in used},
        }
        if "id" in record:
            mapped["id"] = str(record["id"])
        return mapped


def parse_records(
    records: Iterable[Mapping[str, Any]], mapping: FieldMapping | None
) -> tuple[Case, ...]:
    """Cases of plain dictionaries.

    Raises:
        SuiteError: Any record is not a case; all of them are reported.
    """
    return _cases(list(enumerate(records, start=1)), mapping, file=None)


def parse_cases(
    data: bytes, *, csv_text: bool, file: str | None, mapping: FieldMapping | None
) -> tuple[Case, ...]:
    """Cases of a file whose format is recognised by its content.

    Args:
        data: The file.
        csv_text: Whether it is CSV, which content does not show.
        file: Its name inside an archive, for messages.
        mapping: For foreign columns.

    Raises:
        SuiteError: Something in it is wrong.
    """
    if len(data) > MAX_CASE_BYTES:
        size = f"the cases have more than {MAX_CASE_BYTES // 1024**2} MB"
        raise SuiteError([Problem(f"{size}; keep big inputs elsewhere", file)])
    if data.startswith(PARQUET_MAGIC):
        return _cases(list(enumerate(_parquet_rows(data, file), start=1)), mapping, file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SuiteError([Problem("not UTF-8 text", file, line)]) from None
    if csv_text:
        return _cases(_csv_rows(text, file), mapping, file)
    if text.lstrip().startswith("["):
        try:
            records = strict_json.loads(text, doubled=False)
        except ValueError as error:
            line_number = error.lineno if isinstance(error, json.JSONDecodeError) else None
            raise SuiteError([Problem(_broken(error), file, line_number)]) from None
        return _cases(list(enumerate(records, start=1)), mapping, file)
    return _parse_jsonl(text, file, mapping)


def _csv_rows(text: str, file: str | None) -> Numbered:
    """Rows of a CSV text, each with as many fields as there are columns."""
    csv.field_size_limit(MAX_LINE)
    rows = csv.reader(io.StringIO(text), strict=True)
    numbered: Numbered = []
    problems = []
    try:
        columns = next(rows, [])
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            message = f"columns named twice: {', '.join(twice)}"
            raise SuiteError([Problem(message, file, rows.line_num)])
        for row in rows:
            if not row:
                continue
            if len(row) != len(columns):
                message = f"{len(row)} fields for {len(columns)} columns ({', '.join(columns)})"
                problems.append(Problem(message, file, rows.line_num))
            numbered.append((rows.line_num, dict(zip(columns, row, strict=False))))
    except csv.Error as error:
        raise SuiteError([Problem(f"broken CSV: {error}", file, rows.line_num)]) from None
    if problems:
        raise SuiteError(problems)
    return numbered


def _parquet_rows(data: bytes, file: str | None) -> list[dict[str, Any]]:
    """Rows of a Parquet file; an id that is null is none."""
    try:
        from pyarrow import ArrowException, types
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise SuiteError([Problem("reading Parquet needs the package pyarrow", file)]) from None
    rows: list[dict[str, Any]] = []
    left = MAX_CASE_BYTES
    try:
        opened = ParquetFile(io.BytesIO(data))
        _require_few(opened.metadata.num_rows, file)
        bad = [
            f"{field.name} ({field.type})"
            for field in opened.schema_arrow
            if any(map(types.is_binary, _types(field.type)))
            or any(map(types.is_large_binary, _types(field.type)))
        ]
        if bad:
            message = f"columns of bytes, which no model reads: {', '.join(bad)}; leave them out"
            raise SuiteError([Problem(message, file)])
        # A few rows at a time: equal values take no room in the file.
        for batch in opened.iter_batches(batch_size=PARQUET_ROWS):
            left -= batch.nbytes
            text = json.dumps(batch.to_pylist(), default=str)
            left -= len(text)
            if left < 0:
                size = f"more than {MAX_CASE_BYTES // 1024**2} MB when unpacked"
                raise SuiteError([Problem(size, file)])
            rows += strict_json.loads(text)
    except (ArrowException, OSError, ValueError) as error:
        raise SuiteError([Problem(f"broken Parquet: {error}", file)]) from None
    return [{k: v for k, v in row.items() if k != "id" or v is not None} for row in rows]


def _types(kind: Any) -> list[Any]:
    """A column's type with all types inside it."""
    return [kind, *(t for at in range(kind.num_fields) for t in _types(kind.field(at).type))]


def _require_few(count: int, file: str | None) -> None:
    if count > MAX_CASES:
        raise SuiteError([Problem(f"{count} cases; a suite may have {MAX_CASES}", file)])


def _parse_jsonl(text: str, file: str | None, mapping: FieldMapping | None) -> tuple[Case, ...]:
    numbered, problems = [], []
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        if len(content) > MAX_LINE:
            problems.append(Problem(f"the line is longer than {MAX_LINE} characters", file, line))
            continue
        try:
            numbered.append((line, strict_json.loads(content, doubled=False)))
        except ValueError as error:
            if not numbered and not problems and not content.lstrip().startswith("{"):
                hint = "neither JSON lines nor a JSON array; for CSV say Content-Type: text/csv"
                raise SuiteError([Problem(hint, file, line)]) from None
            problems.append(Problem(_broken(error), file, line))
    try:
        cases = _cases(numbered, mapping, file) if numbered or not problems else ()
    except SuiteError as error:
        problems += error.problems
    if problems:
        raise SuiteError(sorted(problems, key=lambda problem: problem.line or 0))
    return cases


def _broken(error: ValueError) -> str:
    """What is wrong with a JSON text, and in which column; its line is told beside it."""
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error.msg} (column {error.colno})"
    return f"broken JSON: {error}"


def _cases(numbered: Numbered, mapping: FieldMapping | None, file: str | None) -> tuple[Case, ...]:
    _require_few(len(numbered), file)
    cases: list[Case] = []
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for line, record in numbered:
        try:
            case = _case(record, mapping)
        except ValueError as error:
            problems.append(Problem(str(error), file, line))
            continue
        if case.id in first_line:
            same = f"the case of line {first_line[case.id]} again (id {case.id!r})"
            problems.append(Problem(same, file, line))
            continue
        first_line[case.id] = line
        cases.append(case)
    if not numbered:
        problems.append(Problem("the suite has no cases", file))
    if problems:
        raise SuiteError(problems)
    return tuple(cases)


def _case(record: Any, mapping: FieldMapping | None) -> Case:
    if not isinstance(record, Mapping):
        raise ValueError(f"a case is an object, not {type(record).__name__}")
    if mapping:
        try:
            record = mapping.apply(record)
        except KeyError as error:
            found = ", ".join(map(str, record))
            raise ValueError(f"there is no field {error.args[0]!r}; there are: {found}") from None
    unknown = sorted(str(key) for key in set(record) - set(CASE_FIELDS))
    if unknown:
        raise ValueError(
            f"unknown field {', '.join(unknown)}: a case has {', '.join(CASE_FIELDS)}; map foreign "
            "datasets with input_field and expect_fields"
        )
    # Postgres and every chat template choke on NUL and lone surrogates: refuse them at the door.
    text = json.dumps(record, ensure_ascii=False, sort_keys=True, default=str)
    if JSON_NUL.search(text) or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text has a NUL character or an unpaired surrogate")
    empty = {name for name in ("expect", "metadata") if record.get(name, 0) is None}
    given = {
        "id": hashlib.sha256(text.encode()).hexdigest()[:12],
        **{name: value for name, value in record.items() if name not in empty},
    }
    try:
        return Case.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in INPUT_KINDS)
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
