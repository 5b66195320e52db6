"""A suite in memory: cases and the Python code that goes with them.

In: records, a folder, or an uploaded file (JSONL, JSON, CSV, Parquet, zip, tar). Out: the same
content in one canonical form with a hash. Nothing is imported or executed here.
"""

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pydantic

from dressage.archive import ArchiveError, UnpackLimits, is_archive, read_archive
from dressage.authoring.errors import AuthoringError
from dressage.spec.base import JSON_NUL
from dressage.spec.suite import Case

CASE_FILES = ("cases.jsonl", "cases.json", "cases.csv", "cases.parquet")
PARQUET_MAGIC = b"PAR1"
CASE_FIELDS = ("id", "input", "expect", "metadata")
MAX_REPORTED = 100
MAX_LINE = 4 * 1024 * 1024


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a suite.

    Attributes:
        message: What, and what to do.
        file: The file inside an archive, or None.
        line: Counted from 1; for JSON arrays and records, the position of the case.
    """

    message: str
    file: str | None = None
    line: int | None = None


class SuiteError(AuthoringError):
    """A suite that cannot be stored. `problems` has every line that is wrong (the first 100)."""

    def __init__(self, problems: list[Problem]) -> None:
        self.total = len(problems)
        self.problems = problems[:MAX_REPORTED]
        first = problems[0]
        where = f"{first.file or 'line'} {first.line}: " if first.line else ""
        more = f" (and {self.total - 1} more)" if self.total > 1 else ""
        super().__init__(f"{where}{first.message}{more}")


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


@dataclass(frozen=True)
class Suite:
    """Cases in order, and files by their relative path."""

    cases: tuple[Case, ...]
    code: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls, records: Iterable[Mapping[str, Any]], *, mapping: FieldMapping | None = None
    ) -> "Suite":
        """Make a suite of plain dictionaries.

        Raises:
            SuiteError: Any record is not a case; all of them are reported.
        """
        return cls(_cases(list(enumerate(records, start=1)), mapping, file=None))

    @classmethod
    def from_path(cls, path: Path | str, *, mapping: FieldMapping | None = None) -> "Suite":
        """Read a case file, an archive, or a folder with `cases.jsonl` and Python files.

        Raises:
            SuiteError: Something in it is wrong, or there is nothing at `path`.
        """
        path = Path(path)
        if path.is_dir():
            found = {
                file.relative_to(path).as_posix(): file
                for file in sorted(path.rglob("*"))
                if file.is_file() and not _is_clutter(file.relative_to(path).as_posix())
            }
            _require_small(found)
            files = {name: file.read_bytes() for name, file in found.items()}
            return cls._from_files(files, mapping)
        if not path.is_file():
            raise SuiteError([Problem(f"there is no file or folder {str(path)!r}")])
        with path.open("rb") as upload:
            return cls.from_upload(upload, csv_text=path.suffix == ".csv", mapping=mapping)

    @classmethod
    def from_upload(
        cls,
        upload: BinaryIO,
        *,
        csv_text: bool = False,
        mapping: FieldMapping | None = None,
        limits: UnpackLimits | None = None,
    ) -> "Suite":
        """Read an uploaded file whose format is recognised by its content.

        Raises:
            SuiteError: Something in it is wrong.
        """
        if is_archive(upload):
            try:
                files = read_archive(upload, limits or UnpackLimits())
            except ArchiveError as error:
                raise SuiteError([Problem(str(error))]) from None
            files = {name: data for name, data in files.items() if not _is_clutter(name)}
            return cls._from_files(_without_common_folder(files), mapping)
        return cls(_parse_cases(upload.read(), csv_text=csv_text, file=None, mapping=mapping))

    @classmethod
    def _from_files(cls, files: dict[str, bytes], mapping: FieldMapping | None) -> "Suite":
        found = [name for name in CASE_FILES if name in files]
        if len(found) != 1:
            have = f"both {' and '.join(found)}" if found else "none of them"
            raise SuiteError(
                [Problem(f"a suite has one of {', '.join(CASE_FILES)} at its top; this has {have}")]
            )
        name = found[0]
        cases = _parse_cases(
            files[name], csv_text=name.endswith(".csv"), file=name, mapping=mapping
        )
        return cls(cases, {path: data for path, data in files.items() if path != name})

    @property
    def content_hash(self) -> str:
        """The same for the same cases in the same order with the same code."""
        digest = hashlib.sha256()
        for name, data in sorted(self._canonical_files().items()):
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()

    def to_archive(self) -> bytes:
        """The suite as one zip, in the form `from_upload` reads."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in sorted(self._canonical_files().items()):
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
        return buffer.getvalue()

    def write_code(self, folder: Path) -> None:
        """Write the code files below an existing folder."""
        for name, data in self.code.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def _canonical_files(self) -> dict[str, bytes]:
        lines = [
            json.dumps(case.model_dump(mode="json"), ensure_ascii=False, sort_keys=True)
            for case in self.cases
        ]
        return {**self.code, "cases.jsonl": ("\n".join(lines) + "\n").encode()}


def _parse_cases(
    data: bytes, *, csv_text: bool, file: str | None, mapping: FieldMapping | None
) -> tuple[Case, ...]:
    if data.startswith(PARQUET_MAGIC):
        return _cases(list(enumerate(_parquet_rows(data, file), start=1)), mapping, file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SuiteError([Problem("not UTF-8 text", file, line)]) from None
    if csv_text:
        rows = csv.DictReader(io.StringIO(text), strict=True)
        try:
            numbered = [(rows.line_num, row) for row in rows]
        except csv.Error as error:
            raise SuiteError([Problem(f"broken CSV: {error}", file, rows.line_num)]) from None
        return _cases(numbered, mapping, file)
    if text.lstrip().startswith("["):
        try:
            records = _json(text)
        except ValueError as error:
            line_number = error.lineno if isinstance(error, json.JSONDecodeError) else None
            raise SuiteError([Problem(_broken(error), file, line_number)]) from None
        return _cases(list(enumerate(records, start=1)), mapping, file)
    return _parse_jsonl(text, file, mapping)


def _parquet_rows(data: bytes, file: str | None) -> list[dict[str, Any]]:
    """Rows of a Parquet file; columns that hold nothing in a row are left out of it."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise SuiteError([Problem("reading Parquet needs the package pyarrow", file)]) from None
    try:
        plain = _json(json.dumps(read_table(io.BytesIO(data)).to_pylist(), default=str))
    except (ArrowException, OSError, ValueError) as error:
        raise SuiteError([Problem(f"broken Parquet: {error}", file)]) from None
    return [{name: value for name, value in row.items() if value is not None} for row in plain]


def _parse_jsonl(text: str, file: str | None, mapping: FieldMapping | None) -> tuple[Case, ...]:
    numbered, problems = [], []
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        if len(content) > MAX_LINE:
            problems.append(Problem(f"the line is longer than {MAX_LINE} characters", file, line))
            continue
        try:
            numbered.append((line, _json(content)))
        except ValueError as error:
            problems.append(Problem(_broken(error), file, line))
    try:
        cases = _cases(numbered, mapping, file) if numbered or not problems else ()
    except SuiteError as error:
        problems += error.problems
    if problems:
        raise SuiteError(sorted(problems, key=lambda problem: problem.line or 0))
    return cases


def _json(text: str) -> Any:
    """Strict JSON: no NaN, no depth that recursion cannot follow.

    Raises:
        ValueError: It is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _broken(error: ValueError) -> str:
    """What is wrong with a JSON text, and in which column; its line is told beside it."""
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error.msg} (column {error.colno})"
    return f"broken JSON: {error}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _cases(
    numbered: list[tuple[int, Any]], mapping: FieldMapping | None, file: str | None
) -> tuple[Case, ...]:
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
            raise ValueError(f"there is no field {error.args[0]!r}") from None
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
    given = {"id": hashlib.sha256(text.encode()).hexdigest()[:12], **record}
    try:
        return Case.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def _require_small(files: Mapping[str, Path]) -> None:
    """Notice a model or a data set in the folder before it is read and sent."""
    sizes = {name: file.stat().st_size for name, file in files.items()}
    limit = UnpackLimits().total_bytes
    if sum(sizes.values()) > limit:
        biggest = max(sizes, key=sizes.__getitem__)
        raise SuiteError(
            [
                Problem(
                    f"the folder has {sum(sizes.values()) / 1e6:.0f} MB, and a suite may have "
                    f"{limit / 1e6:.0f}; this is its biggest file: keep it elsewhere",
                    file=biggest,
                )
            ]
        )


def _is_clutter(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(
        part.startswith(".") or part in ("__pycache__", "__MACOSX") for part in parts
    ) or name.endswith((".pyc", ".pyo"))


def _without_common_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    """An archive of one folder is the same suite as an archive of its content."""
    tops = {name.split("/", 1)[0] for name in files}
    if len(tops) == 1 and all("/" in name for name in files):
        return {name.split("/", 1)[1]: data for name, data in files.items()}
    return files
