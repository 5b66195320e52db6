import sys

from tests.conftest import ROOT


def test_the_table_of_training_fields_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import training_docs

    assert training_docs.TARGET.read_text() == training_docs.render(), (
        "run python scripts/training_docs.py"
    )
