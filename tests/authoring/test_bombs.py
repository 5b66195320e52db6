"""Uploads that are small outside and huge inside: refused in words, in little memory."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.bombs import long_name, parquet

MEGABYTES = 300  # above what importing everything takes; a suite may have 256 MB

READ = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from dressage.authoring.suite import Suite, SuiteError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    with open(sys.argv[1], "rb") as upload:
        Suite.from_upload(upload)
    print("taken")
except SuiteError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def many_folders():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for number in range(20_000):
            folder = tarfile.TarInfo(f"d{number}")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
    return buffer.getvalue()


def zip_bomb():
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("cases.jsonl", "w", force_zip64=True) as file,
    ):
        for _ in range(600):
            file.write(b"0" * 1024**2)
    return buffer.getvalue()


def long_case():
    return json.dumps({"input": "x" * 80 * 1024**2}).encode()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: long_name(tarfile.GNUTYPE_LONGNAME), "header in the archive is too long"),
        (lambda: long_name(tarfile.XHDTYPE), "header in the archive is too long"),
        (many_folders, "more than 2000 files and folders"),
        (zip_bomb, "bytes when unpacked"),
        (lambda: parquet(2_000_000, "q"), "2000000 cases; a suite may have 100000"),
        (lambda: parquet(50_000, "q" * 100_000), "more than 64 MB when unpacked"),
        (long_case, "the cases have more than 64 MB"),
    ],
)
def test_a_bomb_costs_little_and_is_refused_in_words(make, said, tmp_path):
    bomb = tmp_path / "bomb"
    bomb.write_bytes(make())
    done = subprocess.run(
        [sys.executable, "-c", READ, str(bomb)], capture_output=True, text=True, check=True
    )
    *words, megabytes = done.stdout.splitlines()
    assert said in " ".join(words)
    assert int(megabytes) < MEGABYTES
