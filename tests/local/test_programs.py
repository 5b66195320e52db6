"""The programs that `dressage up` starts are there, and named in one place."""

import ast
from importlib.util import find_spec

import pytest

from dressage.local import programs
from dressage.local.errors import LaunchError
from tests.conftest import ROOT


@pytest.mark.parametrize("module", programs.MODULES)
def test_every_program_exists(module):
    assert find_spec(module) is not None


def test_no_other_module_of_the_service_is_named_in_what_users_install():
    named = set()
    for file in (ROOT / "dressage").rglob("*.py"):
        tree = ast.parse(file.read_text())
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named |= {
            text
            for text in texts
            if isinstance(text, str) and text.startswith(("app.", "worker.")) and " " not in text
        }
    assert named == set(programs.MODULES)


def test_a_client_alone_says_where_the_service_is_to_be_had(monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"only the client is installed here.*scripts/setup"):
        programs.require_programs()


def test_a_program_that_fails_is_told_by_its_last_line():
    with pytest.raises(LaunchError, match="DRESSAGE_REDIS_URL: Field required"):
        programs.run_module(programs.MIGRATE, {"DRESSAGE_DATABASE_URL": ""})
