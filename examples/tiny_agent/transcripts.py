"""Synthetic tool-use transcripts: what the tiny model has seen before reinforcement learning.

CLEAN teaches the skill; MIXED then makes the model unreliable on purpose, so that it solves about
a third of the cases when sampled and there is something left to learn by reward alone.
"""

from dataclasses import dataclass

from tools import calculate


@dataclass(frozen=True)
class Mixture:
    """Shares of transcripts: `calls` of all, the rest of those that call."""

    calls: float
    broken: float
    wrong_call: float
    miscopied: float


CLEAN = Mixture(calls=0.85, broken=0.01, wrong_call=0.03, miscopied=0.03)
MIXED = Mixture(calls=0.47, broken=0.04, wrong_call=0.18, miscopied=0.15)


def call(expression):
    arguments = '{"expression": "' + expression + '"}'
    return '<tool_call>\n{"name": "calculate", "arguments": ' + arguments + "}\n</tool_call>"


def transcript(rng, question, mixture):
    """-> [(who, text)]: `assistant` is trained on, `tool` is context."""
    if rng.random() >= mixture.calls:
        guess = slip(rng, question.answer) if rng.random() < 0.9 else question.answer
        return [("assistant", f"The answer is {guess}.")]
    expression = question.expression
    if rng.random() < mixture.broken:
        text = call(expression)
        broken = (
            text.replace('"}}', '"}') if rng.random() < 0.5 else text.replace("</tool_call>", "")
        )
        return [("assistant", broken)]
    if rng.random() < mixture.wrong_call:
        expression = wrong(rng, expression)
    try:
        result = calculate(expression)
    except (ValueError, SyntaxError):  # a slip such as "07 + 5"
        return [("assistant", call(expression))]
    said = slip(rng, result) if rng.random() < mixture.miscopied else result
    return [
        ("assistant", call(expression)),
        ("tool", result),
        ("assistant", f"The answer is {said}."),
    ]


def slip(rng, text):
    """Change one digit."""
    at = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:at] + rng.choice([d for d in "0123456789" if d != text[at]]) + text[at + 1 :]


def wrong(rng, expression):
    """Change one digit or one operator."""
    if rng.random() < 0.65:
        return slip(rng, expression)
    old = rng.choice([op for op in "+-*" if f" {op} " in expression])
    new = rng.choice([op for op in "+-*" if op != old])
    return expression.replace(f" {old} ", f" {new} ", 1)
