"""What can be known about a model without loading it: is it allowed, there, and fit for tools."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.exceptions import FieldProblem
from dressage.spec.agent import AgentSpec

FIELD = "agent.model"
TOOL_NAME, TOOL_RESULT = "tool_name_7f3a", "tool_result_91bc"


@dataclass(frozen=True)
class ModelCheck:
    """The operator's rules. Hub models are looked at by the worker, before the GPU is used."""

    models_dir: Path | None
    allowed_models: list[str] | None

    def problems(self, agent: AgentSpec) -> list[FieldProblem]:
        """Everything wrong with the agent's model."""
        name = agent.model
        if not name.startswith(("/", ".", "~")):
            if name.count("/") > 1 or not name.replace("/", ""):
                return [_problem(f"{name!r} is neither `Org/Name` nor a path")]
            if self.allowed_models is not None and name not in self.allowed_models:
                return [_problem(f"the operator allows only: {', '.join(self.allowed_models)}")]
            return []
        if not name.startswith("/"):
            return [
                _problem(f"{name!r} is relative; give the absolute path of the model directory")
            ]
        path = Path(name).resolve()
        if self.models_dir and not path.is_relative_to(self.models_dir.resolve()):
            return [_problem(f"model directories lie below {self.models_dir}")]
        if not (path / "config.json").is_file():
            return [_problem(f"there is no model at {name!r} (no config.json)")]
        template = _chat_template(path)
        if template is None:
            return [_problem("the model's tokenizer has no chat template")]
        if (agent.tools or agent.environment) and not _renders_tools(template):
            return [
                _problem(
                    "the model's chat template cannot render tools, but the agent has some; choose "
                    "a model with a tool template, or an agent without tools"
                )
            ]
        return []


def _problem(message: str) -> FieldProblem:
    return FieldProblem(field=FIELD, message=message)


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    config = path / "tokenizer_config.json"
    template = json.loads(config.read_bytes()).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return template


def _renders_tools(template: str) -> bool:
    """Whether a whole tool exchange survives rendering: the call, and its result."""
    call = {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"a": "b"}}}
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": TOOL_NAME, "content": TOOL_RESULT},
    ]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _: "today"
    try:
        text = environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, bos_token="", eos_token=""
        )
    except (TemplateError, TypeError):
        return False
    return TOOL_NAME in text and TOOL_RESULT in text


def _refuse(message: str) -> Any:
    raise TemplateError(message)
