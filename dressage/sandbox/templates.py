"""Chat templates of models: programs that somebody else has written, run like user code."""

import json
import re
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# How models of the families of Qwen2.5, Qwen3 and Hermes write a call.
HERMES_CALL = re.compile(r'<tool_call>(?:\\n|\s)*\{\\?"name')


class Generation(Extension):
    """`{% generation %}`: what trainers mark the assistant's words with; servers see its inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """The block's inside, as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, conversations: list[dict[str, Any]]) -> list[str]:
    """Texts of conversations, each with `messages` and `add_generation_prompt`.

    Raises:
        TemplateError: The template is none, or refuses one of them.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _: "today"
    compiled = environment.from_string(template)
    return [compiled.render(**each, bos_token="", eos_token="") for each in conversations]


def _refuse(message: str) -> Any:
    raise TemplateError(message)
