"""Write `cases.jsonl`: numbered files of every kind, in an order that mixes them."""

import json
import pathlib
import random

from world import FOLDERS

CASES = 320


def question(file):
    return f"What is in {file}?"


def draw(rng):
    """-> a file name such as `41.log`"""
    return f"{rng.randint(10, 99)}.{rng.choice(list(FOLDERS))}"


def main():
    rng = random.Random(0)
    files = {}
    while len(files) < CASES:
        files[draw(rng)] = str(rng.randint(10, 99))
    lines = [
        json.dumps(
            {"input": question(file), "expect": {"answer": content}, "metadata": {"file": file}}
        )
        for file, content in files.items()
    ]
    pathlib.Path(__file__).with_name("cases.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
