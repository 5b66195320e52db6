"""Messages to token ids and back, with the role of every token decided from how it was made."""

import contextlib
import datetime
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    qwen3_template,
)

from dressage.sandbox.templates import HERMES_CALL
from dressage.spec.chat import Message, RequestedCall, ToolFunction, ToolSchema
from dressage.spec.event import TokenRole
from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure
from worker.training.rollout.frozen import frozen_template
from worker.training.rollout.rollout import Origin, Suffix

SENTINEL = "body{}of{}"
CALLED = "one two 7f3a"  # an argument that is found again in what a template writes
MAX_ARGUMENTS_DEPTH = 64
TOO_DEEP = f"(more than {MAX_ARGUMENTS_DEPTH} levels)"


class ConversationTemplate:
    """A tokenizer with its chat template, the tools it shows, and the tokens that end a turn.

    Its tokenizer's chat template is the one that trains: where TRL has a prefix-preserving twin of
    a template, the twin takes its place, and is what is saved with the trained model.

    Raises:
        RunFailure: The template cannot render tools, its tool calls cannot be parsed, or a longer
            conversation does not begin with the tokens of a shorter one.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolFunction],
        *,
        end_ids: frozenset[int] = frozenset(),
        response_template: dict[str, Any] | None = None,
        thinking: bool | None = None,
        date: datetime.date | None = None,
    ) -> None:
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        self.one_call_a_turn = False
        self.tools: list[ToolSchema] = [{"type": "function", "function": tool} for tool in tools]
        self.tool_names = {tool["name"] for tool in tools}
        self.tokenizer = tokenizer
        self._ends = [tokenizer.decode([i]) for i in sorted({*end_ids, tokenizer.eos_token_id})]
        self._pieces: dict[tuple[str, ...], list[str]] = {}
        if tokenizer.chat_template is None:
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED, "the model's tokenizer has no chat template; add one"
            )
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        longest_first = sorted((t for t in added if len(t) > 1), key=len, reverse=True)
        self._markup = re.compile(
            f"(?=({'|'.join(map(re.escape, longest_first))}))" if longest_first else r"(?!)"
        )
        self._thinks = "<think>" in tokenizer.chat_template
        if self.tools:
            self._require_tools(response_template)
        self.tokenizer.chat_template = frozen_template(
            _without_generation_markers(self.tokenizer.chat_template),
            self._renders,
            thinking=thinking,
            date=date,
            has_first_token=self.tokenizer.bos_token is not None,
        )
        if self.tools:
            self._require_faithful()
            self.one_call_a_turn = not self._shows_two_calls()

    @property
    def tools_json(self) -> str:
        """The tools as the model sees them, for clients of what is served."""
        return json.dumps(self.tools, ensure_ascii=False, indent=1)

    def _renders(self, template: str, messages: list[Message]) -> str:
        """What another template makes of a conversation."""
        text: str = self.tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tools=self.tools or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def _shows_two_calls(self) -> bool:
        """Whether a message may have two calls, without which no server could show it again."""
        name = min(self.tool_names)
        call: RequestedCall = {"type": "function", "function": {"name": name, "arguments": {}}}
        turns: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
        ]
        try:
            self._text(turns)
        except RunFailure:
            return False
        return True

    def _require_tools(self, response_template: dict[str, Any] | None) -> None:
        missing = self._not_shown()
        if missing:
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED,
                f"the model's chat template does not show {missing}, but the agent has tools; "
                "choose a model with a tool template, or train without tools",
            )
        if response_template:
            self.tokenizer.response_template = response_template
        elif not getattr(self.tokenizer, "response_template", None):
            try:
                self.tokenizer = add_response_schema(self.tokenizer)
            except ValueError:
                if HERMES_CALL.search(self.tokenizer.chat_template):
                    # Of Qwen2.5's family, with another system prompt for example; that calls are
                    # found again is tried below.
                    self.tokenizer.response_template = qwen3_template
                    return
                raise RunFailure(
                    Reason.MODEL_UNSUPPORTED,
                    "the tool calls of this model's chat template cannot be parsed: it is none of "
                    "the templates TRL knows; give agent.response_template",
                ) from None
        if not is_chat_template_prefix_preserving(self.tokenizer):
            with contextlib.suppress(ValueError):  # no twin: the comparison below has the last word
                twin = get_training_chat_template(self.tokenizer)
                if twin:
                    self.tokenizer.chat_template = twin

    def _not_shown(self) -> str | None:
        """Which half of a round of tools the template leaves out: tools, or results.

        What the model wrote itself need not be rendered again.
        """
        tool, answer = self.tools[0]["function"]["name"], "answer91bc"
        messages: list[Message] = [{"role": "user", "content": "question"}]
        call: RequestedCall = {"type": "function", "function": {"name": tool, "arguments": {}}}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: Message = {"role": "tool", "name": tool, "content": answer}
        if tool not in self._text(messages):
            return "tools"
        try:
            if answer not in self._text([*messages, turn, result]):
                return "the results of tools"
        except RunFailure as failure:
            return f"a call and its result ({failure.message})"
        return None

    def _require_faithful(self) -> None:
        """Play a conversation of two calls; it must be what the template renders as a whole."""
        name = min(self.tool_names)
        problems = [self._unfaithful(name, thought) for thought in (None, "so")]
        if all(problems):
            raise RunFailure(Reason.MODEL_UNSUPPORTED, problems[0] or "")

    def _unfaithful(self, name: str, thought: str | None) -> str | None:
        call: RequestedCall = {
            "type": "function",
            "function": {"name": name, "arguments": {"value": CALLED}},
        }
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        if thought:
            turn["reasoning_content"] = thought
        result: Message = {"role": "tool", "name": name, "content": "three"}
        messages: list[Message] = [{"role": "user", "content": "question"}]
        stitched = self.prompt(messages)
        for _ in range(2):
            header = self._text(messages, add_generation_prompt=True)
            written, _ = self._split([*messages, turn], [result])
            if not written.startswith(header):
                return self._difference(self._encode(header), self._encode(written))
            action = self._encode(written[len(header) :])
            if self.parse(action, stitched).get("tool_calls") != [call]:
                return (
                    "a tool call that the chat template renders is not found again by "
                    f"agent.response_template: {written[len(header) :]!r}"
                )
            stitched = stitched + action + self.tool_suffix([result]).ids
            messages += [turn, result]
            whole = self.prompt(messages)
            if whole != stitched:
                return self._difference(stitched, whole)
        return None

    def _difference(self, short: list[int], long: list[int]) -> str:
        at = next(
            (i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short)
        )
        seen, made = (self.tokenizer.decode(ids[at : at + 5]) for ids in (short, long))
        return (
            "the chat template rewrites earlier turns when a conversation goes on, so what is "
            f"trained would not be what is served: token {at} begins {seen!r} in the turn and "
            f"{made!r} in the whole conversation"
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def control_tokens_in(self, messages: list[Message]) -> bool:
        """Whether a text of a conversation spells a control token: it becomes one."""
        return any(self._markup.search(str(message.get("content") or "")) for message in messages)

    def prompt(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None
    ) -> list[int]:
        """Token ids up to and including the header of the assistant's turn.

        Args:
            messages: The conversation.
            tools: What is shown instead of the agent's own tools.
        """
        text = self.prompt_text(messages, tools=tools)
        return self._encode(text)

    def prompt_text(self, messages: list[Message], *, tools: list[ToolSchema] | None = None) -> str:
        """The same as text.

        Raises:
            RunFailure: The template refuses the conversation.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or self.tools or None,
                add_generation_prompt=True,
                tokenize=False,
                **self._options,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED,
                f"the model's chat template refuses a conversation ({roles}): {error}",
            ) from None
        return text

    def parse(self, ids: list[int], prefix: list[int]) -> Message:
        """The assistant message the model wrote. A broken tool call comes back as text."""
        if self.tools:
            try:
                message: Message = parse_response(
                    self.tokenizer, ids, prefix=prefix, tools=self.tools
                )
            except RecursionError:  # what a model writes is data, however deep it goes
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                return {"role": "assistant", "content": text}
            for call in message.get("tool_calls") or []:
                if _depth(call["function"]["arguments"]) > MAX_ARGUMENTS_DEPTH:
                    call["function"]["arguments"] = TOO_DEEP
            return message
        return self._without_thoughts(self.tokenizer.decode(ids, skip_special_tokens=True), prefix)

    def _without_thoughts(self, text: str, prefix: list[int]) -> Message:
        """A message whose content is what a server shows as the answer: its thoughts stand apart.

        The answer is what follows the last `</think>`; a thought without an end is no answer.
        """
        thinking = self._thinks and (
            "<think>" in text or self.tokenizer.decode(prefix[-3:]).rstrip().endswith("<think>")
        )
        thought, closed, answer = text.rpartition("</think>") if self._thinks else ("", "", text)
        if closed:
            opened = thought.strip().removeprefix("<think>").strip()
            message: Message = {"role": "assistant", "content": answer.strip()}
            return message | ({"reasoning_content": opened} if opened else {})
        if thinking:
            opened = text.strip().removeprefix("<think>").strip()
            return {"role": "assistant", "content": "", "reasoning_content": opened}
        return {"role": "assistant", "content": text}

    def tool_suffix(self, messages: list[Message]) -> Suffix:
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
        escaped = sum(len(self._markup.findall(body)) for body in bodies)
        if escaped:
            return self._in_pieces(pieces, bodies, escaped)
        spans, at = [], 0
        for piece, body in zip(pieces, [*bodies, ""], strict=True):
            at += len(piece)
            spans.append((at, at + len(body)))
            at += len(body)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        origins = [_origin(begin, end, spans) for begin, end in encoded["offset_mapping"]]
        return Suffix(encoded["input_ids"], _roles(origins), origins, bodies, 0)

    def _in_pieces(self, pieces: list[str], bodies: list[str], escaped: int) -> Suffix:
        ids: list[int] = []
        origins: list[Origin | None] = []
        for number, (piece, body) in enumerate(zip(pieces, [*bodies, ""], strict=True)):
            scaffold = self._encode(piece)
            ids += scaffold
            origins += [None] * len(scaffold)
            cuts = [0, *(match.start() + 1 for match in self._markup.finditer(body)), len(body)]
            for start, stop in pairwise(cuts):
                part = self.tokenizer(
                    body[start:stop], add_special_tokens=False, return_offsets_mapping=True
                )
                ids += part["input_ids"]
                origins += [(number, start + begin) for begin, _ in part["offset_mapping"]]
        return Suffix(ids, _roles(origins), origins, bodies, escaped)

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

    def _body(self, message: Message) -> str:
        """A tool result as this template writes it: plain, trimmed, or as a JSON string."""
        return _between(self._rendered([message]), *self._around((message["name"],)))

    def _rendered(self, messages: list[Message]) -> str:
        """What the template writes after the token that ended the assistant's turn."""
        name = messages[0]["name"]
        call: RequestedCall = {
            "type": "function",
            "function": {"name": name, "arguments": {"value": CALLED}},
        }
        turns: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return self._split(turns, messages)[1]

    def _split(self, turns: list[Message], results: list[Message]) -> tuple[str, str]:
        """A conversation's text up to the end token of its last call, and from there on.

        Some templates write the end token in the assistant's turn, some (`<|observation|>`) as the
        first token of the result's.
        """
        before = self._text(turns)
        whole = self._text(turns + results, add_generation_prompt=True)
        call = before.rfind(CALLED)  # a name may be in the markup, too
        ends = [before.rfind(end) + len(end) for end in self._ends if before.rfind(end) > call]
        cut = max(ends, default=len(before))
        if not ends:
            cut += max((len(e) for e in self._ends if whole.startswith(e, cut)), default=0)
        if not whole.startswith(before[:cut]) or (not ends and cut == len(before)):
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED,
                self._difference(self._encode(before[:cut]), self._encode(whole)),
            )
        return whole[:cut], whole[cut:]

    def _text(self, messages: list[Message], **options: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=self.tools or None, tokenize=False, **self._options, **options
            )
        except (TemplateError, TypeError) as error:
            raise RunFailure(
                Reason.MODEL_UNSUPPORTED, f"the chat template refuses tool results: {error}"
            ) from None
        return text


def _depth(value: Any) -> int:
    """How many lists and objects lie within each other, at most one more than is looked for."""
    level, depth = [value], 0
    while level and depth <= MAX_ARGUMENTS_DEPTH:
        inner = [
            item
            for part in level
            if isinstance(part, dict | list)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        depth += any(isinstance(part, dict | list) for part in level)
        level = inner
    return depth


def _without_generation_markers(template: str) -> str:
    """Only TRL knows these markers; what is saved must render anywhere."""
    opened = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 if true \2", template)
    return re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endif \2", opened)


def _origin(begin: int, end: int, spans: list[tuple[int, int]]) -> Origin | None:
    """The body that a token lies in, whole; None: it has markup in it."""
    for number, (start, stop) in enumerate(spans):
        if start <= begin and end <= stop and stop > start:
            return number, begin - start
    return None


def _roles(origins: list[Origin | None]) -> list[TokenRole]:
    return [TokenRole.OBSERVATION if origin else TokenRole.SCAFFOLD for origin in origins]


def _between(text: str, before: str, after: str) -> str:
    return text[len(before) : len(text) - len(after)]
