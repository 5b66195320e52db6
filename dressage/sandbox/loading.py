"""Import a suite's code and find its tools and measures. Only ever run inside the sandbox."""

import importlib
import sys
import traceback
from pathlib import Path

from dressage.authoring.errors import AuthoringError
from dressage.authoring.measure import Measure
from dressage.authoring.tool import FunctionTool


class CodeError(AuthoringError):
    """The suite's code cannot be used; the message names file and line."""


def load_code(folder: Path) -> tuple[dict[str, FunctionTool], dict[str, Measure]]:
    """Import every top-level module of the folder.

    Raises:
        CodeError: A module does not import, or two tools or measures share a name.
    """
    sys.path.insert(0, str(folder))
    tools: dict[str, FunctionTool] = {}
    measures: dict[str, Measure] = {}
    for file in sorted(folder.glob("*.py")):
        try:
            module = importlib.import_module(file.stem)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a foreign module may raise anything
            raise CodeError(_where(error, folder, file)) from None
        for found in vars(module).values():
            if isinstance(found, FunctionTool) and tools.setdefault(found.name, found) != found:
                raise CodeError(f"{file.name}: a second tool named {found.name!r}")
            if isinstance(found, Measure) and measures.setdefault(found.name, found) != found:
                raise CodeError(f"{file.name}: a second measure named {found.name!r}")
    return tools, measures


def _where(error: BaseException, folder: Path, file: Path) -> str:
    if isinstance(error, SyntaxError):
        name = Path(error.filename).name if error.filename else file.name
        return f"{name} line {error.lineno}: SyntaxError: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder)
    ]
    place = f"{Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else file.name
    kind = "" if isinstance(error, AuthoringError) else f"{type(error).__name__}: "
    return f"{place}: {kind}{error}"
