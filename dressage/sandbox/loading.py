"""Import a suite's code and find what is in it. Only ever run inside the sandbox."""

import asyncio
import importlib
import importlib.util
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dressage.authoring.agents_sdk import from_sdk, is_sdk_tool
from dressage.authoring.environment import environment_tools, is_environment
from dressage.authoring.errors import AuthoringError
from dressage.authoring.measure import Measure
from dressage.authoring.reward_function import RewardFunction
from dressage.authoring.rollout_func import RolloutFunction
from dressage.authoring.tool import FunctionTool, PendingTool

IMPORT_SECONDS = 45  # the host waits a little longer


class CodeError(AuthoringError):
    """The suite's code cannot be used; the message names file and line."""


@dataclass
class Code:
    """Everything a job can name, by name."""

    tools: dict[str, FunctionTool] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    reward_functions: dict[str, RewardFunction] = field(default_factory=dict)
    rollout_funcs: dict[str, RolloutFunction] = field(default_factory=dict)
    environments: dict[str, type] = field(default_factory=dict)

    def contents(self) -> dict[str, Any]:
        """What the outside may know: names and schemas."""
        return {
            "tools": [tool.schema["function"] for tool in self.tools.values()],
            "measures": sorted(self.measures),
            "reward_functions": sorted(self.reward_functions),
            "rollout_funcs": sorted(self.rollout_funcs),
            "environments": [
                {
                    "name": name,
                    "tools": [tool.schema["function"] for tool in environment_tools(kind)],
                }
                for name, kind in sorted(self.environments.items())
            ],
        }


def load_code(folder: Path) -> Code:
    """Import every top-level module of the folder.

    Raises:
        CodeError: A module does not import, or two things of one kind share a name.
    """
    sys.path.insert(0, str(folder))
    code = Code()
    for file in [*sorted(folder.glob("*.py")), *_in_packages(folder)]:
        try:
            with _limited():
                module = _import(file, folder)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a foreign module may raise anything
            raise CodeError(_where(error, folder, file)) from None
        _require_forkable(module, file)
        try:
            for found in list(vars(module).values()):
                _register(code, found, file)
        except AuthoringError as error:
            raise CodeError(str(error)) from None
    try:
        code.contents()
    except AuthoringError as error:
        raise CodeError(str(error)) from None
    return code


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt an import that does not end, where it is then."""

    def over(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"its import takes longer than {IMPORT_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, IMPORT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _require_forkable(module: ModuleType, file: Path) -> None:
    """Calls run in processes that are forked from this one: threads and open loops stay behind.

    Raises:
        CodeError: The module has started some.
    """
    started = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    loops = [n for n, v in vars(module).items() if isinstance(v, asyncio.AbstractEventLoop)]
    if started:
        raise CodeError(
            f"{file.name}: its import starts threads ({', '.join(started)}), which no call would "
            "have; start them inside of functions"
        )
    if loops:
        raise CodeError(
            f"{file.name}: {loops[0]!r} is an event loop made at import, which calls cannot share; "
            "write `async def` functions, or make it inside of them"
        )


def _in_packages(folder: Path) -> list[Path]:
    """Modules of the suite's packages: folders with an `__init__.py`, at any depth."""
    return [
        file
        for file in sorted(folder.rglob("*.py"))
        if file.parent != folder
        and all(
            (place / "__init__.py").is_file()
            for place in (file.parent, *file.parent.parents)
            if place != folder and place.is_relative_to(folder)
        )
    ]


def _import(file: Path, folder: Path) -> ModuleType:
    """The module of a file, also where Python has another one of its name."""
    if file.parent != folder:
        parts = file.relative_to(folder).with_suffix("").parts
        return importlib.import_module(".".join(p for p in parts if p != "__init__"))
    loaded = sys.modules.get(file.stem)
    taken = loaded is not None and getattr(loaded, "__file__", None) != str(file)
    if not taken and file.stem not in sys.stdlib_module_names:
        return importlib.import_module(file.stem)
    name = f"suite_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _register(code: Code, found: Any, file: Path) -> None:
    if isinstance(found, PendingTool):
        found = found.resolved()
        code.tools.setdefault(found.name, found)
        same = code.tools[found.name].function is found.function
    elif is_sdk_tool(found):
        same = code.tools.setdefault(found.name, from_sdk(found)).function is found.on_invoke_tool
    elif isinstance(found, FunctionTool):
        same = code.tools.setdefault(found.name, found) is found
    elif isinstance(found, Measure):
        same = code.measures.setdefault(found.name, found) is found
    elif isinstance(found, RolloutFunction):
        same = code.rollout_funcs.setdefault(found.name, found) is found
    elif isinstance(found, RewardFunction):
        same = code.reward_functions.setdefault(found.name, found) is found
    elif is_environment(found):
        same = code.environments.setdefault(found.__name__, found) is found
    else:
        return
    if not same:
        name = getattr(found, "name", None) or found.__name__
        raise CodeError(f"{file.name}: a second thing of its kind named {name!r}")


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
    way_out = ""
    if isinstance(error, ModuleNotFoundError):
        way_out = (
            "; a suite has what the service's own Python has: put the package's files into the "
            "suite, or ask the operator to install it there and on the workers"
        )
    return f"{place}: {kind}{error}{way_out}"
