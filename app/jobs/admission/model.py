"""What can be known about a model without loading it: is it there, and fit for tools."""

import json
import struct
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.exceptions import FieldProblem
from app.jobs.admission.known_templates import PARSED, REPLACED, template_fingerprint
from dressage.sandbox.process import Failure, Outcome, Sandbox, SandboxStartError
from dressage.sandbox.templates import HERMES_CALL
from dressage.spec.agent import AgentSpec
from dressage.spec.job import JobSpec

RENDER_SECONDS = 10.0
MAX_HEADER = 64 * 1024 * 1024  # bytes
FIELD = "agent.model"
TOOL_NAME, TOOL_RESULT = "tool_name_7f3a", "tool_result_91bc"
SHOWN = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def model_problems(
    agent: AgentSpec, *, models_dir: Path | None, allowed: list[str] | None
) -> list[FieldProblem]:
    """Everything wrong with the agent's model.

    Hub models are looked at by the worker, before the GPU is used.

    Args:
        agent: The agent.
        models_dir: If set, model directories lie below it.
        allowed: If set, the only hub names that may be used.
    """
    name = agent.model
    if agent.response_template is not None and not isinstance(
        agent.response_template.get("fields"), dict
    ):
        message = "it needs `fields`: how `content` and `tool_calls` are found"
        return [FieldProblem(field="agent.response_template", message=message)]
    if not name.startswith(("/", ".", "~")):
        if name.count("/") > 1 or not name.replace("/", ""):
            return [_problem(f"{name!r} is neither `Org/Name` nor a path")]
        if allowed is not None and name not in allowed:
            return [_problem(f"the operator allows only: {', '.join(allowed)}")]
        return []
    if not name.startswith("/"):
        return [_problem(f"{name!r} is relative; give the absolute path of the model directory")]
    if allowed is not None and models_dir is None:
        return [_problem(f"the operator allows only: {', '.join(allowed)}")]
    path = Path(name).resolve()
    if models_dir and not path.is_relative_to(models_dir.resolve()):
        return [_problem(f"model directories lie below {models_dir}")]
    if not (path / "config.json").is_file():
        return [_problem(f"there is no model at {name!r} (no config.json)")]
    try:
        template = _chat_template(path)
        has_parser = _has_response_template(path, agent)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [_problem(f"the model's tokenizer configuration cannot be read: {error}"[:500])]
    if template is None:
        return [_problem("the model's tokenizer has no chat template")]
    try:
        problem = _plain_problem(template, with_system=agent.instructions is not None)
        if not problem and (agent.tools or agent.environment):
            problem = _tool_problem(template, has_parser=has_parser)
    except SandboxStartError as error:
        problem = f"the model's chat template could not be tried: {error}; submit it again"
    return [_problem(problem)] if problem else []


def context_problems(spec: JobSpec) -> list[FieldProblem]:
    """A completion that the model has no room for, where its configuration is at hand."""
    path = Path(spec.agent.model)
    if not path.is_absolute():
        return []
    try:
        config = json.loads((path / "config.json").read_bytes())
        length = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []  # said elsewhere
    wanted = spec.training.max_completion_length
    if not isinstance(length, int) or wanted <= length:
        return []
    message = f"the model holds {length} tokens, prompt included; give less than that"
    return [FieldProblem(field="training.max_completion_length", message=message)]


def target_problems(spec: JobSpec) -> list[FieldProblem]:
    """Layers that shall get an adapter and are not in the model, where its files are at hand."""
    path, lora = Path(spec.agent.model), spec.training.lora
    if not path.is_absolute() or lora is None or isinstance(lora.target_modules, str):
        return []
    try:
        layers = {name.rpartition(".")[0] for name in _tensor_names(path)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return []  # the worker reads them, and says what is wrong
    missing = [
        target
        for target in lora.target_modules
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers)
    ]
    if not missing or not layers:
        return []
    names = {layer.rpartition(".")[2] for layer in layers}
    have = ", ".join(sorted(n for n in names if n and "norm" not in n and "embed" not in n))
    message = f"the model has no layer {', '.join(missing)}; it has {have}"
    return [FieldProblem(field="training.lora.target_modules", message=message)]


def _tensor_names(path: Path) -> list[str]:
    """Of a model directory, from its index or the header of its one file."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_bytes())["weight_map"])
    with (path / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER:
            raise ValueError("no safetensors header")
        return list(json.loads(file.read(size)))


def _problem(message: str) -> FieldProblem:
    return FieldProblem(field=FIELD, message=message)


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = _tokenizer_config(path).get("chat_template")
    if isinstance(template, list):  # named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError("tokenizer_config.json is no object")
    return found


def _has_response_template(path: Path, agent: AgentSpec) -> bool:
    return bool(agent.response_template or _tokenizer_config(path).get("response_template"))


@lru_cache(maxsize=100)
def _plain_problem(template: str, *, with_system: bool) -> str | None:
    """Why nothing can be trained with this chat template, or nothing with instructions.

    Raises:
        SandboxStartError: It could not be tried now, which says nothing of the template.
    """
    user = {"role": "user", "content": "question"}
    system = {"role": "system", "content": "instructions"}
    plain = _rendered(template, [{"messages": [user], "add_generation_prompt": True}])
    if plain.failure:
        return _failed(plain)
    if not with_system:
        return None
    said = _rendered(template, [{"messages": [system, user], "add_generation_prompt": True}])
    if said.failure:
        return (
            f"the model's chat template takes no system message ({said.message}), and the agent "
            "has instructions: put them into the cases"
        )[:500]
    return None


@lru_cache(maxsize=100)  # a template is slow to compile, and few are used
def _tool_problem(template: str, *, has_parser: bool) -> str | None:
    """Why an agent with tools cannot be trained with this chat template.

    Raises:
        SandboxStartError: It could not be tried now, which says nothing of the template.
    """
    call = {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"a": "b"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "so"}
    result = {"role": "tool", "name": TOOL_NAME, "content": TOOL_RESULT}
    messages = [{"role": "user", "content": "question"}, turn, result]
    rendered = _rendered(
        template,
        [
            {"messages": messages[:1], "tools": [SHOWN], "add_generation_prompt": True},
            {"messages": messages, "add_generation_prompt": False},
            {"messages": [*messages, turn, result], "add_generation_prompt": True},
        ],
    )
    if rendered.failure:
        return _failed(rendered)
    plain, short, longer = rendered.value
    missing = (
        "tools" if TOOL_NAME not in plain else "" if TOOL_RESULT in short else "results of tools"
    )
    if missing:
        return (
            f"the model's chat template does not show {missing}, but the agent has tools; choose a "
            "model with a tool template, or an agent without tools"
        )
    fingerprint = template_fingerprint(template)
    if not has_parser and fingerprint not in PARSED and not HERMES_CALL.search(template):
        return (
            "the tool calls of the model's chat template cannot be parsed: the template is none "
            "of the known ones; give agent.response_template"
        )
    if longer.startswith(short) or fingerprint in REPLACED:
        return None
    at = next(i for i, (a, b) in enumerate(zip(short, longer + "\0", strict=False)) if a != b)
    return (
        "the model's chat template rewrites earlier turns when a conversation goes on, so what is "
        f"trained would not be what is served: {short[at : at + 40]!r} becomes "
        f"{longer[at : at + 40]!r} after {short[max(0, at - 40) : at]!r}"
    )


def _failed(outcome: Outcome) -> str:
    if outcome.failure is Failure.TIMED_OUT:
        return f"the model's chat template takes longer than {RENDER_SECONDS:g} seconds"
    return f"the model's chat template does not work: {outcome.message}"[:500]


def _rendered(template: str, conversations: list[dict[str, Any]]) -> Outcome:
    """Texts of conversations; a template may be as harmful as any program."""
    with tempfile.TemporaryDirectory(prefix="dressage-suite-") as folder:
        sandbox = Sandbox(Path(folder))
        try:
            worker = sandbox.start_worker()
            request = {"call": "render", "template": template, "conversations": conversations}
            outcome = worker.call(request, RENDER_SECONDS)
            worker.kill()
        finally:
            sandbox.close()
    return outcome
