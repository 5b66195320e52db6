"""Specifications as released versions stored them: they load for ever, to the same content."""

import json

import pytest

from dressage.spec.job import JobSpec
from tests.conftest import ROOT

GOLDEN = sorted((ROOT / "tests" / "spec" / "golden").glob("*.json"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_a_stored_specification_still_loads(file):
    stored = json.loads(file.read_text())
    assert kept(stored, JobSpec.model_validate(stored).model_dump(mode="json"))


def kept(stored, loaded):
    """Whether all that was stored is there; fields that came later may stand beside it."""
    if isinstance(stored, dict):
        return all(name in loaded and kept(value, loaded[name]) for name, value in stored.items())
    if isinstance(stored, list):
        return len(stored) == len(loaded) and all(map(kept, stored, loaded))
    return stored == loaded


def test_the_set_has_the_smallest_the_fullest_and_one_for_each_export():
    specs = {file.stem: json.loads(file.read_text()) for file in GOLDEN}
    kinds = {export["type"] for spec in specs.values() for export in spec["exports"]}
    assert kinds == {"merged", "gguf", "gguf_adapter", "ollama"}
    unset = [
        f"{part}.{name}"
        for part, content in {"spec": specs["v1-full"], **specs["v1-full"]}.items()
        if isinstance(content, dict)
        for name, value in content.items()
        if value is None
    ]
    # These exclude what the full one has: an environment or a function instead of tools.
    assert unset == ["agent.environment", "agent.rollout_func"]
