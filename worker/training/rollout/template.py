"""Messages to token ids and back, with the role of every token decided from how it was made."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from dressage.spec.event import TokenRole
from dressage.spec.status import Reason
from worker.training.failures import RunFailure

SENTINEL = "body{}of{}"


@dataclass(frozen=True)
class Suffix:
    """What comes between two assistant turns: `ids` and one role a token."""

    ids: list[int]
    roles: list[TokenRole]
    escaped: int


class ConversationTemplate:
    """A tokenizer with its chat template and the tools it shows.

    Raises:
        RunFailure: The template cannot render tools, or its tool calls cannot be parsed.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        self.tools = [{"type": "function", "function": tool} for tool in tools]
        self.tool_names = {tool["name"] for tool in tools}
        self.tokenizer = tokenizer
        self._template: str | None = None
        self._pieces: dict[tuple[str, ...], list[str]] = {}
        if tokenizer.chat_template is None:
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED, "the model's tokenizer has no chat template; add one"
            )
        if self.tools:
            self._require_tools()
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        longest_first = sorted((t for t in added if len(t) > 1), key=len, reverse=True)
        self._markup = re.compile(
            f"(?=({'|'.join(map(re.escape, longest_first))}))" if longest_first else r"(?!)"
        )

    def _require_tools(self) -> None:
        if not supports_tool_calling(self.tokenizer):
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED,
                "the model's chat template cannot render tools, but the agent has some; choose a "
                "model with a tool template, or train without tools",
            )
        if not getattr(self.tokenizer, "response_template", None):
            try:
                self.tokenizer = add_response_schema(self.tokenizer)
            except ValueError:
                raise RunFailure(
                    Reason.MODEL_UNSUPPORTED,
                    "the tool calls of this model's chat template cannot be parsed: it is none of "
                    "the templates TRL knows",
                ) from None
        if not is_chat_template_prefix_preserving(self.tokenizer):
            self._template = get_training_chat_template(self.tokenizer)

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids up to and including the header of the assistant's turn."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools or None,
            chat_template=self._template,
            add_generation_prompt=True,
            return_dict=False,
        )
        return ids

    def parse(self, ids: list[int], prefix: list[int]) -> dict[str, Any]:
        """The assistant message the model wrote. A broken tool call comes back as text."""
        if self.tools:
            message: dict[str, Any] = parse_response(
                self.tokenizer, ids, prefix=prefix, tools=self.tools
            )
            return message
        return {
            "role": "assistant",
            "content": self.tokenizer.decode(ids, skip_special_tokens=True),
        }

    def tool_suffix(self, messages: list[dict[str, Any]]) -> Suffix:
        """Token ids that bring tool results to the model.

        Their bodies are observation, the markup around them is scaffold. Bodies are located by
        rendering, never by searching their text, and markup spelled inside a body is broken up, so
        that a tool cannot forge a turn.
        """
        pieces = self._around(tuple(message["name"] for message in messages))
        text = self._rendered(messages)
        if len(messages) == 1:
            bodies = [_between(text, *pieces)]
        else:
            bodies = [self._body(message) for message in messages]
        if text != pieces[0] + "".join(b + p for b, p in zip(bodies, pieces[1:], strict=True)):
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED,
                "the chat template renders tool results differently depending on their text",
            )
        spans, at = [], 0
        for piece, body in zip(pieces, [*bodies, ""], strict=True):
            at += len(piece)
            spans.append((at, at + len(body)))
            at += len(body)
        escaped = sum(len(self._markup.findall(body)) for body in bodies)
        if escaped:
            return self._in_pieces(pieces, bodies, escaped)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        roles = [
            TokenRole.OBSERVATION
            if any(start <= begin and end <= stop for start, stop in spans if stop > start)
            else TokenRole.SCAFFOLD
            for begin, end in encoded["offset_mapping"]
        ]
        return Suffix(encoded["input_ids"], roles, 0)

    def _in_pieces(self, pieces: list[str], bodies: list[str], escaped: int) -> Suffix:
        ids: list[int] = []
        roles: list[TokenRole] = []
        for piece, body in zip(pieces, [*bodies, ""], strict=True):
            cuts = [0, *(match.start() + 1 for match in self._markup.finditer(body)), len(body)]
            parts = [(piece, TokenRole.SCAFFOLD)]
            parts += [(body[a:b], TokenRole.OBSERVATION) for a, b in pairwise(cuts) if b > a]
            for text, role in parts:
                made = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += made
                roles += [role] * len(made)
        return Suffix(ids, roles, escaped)

    def _around(self, names: tuple[str, ...]) -> list[str]:
        """The markup before, between and after the bodies of these tools' results."""
        if names not in self._pieces:
            marks = [SENTINEL.format(i, len(names)) for i in range(len(names))]
            rest = self._rendered(
                [
                    {"role": "tool", "name": name, "content": mark}
                    for name, mark in zip(names, marks, strict=True)
                ]
            )
            pieces = []
            for mark in marks:
                before, found, rest = rest.partition(mark)
                if not found:
                    raise RunFailure(
                        Reason.MODEL_UNSUPPORTED, "the chat template does not show tool results"
                    )
                pieces.append(before)
            self._pieces[names] = [*pieces, rest]
        return self._pieces[names]

    def _body(self, message: dict[str, Any]) -> str:
        """A tool result as this template writes it: plain, trimmed, or as a JSON string."""
        return _between(self._rendered([message]), *self._around((message["name"],)))

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        """What the template writes after the end token of the assistant's turn."""
        call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        options = {"tokenize": False, "chat_template": self._template}
        try:
            before = self.tokenizer.apply_chat_template(turns, **options)
            whole: str = self.tokenizer.apply_chat_template(
                turns + messages, add_generation_prompt=True, **options
            )
        except TemplateError as error:
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED, f"the chat template refuses tool results: {error}"
            ) from None
        # Templates that write a newline after the end token have it in the suffix.
        end = before.rfind(self.tokenizer.eos_token)
        if end >= 0:
            before = before[: end + len(self.tokenizer.eos_token)]
        if not whole.startswith(before):
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED,
                "the chat template rewrites earlier turns when a tool result follows",
            )
        return whole[len(before) :]


def _between(text: str, before: str, after: str) -> str:
    return text[len(before) : len(text) - len(after)]
