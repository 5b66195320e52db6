"""Draw the cases of this example: `python make_cases.py > cases.jsonl` makes the file here.

Questions are divided by a hash of what is to be computed, so that the tiny model's pre-training
(examples/tiny_agent) never sees an exercise of the suite, also not in other words or with its
operands swapped.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from operator import add, mul, sub

APPLY = {"+": add, "-": sub, "*": mul}
ONE_STEP = {
    "+": (
        "What is {a} + {b}?",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "{a} plus {b} is how much?",
    ),
    "-": (
        "What is {a} - {b}?",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "{a} minus {b} is how much?",
    ),
    "*": (
        "What is {a} * {b}?",
        "Compute {a} * {b}.",
        "Multiply {a} by {b}.",
        "{a} times {b} is how much?",
    ),
}
SECOND_STEP = {"+": " Then add {c}.", "-": " Then subtract {c}.", "*": " Then multiply by {c}."}


@dataclass(frozen=True)
class Question:
    text: str
    expression: str
    answer: str
    exercise: str  # the same for `a + b` and `b + a`, in any words

    @property
    def split(self):
        bucket = int(hashlib.sha256(self.exercise.encode()).hexdigest(), 16) % 10
        return "suite" if bucket < 3 else "pretraining"


def draw(rng):
    op = rng.choice("+-*")
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    if op == "*" and rng.random() < 0.5:
        b = rng.randint(2, 9)
    if op == "-" and b > a:
        a, b = b, a
    text, expression = rng.choice(ONE_STEP[op]).format(a=a, b=b), f"{a} {op} {b}"
    answer, exercise = APPLY[op](a, b), f"{op}{sorted((a, b))}"
    if rng.random() < 0.3:
        op, c = rng.choice("+-*"), rng.randint(2, 9)
        text, expression = text + SECOND_STEP[op].format(c=c), f"({expression}) {op} {c}"
        answer, exercise = APPLY[op](answer, c), f"{exercise}{op}{c}"
    return Question(text, expression, str(answer), exercise)


def questions(split, count, seed=0):
    """Distinct exercises in the suite; pre-training may repeat them."""
    rng, seen, drawn = random.Random(f"{split} {seed}"), set(), []
    while len(drawn) < count:
        question = draw(rng)
        if question.split != split or (split == "suite" and question.exercise in seen):
            continue
        seen.add(question.exercise)
        drawn.append(question)
    return drawn


if __name__ == "__main__":
    for question in questions("suite", 384):
        print(json.dumps({"input": question.text, "expect": {"answer": question.answer}}))
