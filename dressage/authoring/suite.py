"""A suite in memory: cases and the Python code that goes with them.

In: records, a folder, or an uploaded file (JSONL, JSON, CSV, Parquet, zip, tar). Out: the same
content in one canonical form with a hash. Nothing is imported or executed here.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from dressage.archive import ArchiveError, UnpackLimits, is_archive, read_archive
from dressage.authoring.case_files import (
    MAX_CASE_BYTES,
    FieldMapping,
    parse_cases,
    parse_records,
)
from dressage.authoring.errors import Problem, SuiteError
from dressage.spec.suite import Case

__all__ = ["FieldMapping", "Suite", "SuiteError"]

CASES_FILE = "cases.jsonl"  # of the canonical form, a case a line
CASE_FILES = ("cases.jsonl", "cases.json", "cases.csv", "cases.parquet")


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
        return cls(parse_records(records, mapping))

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
        data = upload.read(MAX_CASE_BYTES + 1)
        return cls(parse_cases(data, csv_text=csv_text, file=None, mapping=mapping))

    @classmethod
    def _from_files(cls, files: dict[str, bytes], mapping: FieldMapping | None) -> "Suite":
        found = [name for name in CASE_FILES if name in files]
        if len(found) != 1:
            have = f"both {' and '.join(found)}" if found else "none of them"
            raise SuiteError(
                [Problem(f"a suite has one of {', '.join(CASE_FILES)} at its top; this has {have}")]
            )
        name = found[0]
        cases = parse_cases(files[name], csv_text=name.endswith(".csv"), file=name, mapping=mapping)
        return cls(cases, {path: data for path, data in files.items() if path != name})

    @property
    def content_hash(self) -> str:
        """A hash that is equal for equal cases in the same order with equal code."""
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
        return {**self.code, CASES_FILE: ("\n".join(lines) + "\n").encode()}


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
