"""What a user sees when something goes wrong under Horovod: an exception with words on every rank that lives.

Comparing calls before they are made is off here, so that Horovod itself meets the mistake.
"""

import os
import signal
import time

import pytest
import torch

from collective_strategy.collectives import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RankLeftError,
    RendezvousError,
    transport,
)
from collective_strategy.testing import WorkerDiedError, run_ranks

MESH = {"data": -1, "model": 2}
SOON = 8.0  # seconds on a busy machine; what must not take until the time-out of 30 s


def ranks(n, function, *, check=False, timeout=30, fresh=True, **options):
    return run_ranks(n, function, backend="horovod", check=check, timeout=timeout, fresh=fresh, **options)


def text_of(outcome, kind=CollectiveError):
    assert isinstance(outcome.error, kind), outcome
    return str(outcome.error)


def test_different_calls_under_one_name_are_an_error_on_all_ranks_at_once():
    """Another shape, dtype, reduction, root or number of dims: Horovod's own comparison, in our words."""

    def calls(collective):
        here, x = collective.rank, torch.ones(2)
        variants = {
            "shape": lambda: collective.all_reduce_(torch.ones(2 + here)),
            "dtype": lambda: collective.all_reduce_(x.double() if here else x),
            "op": lambda: collective.all_reduce_(torch.ones(2, dtype=torch.int64), "sum" if here else "max"),
            "src": lambda: collective.broadcast_(x, here),
            "dims": lambda: collective.all_gather_(torch.ones(2, 2 + here), torch.ones(2 + here)),
        }
        said = {}
        for name, act in variants.items():
            began = time.monotonic()
            try:
                act()
            except CollectiveError as error:
                said[name] = str(error), time.monotonic() - began
            collective.broken = None  # Horovod stays usable; that we refuse to go on is tested elsewhere
        return said, collective.all_reduce(1).item()

    for outcome in ranks(2, calls):
        said, total = outcome.result()
        for name, words in {
            "shape": "all_reduce_ call 1 'world' rank 2 Mismatched shapes [2] [3]",
            "dtype": "all_reduce_ Mismatched data types float32 float64",
            "op": "all_reduce_ Mismatched op",
            "src": "broadcast_ Mismatched root ranks",
            "dims": "all_gather_ Mismatched shape",
        }.items():
            text, seconds = said[name]
            assert all(word in text for word in words.split()), text
            assert seconds < SOON
        assert total == 2


@pytest.mark.parametrize("check", [False, True])
def test_different_operations_end_within_the_time_out(check):
    """Stock Horovod waits for ever and says nothing. In check mode the ranks hear of it before they wait."""

    def act(collective):
        return collective.all_reduce(1.0) if collective.rank else collective.all_gather(1.0)

    for outcome in ranks(2, act, check=check, timeout=3):
        if check:
            assert "rank 0: all_gather" in text_of(outcome, CollectiveMismatchError)
        else:
            assert "timed out" in text_of(outcome, CollectiveTimeoutError)


def test_a_failed_operation_says_the_same_when_it_is_waited_for_again():
    def act(collective):
        handle = collective.all_reduce_(torch.ones(2 + collective.rank), async_op=True)
        with pytest.raises(CollectiveError, match="Mismatched"):
            handle.wait()
        assert handle.is_completed()
        handle.wait()

    for outcome in ranks(2, act):
        assert "Mismatched" in text_of(outcome)


def test_pieces_of_other_lengths_than_those_expected_are_an_error():
    """The lengths that the ranks give need not agree; Horovod delivers what was sent, and nothing may be cut off."""

    def act(collective):
        sent, expected = ([1, 3], [1, 1]) if collective.rank == 0 else ([1, 1], [2, 1])
        transport.exchange(collective, torch.arange(float(sum(sent))), sent, expected)

    first, second = ranks(2, act)
    assert first.error is None
    assert "the ranks sent [3, 1] elements, rank by rank, and not [2, 1]" in text_of(second)


def test_one_batch_more_on_one_rank_names_the_missing_rank():
    def train(collective):
        for _ in range(3 + collective.rank):
            collective.all_reduce_(torch.ones(4))

    first, second = ranks(2, train, timeout=3)
    assert first.error is None
    assert "all_reduce_(op=sum) (call 4" in text_of(second, CollectiveTimeoutError)
    assert "missing" in str(second.error)


@pytest.mark.parametrize("check", [False, True])
def test_an_exception_on_one_rank_ends_the_wait_of_the_others(check):
    def act(collective):
        collective.barrier()
        if collective.rank == 1:
            raise ValueError("the loader failed")
        began = time.monotonic()
        try:
            collective.all_reduce(1.0)
        finally:
            assert time.monotonic() - began < SOON

    first, second = ranks(2, act, check=check, timeout=100)
    assert "the loader failed" in str(second.error)
    assert "all_reduce" in text_of(first)


def test_abort_tells_the_others_why_in_check_mode():
    def act(collective):
        collective.barrier()
        if collective.rank == 1:
            collective.abort("the disk is full")
            return None
        return collective.all_reduce(1.0)

    first, _ = ranks(2, act, check=True)
    assert "the disk is full" in text_of(first, RankLeftError)


@pytest.mark.parametrize(("n", "mesh"), [(2, None), (4, MESH)], ids=["world", "groups"])
@pytest.mark.parametrize("how", [signal.SIGKILL, "exit"], ids=["killed", "left"])
def test_the_death_of_a_rank_is_an_exception_on_the_others(n, mesh, how):
    """With process sets, stock Horovod aborts every survivor."""

    def act(collective):
        group = collective["model"] if collective.mesh else collective
        assert group.all_reduce(1.0).item() == 2
        collective.barrier()
        if collective.rank == n - 1:
            os._exit(3) if how == "exit" else os.kill(os.getpid(), how)
        began = time.monotonic()
        try:
            for _ in range(1000):
                collective.all_reduce_(torch.ones(10))
        finally:
            assert time.monotonic() - began < SOON
            with open(os.devnull, "w") as file:  # what a survivor does in the end still runs
                file.write("saved")

    *survivors, dead = ranks(n, act, mesh=mesh)
    assert isinstance(dead.error, WorkerDiedError)
    for outcome in survivors:
        assert "Probably another rank ended" in text_of(outcome)


def test_a_frozen_rank_is_waited_for_as_long_as_the_time_out_says():
    def act(collective):
        others = collective.all_gather_object(os.getpid())
        if collective.rank == 1:
            time.sleep(4)
            return None
        os.kill(others[1], signal.SIGSTOP)
        try:
            return collective.all_reduce_(torch.ones(1))
        finally:
            os.kill(others[1], signal.SIGCONT)

    first, _ = ranks(2, act, timeout=2)
    assert "timed out after" in text_of(first, CollectiveTimeoutError)


def test_processes_that_horovod_cannot_connect_get_an_exception():
    """``hvd.init()`` aborts the process in Horovod's last release."""
    for outcome in ranks(2, lambda collective: None, env={"HOROVOD_GLOO_IFACE": "no_such_interface"}):
        text = text_of(outcome, RendezvousError)
        assert "could not start Horovod" in text
        assert "HOROVOD_GLOO_IFACE" in text
