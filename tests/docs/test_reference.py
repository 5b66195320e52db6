import re
import sys

from tests.conftest import ROOT


def test_what_documents_say_of_the_code_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import reference

    stale = [file.name for file, text in reference.written().items() if file.read_text() != text]
    assert stale == [], "run python scripts/reference.py"


def test_every_promise_names_a_test_that_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 40
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / file).read_text()
    ]
    assert missing == []
