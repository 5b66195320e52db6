"""Where llama.cpp's programs are."""

import os
import shutil
import sys
from pathlib import Path


def converter_folder() -> Path:
    """Where llama.cpp's converter should be: `LLAMA_CPP_PATH`, or what `scripts/setup` fetched."""
    return Path(os.environ.get("LLAMA_CPP_PATH") or f"{sys.prefix}/share/dressage/llama.cpp")


def quantize_path() -> Path | None:
    """Where llama.cpp's `llama-quantize` is: `LLAMA_CPP_PATH`, our own environment, or the PATH."""
    given = os.environ.get("LLAMA_CPP_PATH")
    folders = [Path(given), Path(given) / "build" / "bin"] if given else []
    for folder in (*folders, Path(sys.prefix) / "bin"):
        if os.access(folder / "llama-quantize", os.X_OK):
            return folder / "llama-quantize"
    found = shutil.which("llama-quantize")
    return Path(found) if found else None
