import re
import sys

from tests.conftest import ROOT


def test_the_table_of_training_fields_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import training_docs

    assert training_docs.TARGET.read_text() == training_docs.render(), (
        "run python scripts/training_docs.py"
    )


def test_every_promise_names_a_test_that_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 40
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / file).read_text()
    ]
    assert missing == []
