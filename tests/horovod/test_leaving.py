"""How processes end of which one leaves while the other one needs it: in words, with the right status, never not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from horovod_jobs import clean_environment

SCRIPT = Path(__file__).parent / "scripts" / "leaving.py"
Ends = Callable[[str], tuple[list[int | str], list[str]]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How each pair ended: two exit statuses, and what the two said."""
    out = tmp_path_factory.mktemp("leaving")
    subprocess.run([sys.executable, str(SCRIPT), str(out)], env=clean_environment(), timeout=200, check=True)
    found = json.loads((out / "ended.json").read_text())
    assert not any("terminate called" in text for _, texts in found.values() for text in texts), found
    return lambda how: found[how]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("early", "Horovod has been shut down"),
        ("early, check", "teardown() was called there, or its process ended"),
    ],
)
def test_a_rank_that_finishes_early_ends_the_wait_of_the_other_one(ends: Ends, how: str, words: str) -> None:
    codes, (waiting, _) = ends(how)
    assert codes == [1, 0], waiting
    assert words in waiting
    assert "all_reduce" in waiting


def test_processes_end_with_operations_in_flight(ends: Ends) -> None:
    codes, (said, _) = ends("in flight")
    assert codes == [0, 0], said
    assert said == "left with 3 operations in flight\n"


def test_a_process_that_waited_for_a_stopped_one_ends(ends: Ends) -> None:
    """Horovod's thread waits half a minute for it, and no process ends before its thread does."""
    codes, (said, _) = ends("stopped")
    assert codes == [1, "does not end"], said
    assert "CollectiveTimeoutError: all_reduce" in said


@pytest.mark.parametrize("how", ["forked", "forked, check"])
def test_a_forked_process_ends_as_it_would_without_horovod(ends: Ends, how: str) -> None:
    """It has none of the threads that Horovod's end waits for, and it is not the rank that the others know."""
    codes, texts = ends(how)
    assert codes == [0, 0], texts
    assert texts == ["the child ended with 7, the sum is 2\n"] * 2


def test_the_check_for_stalled_operations_works(ends: Ends) -> None:
    """The installed Horovod reports and ends what waits for ever; its last release never does with Gloo."""
    codes, (first, second) = ends("stalled")
    assert codes == [1, 1], first
    reported = first.partition("Missing ranks:\n")[2]
    assert "0: [allgather." in reported
    assert "1: [allreduce." in reported
    for said in (first, second):
        assert "CollectiveError: all_" in said
        assert "Horovod has been shut down" in said


def test_an_operation_after_the_end_of_horovod_says_so(ends: Ends) -> None:
    codes, texts = ends("late operation")
    assert codes == [1, 1], texts
    assert all("CollectiveError: all_reduce" in text for text in texts)
