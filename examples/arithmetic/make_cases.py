"""Draw the cases of this example: `python make_cases.py > cases.jsonl` gives the file in this folder.

Questions are divided by a hash of their operands, so that the tiny model's pre-training
(examples/tiny_agent) never sees a question of the suite, also not with its operands swapped.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from operator import add, mul, sub

APPLY = {"+": add, "-": sub, "*": mul}
ONE_STEP = {
    "+": ["What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}.", "{a} plus {b} is how much?"],
    "-": ["What is {a} - {b}?", "Compute {a} - {b}.", "Subtract {b} from {a}.", "{a} minus {b} is how much?"],
    "*": ["What is {a} * {b}?", "Compute {a} * {b}.", "Multiply {a} by {b}.", "{a} times {b} is how much?"],
}
SECOND_STEP = {"+": " Then add {c}.", "-": " Then subtract {c}.", "*": " Then multiply by {c}."}


@dataclass(frozen=True)
class Question:
    text: str
    expression: str
    answer: str
    operands: str  # the same for `a + b` and `b + a`

    @property
    def split(self):
        bucket = int(hashlib.sha256(self.operands.encode()).hexdigest(), 16) % 2
        return "suite" if bucket else "pretraining"


def draw(rng):
    op = rng.choice("+-*")
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    if op == "*" and rng.random() < 0.5:
        b = rng.randint(2, 9)
    if op == "-" and b > a:
        a, b = b, a
    text, expression = rng.choice(ONE_STEP[op]).format(a=a, b=b), f"{a} {op} {b}"
    answer, operands = APPLY[op](a, b), f"{op}{sorted((a, b))}"
    if rng.random() < 0.3:
        op, c = rng.choice("+-*"), rng.randint(2, 9)
        text, expression = text + SECOND_STEP[op].format(c=c), f"({expression}) {op} {c}"
        answer = APPLY[op](answer, c)
    return Question(text, expression, str(answer), operands)


def questions(split, count, seed=0):
    """Distinct operands in the suite; pre-training may repeat them."""
    rng, seen, drawn = random.Random(f"{split} {seed}"), set(), []
    while len(drawn) < count:
        question = draw(rng)
        if question.split != split or (split == "suite" and question.operands in seen):
            continue
        seen.add(question.operands)
        drawn.append(question)
    return drawn


if __name__ == "__main__":
    for question in questions("suite", 384):
        print(json.dumps({"input": question.text, "expect": {"answer": question.answer}}))
