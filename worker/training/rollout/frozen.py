"""Chat templates without anything that their caller could change: served as they were trained.

A server sets variables that the trainer left alone: llama.cpp a date and `enable_thinking`, Ollama
what its client says of `think`. What stands at the top of the template itself wins over all.
"""

import contextlib
import datetime
import re
from collections.abc import Callable

from jinja2 import TemplateError

from dressage.spec.chat import Message

DATE_FORMAT = "%d %b %Y"
MARK = "{#- as trained -#}"
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
OWN_DATE = re.compile(r"set\s+date_string\s*=\s*(['\"])(.*?)\1")
PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "question"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question"}],
)


def frozen_template(
    template: str,
    render: Callable[[str, list[Message]], str],
    *,
    thinking: bool | None,
    date: datetime.date | None,
    has_first_token: bool = True,
) -> str:
    """The template with the variables that it is trained with.

    Args:
        template: The text of a chat template.
        render: A template and a conversation in, what the template makes of it out.
        thinking: The job's `enable_thinking`; None: the template's own default.
        date: What templates take for today; None: the day on which this is called.
        has_first_token: Whether the tokenizer has a `bos_token`; a file always names one.
    """
    if template.startswith(MARK):
        return template
    today = date or datetime.datetime.now(datetime.UTC).date()
    fixed = NOW.sub(lambda found: repr(today.strftime(found[2])), template)
    settings = []
    if "bos_token" in template and not has_first_token:
        settings.append(("bos_token", "''"))
    if "date_string" in template:
        own = OWN_DATE.search(fixed)
        settings.append(("date_string", repr(own[2] if own else today.strftime(DATE_FORMAT))))
    if "enable_thinking" in template:
        found = thinking if thinking is not None else _default_thinking(fixed, render)
        if found is not None:
            settings.append(("enable_thinking", str(found).lower()))
    if fixed == template and not settings:
        return template
    return MARK + "".join(f"{{%- set {name} = {value} -%}}" for name, value in settings) + fixed


def _default_thinking(template: str, render: Callable[[str, list[Message]], str]) -> bool | None:
    """The value that makes what the template makes without one."""
    for value in (False, True):
        given = f"{{%- set enable_thinking = {str(value).lower()} -%}}{template}"
        same = []
        for turns in PROBES:
            with contextlib.suppress(TemplateError, TypeError):  # it takes no system message
                same.append(render(given, turns) == render(template, turns))
        if same and all(same):
            return value
    return None
