"""Chat templates of models: programs that somebody else has written, run like user code."""

import json
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(template: str, conversations: list[dict[str, Any]]) -> list[str]:
    """Texts of conversations, each with `messages` and `add_generation_prompt`.

    Raises:
        TemplateError: The template is none, or refuses one of them.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _: "today"
    compiled = environment.from_string(template)
    return [compiled.render(**each, bos_token="", eos_token="") for each in conversations]


def _refuse(message: str) -> Any:
    raise TemplateError(message)
