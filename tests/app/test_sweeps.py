"""Matched jobs over a grid, and the table they become."""

import psycopg
import pytest
from psycopg.types.json import Json

from app.sweeps.table import interval

GRID = {"training.echo.coeff": [0, 0.05], "training.seed": [0, 1, 2]}


@pytest.fixture
def sweep(api, suite, job_spec):
    response = api.post("/sweeps", json={"name": "echo", "base": job_spec, "grid": GRID})
    assert response.status_code == 201, response.text
    return response.json()


def test_every_combination_is_a_job_of_its_arm(api, sweep):
    assert [arm["values"] for arm in sweep["arms"]] == [
        {"training.echo.coeff": 0},
        {"training.echo.coeff": 0.05},
    ]
    jobs = [api.get(f"/jobs/{job}").json() for arm in sweep["arms"] for job in arm["jobs"]]
    made = [(j["spec"]["training"]["echo"]["coeff"], j["spec"]["training"]["seed"]) for j in jobs]
    assert made == [(0, 0), (0, 1), (0, 2), (0.05, 0), (0.05, 1), (0.05, 2)]
    assert jobs[4]["name"] == "echo [coeff=0.05, seed=1]"
    assert {job["sweep_id"] for job in jobs} == {sweep["id"]}
    assert sweep["arms"][0]["statuses"] == {"queued": 3}
    assert sweep["arms"][0]["gain"] is None


def test_the_table_has_mean_and_interval_by_arm(api, sweep, settings):
    after = {0: (0.4, 0.5, 0.6), 1: (0.7, 0.9)}
    with psycopg.connect(settings.libpq_url, autocommit=True) as connection:
        for arm, values in after.items():
            for job, value in zip(sweep["arms"][arm]["jobs"], values, strict=False):
                gain = {"before": 0.2, "after": value, "difference": value - 0.2}
                result = {"gain": gain, "reward_gain": None}
                connection.execute(
                    "UPDATE jobs SET result = %s, status = 'succeeded' WHERE id = %s",
                    (Json(result), job),
                )
    grpo, echo = api.get(f"/sweeps/{sweep['id']}").json()["arms"]
    assert grpo["pass_rate"]["mean"] == pytest.approx(0.5)
    assert grpo["pass_rate"]["low"] == pytest.approx(0.5 - 4.303 * 0.1 / 3**0.5)
    assert grpo["gain"]["mean"] == pytest.approx(0.3)
    assert (echo["pass_rate"]["count"], echo["statuses"]) == (2, {"succeeded": 2, "queued": 1})
    assert [s["id"] for s in api.get("/sweeps").json()["items"]] == [sweep["id"]]


@pytest.mark.parametrize(
    ("grid", "field", "text"),
    [
        ({"training.seed": []}, None, "has no values"),
        ({"training.seed": list(range(201))}, None, "200 are the limit"),
        ({"training.sed": [1]}, "base.training.sed", "Extra inputs"),
        ({"training.num_generations": [4, 1]}, "base.training.num_generations", "with {"),
        ({"name.x": [1]}, "grid", "'name' has no fields"),
        ({"agent.tools": [["calculate"], ["teleport"]]}, "agent.tools.0", "teleport"),
    ],
)
def test_a_grid_with_one_bad_job_stores_none(api, suite, job_spec, grid, field, text):
    response = api.post("/sweeps", json={"name": "bad", "base": job_spec, "grid": grid})
    assert response.status_code == 422
    assert text in response.text
    if field:
        assert response.json()["errors"][0]["field"] == field
    assert api.get("/jobs").json()["items"] == []
    assert api.get("/sweeps").json()["items"] == []


def test_a_single_value_has_no_interval():
    assert interval([]) is None
    assert interval([0.3]).low is None


def test_an_unknown_sweep_is_not_found(api):
    assert api.get("/sweeps/sweep_none").status_code == 404
