"""Import a suite's code and find what is in it. Only ever run inside the sandbox."""

import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dressage.authoring.agents_sdk import from_sdk, is_sdk_tool
from dressage.authoring.environment import Environment, environment_tools
from dressage.authoring.errors import AuthoringError
from dressage.authoring.measure import Measure
from dressage.authoring.reward_function import RewardFunction
from dressage.authoring.rollout_func import RolloutFunction
from dressage.authoring.tool import FunctionTool


class CodeError(AuthoringError):
    """The suite's code cannot be used; the message names file and line."""


@dataclass
class Code:
    """Everything a job can name, by name."""

    tools: dict[str, FunctionTool] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    reward_functions: dict[str, RewardFunction] = field(default_factory=dict)
    rollout_funcs: dict[str, RolloutFunction] = field(default_factory=dict)
    environments: dict[str, type[Environment]] = field(default_factory=dict)

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
    for file in sorted(folder.glob("*.py")):
        try:
            module = _import(file)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a foreign module may raise anything
            raise CodeError(_where(error, folder, file)) from None
        for found in vars(module).values():
            _register(code, found, file)
    try:
        code.contents()
    except AuthoringError as error:
        raise CodeError(str(error)) from None
    return code


def _import(file: Path) -> ModuleType:
    """The module of a file, also where Python has another one of its name."""
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
    if is_sdk_tool(found):
        same = code.tools.setdefault(found.name, from_sdk(found)).function is found.on_invoke_tool
    elif isinstance(found, FunctionTool):
        same = code.tools.setdefault(found.name, found) is found
    elif isinstance(found, Measure):
        same = code.measures.setdefault(found.name, found) is found
    elif isinstance(found, RolloutFunction):
        same = code.rollout_funcs.setdefault(found.name, found) is found
    elif isinstance(found, RewardFunction):
        same = code.reward_functions.setdefault(found.name, found) is found
    elif isinstance(found, type) and issubclass(found, Environment) and found is not Environment:
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
    return f"{place}: {kind}{error}"
