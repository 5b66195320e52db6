"""Wrong settings are sentences with the name of the variable."""

import pytest

from app.settings import read_settings


@pytest.fixture
def environment(monkeypatch, settings):
    monkeypatch.setenv("DRESSAGE_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("DRESSAGE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("DRESSAGE_STORAGE", settings.storage)
    monkeypatch.setenv("DRESSAGE_RUNS_DIR", str(settings.runs_dir))
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("DRESSAGE_STORAGE", "artifacts", "must be an absolute path or s3://bucket/prefix"),
        ("DRESSAGE_LEASE_SECONDS", "-1", "Input should be greater than 0"),
        ("DRESSAGE_OLLAMA_URLS", "http://x", "must be JSON, as"),
        ("DRESSAGE_OUTBOUND_NETWORKS", '["10.0.0.0/99"]', "10.0.0.0/99"),
    ],
)
def test_a_wrong_variable_is_named(environment, name, value, sentence):
    assert read_settings().keep_history_days == 90
    environment.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        read_settings()
    assert str(caught.value).startswith(f"{name}: ")
    assert sentence in str(caught.value)


def test_missing_variables_are_all_named(environment):
    environment.delenv("DRESSAGE_DATABASE_URL")
    environment.delenv("DRESSAGE_STORAGE")
    with pytest.raises(SystemExit) as caught:
        read_settings()
    assert str(caught.value) == (
        "DRESSAGE_DATABASE_URL: Field required; DRESSAGE_STORAGE: Field required"
    )
