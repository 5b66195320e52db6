"""What client users install."""

import subprocess
import sys
import zipfile

from tests.conftest import ROOT


def test_the_wheel_holds_the_client_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path / "wheel"], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
        assert "dressage/py.typed" in archive.namelist()
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"dressage"}


# In a copy: a build leaves folders beside the sources.
BUILD = """
import os, shutil, sys, tempfile
from setuptools import build_meta
with tempfile.TemporaryDirectory() as copy:
    for name in ("dressage", "app", "worker"):
        shutil.copytree(name, f"{copy}/{name}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(name, copy)
    os.chdir(copy)
    os.mkdir(sys.argv[1])
    build_meta.build_wheel(sys.argv[1])
"""
