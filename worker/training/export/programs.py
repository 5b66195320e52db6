"""Where llama.cpp's programs are."""

import os
import shutil
import sys
from pathlib import Path

from dressage.spec.status import Reason
from worker.training.failures import RunFailure


def converter_path() -> Path:
    """Where llama.cpp's converter lies: `LLAMA_CPP_PATH`, or what `scripts/setup` fetched.

    Raises:
        RunFailure: In neither place.
    """
    chosen = os.environ.get("LLAMA_CPP_PATH") or f"{sys.prefix}/share/dressage/llama.cpp"
    if not (Path(chosen) / "convert_hf_to_gguf.py").is_file():
        raise RunFailure(
            Reason.MISSING_DEPENDENCY,
            f"llama.cpp's converter is not in {chosen}; run scripts/setup, or point LLAMA_CPP_PATH "
            "at a llama.cpp source tree",
        )
    return Path(chosen)


def quantize_path() -> Path | None:
    """Where llama.cpp's `llama-quantize` is: `LLAMA_CPP_PATH`, our own environment, or the PATH."""
    given = os.environ.get("LLAMA_CPP_PATH")
    folders = [Path(given), Path(given) / "build" / "bin"] if given else []
    for folder in (*folders, Path(sys.prefix) / "bin"):
        if os.access(folder / "llama-quantize", os.X_OK):
            return folder / "llama-quantize"
    found = shutil.which("llama-quantize")
    return Path(found) if found else None
