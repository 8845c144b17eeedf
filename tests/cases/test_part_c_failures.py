"""Failures under the Trainer end in time and name their cause."""

import json
from typing import Any

import pytest
from launched import run

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)

TIMEOUT = 4
BUSY = 60  # seconds that a busy machine may need; what hangs is ended by force after minutes, and fails


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("failing")
    ended = run("failing.py", str(out), timeout=240)
    assert ended.codes == [0], ended.output
    return json.loads((out / "rank0.json").read_text())


@pytest.mark.parametrize("name", ["raises_in_training_step", "raises_in_a_loader_worker"])
def test_an_exception_on_one_rank_ends_both_with_its_message(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    assert outcome["codes"] == [1, 1], outcome["log"]
    assert "boom" in outcome["log"]
    assert outcome["seconds"] < TIMEOUT + BUSY


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("logs_with_sync_on_one_rank", "reduce"),
        ("saves_on_one_rank", "checkpoint"),
        ("saves_buffers_on_one_rank", "checkpoint"),
        ("misses_a_barrier", "'alone'"),
    ],
)
def test_a_call_on_one_rank_only_is_named_within_the_timeout(
    outcomes: dict[str, Any], name: str, expected: str
) -> None:
    outcome = outcomes[name]
    assert outcome["codes"][0] == 1, outcome["log"]
    lines = [line for line in outcome["log"].splitlines() if "Error" in line and expected in line]
    assert lines, outcome["log"]
    assert outcome["seconds"] < TIMEOUT + BUSY
