import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dressage.spec.event import EventType
from worker.wire.run_dir import EVENTS, RunDirectory


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(), max_size=30) | st.sampled_from(["\\u0000", "\\\x00", "\\\\\x00"]))
def test_any_text_is_one_storable_line_and_nothing_else_is_changed(tmp_path, text):
    run = RunDirectory(tmp_path)
    run.emit(EventType.LOG, message=text)
    line = (tmp_path / EVENTS).read_bytes().splitlines()[-1]
    message = json.loads(line)["data"]["message"]
    expected = text.encode("utf-8", "replace").decode().replace("\x00", "�")
    assert message == expected
