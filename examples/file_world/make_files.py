"""Write `cases.jsonl`: numbered files in no order."""

import json
import pathlib
import random

CASES = 176


def question(file):
    return f"What is in {file}?"


def draw(rng):
    """-> a file name such as `417.log`"""
    return f"{rng.randint(100, 999)}.log"


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
