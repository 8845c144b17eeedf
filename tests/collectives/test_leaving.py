"""A rank that stops after an error of its own tells the others, in check mode at once."""

import time

import pytest
import torch
from forked import error_in_child

from collective_strategy.collectives import Collective, CollectiveStateError, RankLeftError
from collective_strategy.testing import run_ranks


def _timed(collective: Collective, call) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(RankLeftError) as raised:
        call()
    assert collective.broken or collective._root.broken
    with pytest.raises(CollectiveStateError):
        collective.barrier()
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("waits_first", [True, False])
@pytest.mark.parametrize("part", ["world", "model", "duplicate"])
def test_ranks_that_wait_for_one_that_left_hear_why(part: str, waits_first: bool):
    def run(collective: Collective) -> tuple[str, float] | None:
        used = {"world": lambda: collective, "model": lambda: collective["model"], "duplicate": collective.duplicate}
        group = used[part]()
        group.all_reduce(torch.ones(1))
        if collective.rank == 1:
            time.sleep(0.5 if waits_first else 0)
            collective.abort("rank 1 raised ValueError: no such file")
            return None
        time.sleep(0 if waits_first else 0.5)
        return _timed(group, lambda: group.all_reduce(torch.ones(1)))

    outcomes = run_ranks(2, run, mesh={"data": 1, "model": 2}, timeout=30, check=True, fresh=True)
    text, seconds = outcomes[0].result()
    assert "no such file" in text
    assert "rank 1" in text
    assert seconds < 10
    assert outcomes[1].result() is None


def test_a_rank_that_was_torn_down_early_is_named():
    def run(collective: Collective) -> tuple[str, float] | None:
        collective.all_reduce(torch.ones(1))
        if collective.rank == 1:
            collective.teardown()
            return None
        return _timed(collective, lambda: collective.all_reduce(torch.ones(1)))

    outcomes = run_ranks(2, run, timeout=30, check=True, fresh=True)
    text, seconds = outcomes[0].result()
    assert "all_reduce" in text
    assert "rank 1 has left (teardown() was called there" in text
    assert seconds < 10


class Interrupted:
    """Interrupts the call that it is given to, before the call has told the other ranks of itself."""

    def __reduce__(self):
        raise KeyboardInterrupt


def test_a_rank_that_is_interrupted_before_it_announced_its_call_is_named():
    def run(collective: Collective) -> tuple[str, float] | None:
        collective.all_reduce(torch.ones(1))
        if collective.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                collective.all_gather_object(Interrupted())
            collective.abort("Ctrl-C")
            return None
        return _timed(collective, lambda: collective.all_gather_object("mine"))

    outcomes = run_ranks(2, run, timeout=30, check=True, fresh=True)
    text, seconds = outcomes[0].result()
    assert "rank 1 has left (Ctrl-C)" in text
    assert seconds < 10


@pytest.mark.parametrize("check", [False, True])
def test_a_forked_process_is_refused_and_does_not_answer_or_leave_in_the_place_of_its_rank(check: bool):
    """It has the connections of the process that was set up, and none of the threads."""

    def run(collective: Collective) -> tuple[list[str], int]:
        calls = (lambda: collective.all_reduce(1), lambda: collective.all_reduce_(torch.ones(1)), collective.barrier)
        leaving = (lambda: collective.abort("a worker failed"),)
        told = [error_in_child(call) for call in (*calls, *leaving)] if collective.rank else []
        return told, collective.all_reduce(1).item()

    first, second = (outcome.result() for outcome in run_ranks(2, run, timeout=30, check=check, fresh=True))
    assert first == ([], 2)
    *refusals, nothing = second[0]
    assert second[1] == 2
    assert nothing == ""
    assert all(said.startswith("CollectiveStateError: ") and "was forked from" in said for said in refusals)
