"""Horovod beside the life of a collective: started, shut down, started again, forked, its groups, its own use."""

import os
import sys
from pathlib import Path

import pytest
import torch

from collective_strategy.collectives import CollectiveError, CollectiveStateError, RendezvousError
from collective_strategy.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "collectives"))

from forked import error_in_child

MESH = {"data": -1, "model": 2}


def ranks(n, function, *, fresh=True, **options):
    return run_ranks(n, function, backend="horovod", check=False, timeout=30, fresh=fresh, **options)


def text_of(outcome, kind=CollectiveError):
    assert isinstance(outcome.error, kind), outcome
    return str(outcome.error)


def test_a_rank_that_cannot_load_horovod_is_named_on_the_others():
    """Such as a host on which it was built for another torch; nobody waits for it."""

    def act(_):
        import collective_strategy

        if os.environ["RANK"] == "1":
            sys.modules["horovod.torch"] = None
        collective_strategy.init("horovod", timeout=100)

    first, second = run_ranks(2, act, backend=None, fresh=True, timeout=60)
    assert "rank 1 ended with ImportError: Horovod is installed but cannot be loaded" in text_of(first, RendezvousError)
    assert "install_horovod" in text_of(second, ImportError)


@pytest.mark.parametrize(("n", "mesh"), [(2, None), (4, MESH)], ids=["world", "groups"])
def test_a_collective_whose_horovod_was_shut_down_says_so(n, mesh):
    """By one rank, which ends it on all of them; its groups are then unknown to Horovod."""

    def act(collective):
        import horovod.torch as hvd

        group = collective["model"] if collective.mesh else collective
        others = collective.all_gather_object(os.getpid())
        assert len(set(others)) == n
        if collective.rank == 0:
            hvd.shutdown()
        while True:
            group.all_reduce_(torch.ones(1))

    for outcome in ranks(n, act, mesh=mesh):
        assert "all_reduce_" in text_of(outcome)
        assert "Horovod has been shut down" in str(outcome.error) or "not been initialized" in str(outcome.error)


@pytest.mark.parametrize(("n", "mesh"), [(2, None), (4, MESH)], ids=["world", "groups"])
def test_after_an_error_the_same_processes_set_up_again(n, mesh):
    """Horovod ends in all of them and starts anew, and with it the groups."""

    def act(collective):
        from collective_strategy.collectives import read_environment

        sums = []
        for _ in range(2):
            group = collective["model"] if collective.mesh else collective
            sums += [group.all_reduce(1).item(), collective.split(collective.rank > 0).all_reduce(1).item()]
            with pytest.raises(CollectiveError):
                collective.all_reduce_(torch.ones(2 + collective.rank))
            collective.teardown()
            collective.setup(read_environment())
        return sums, collective.all_gather_object(collective.rank)

    first, *others = (outcome.result() for outcome in ranks(n, act, mesh=mesh))
    everybody = list(range(n))
    assert first == ([2, 1, 2, 1], everybody)
    assert others == [([2, n - 1, 2, n - 1], everybody)] * (n - 1)


def test_a_handle_from_before_a_new_start_does_not_take_the_result_of_another_operation():
    """Horovod counts its operations from one again."""

    def act(collective):
        from collective_strategy.collectives import read_environment

        other = collective.duplicate()
        old = collective.all_reduce_(torch.full((1,), 9.0), async_op=True) if collective.rank == 0 else None
        other.barrier()
        collective.abort("start again")
        collective.teardown()
        collective.setup(read_environment())
        new = [collective.all_reduce_(torch.full((1,), float(k)), async_op=True) for k in range(3)]
        if old is not None:
            assert old.is_completed()
            with pytest.raises(CollectiveStateError, match="start again"):
                old.wait()
        return [handle.wait().item() for handle in new]

    assert [outcome.result() for outcome in ranks(2, act)] == [[0, 2, 4]] * 2


def test_a_forked_process_is_told_that_it_has_no_horovod():
    """A worker of a data loader would wait for ever."""

    def act(collective):
        handle = collective.all_reduce_(torch.ones(1), async_op=True)
        told = [error_in_child(lambda: collective.all_reduce_(torch.ones(1))), error_in_child(handle.wait)]
        return told, handle.wait().item(), collective.all_reduce(1.0).item()

    for outcome in ranks(2, act):
        told, *totals = outcome.result()
        for said in told:
            assert said.startswith(CollectiveStateError.__name__)
            assert "was forked from" in said
        assert totals == [2, 2]


def test_operations_that_one_rank_has_more_do_not_shift_the_others():
    """Names that count all operations of a process, as Horovod's own, would differ from here on."""

    def act(collective):
        model = collective["model"]
        if collective.rank < 2:
            model.all_reduce_(torch.ones(1))
        if collective.rank == 0:
            with pytest.raises(ValueError, match="contiguous"):
                collective.all_reduce_(torch.ones(2, 2).t()[:1])
        return collective.all_reduce(1.0).item()

    assert [outcome.result() for outcome in ranks(4, act, mesh=MESH, fresh=False)] == [4.0] * 4


def test_groups_are_made_by_their_members_alone_and_in_any_order():
    """Horovod wants all ranks to make every process set in one order."""

    def act(collective):
        half = collective.split(collective.rank // 2)  # (0, 1) and (2, 3)
        sums = []
        if collective.rank >= 2:
            sums += [half.split(0).all_reduce(1).item(), half.split(half.rank).all_reduce(1).item()]
        three = collective.split("in" if collective.rank else None)
        if collective.rank:
            pair = three.split(three.rank > 0)  # (1,) and (2, 3)
            sums.append(pair.all_reduce(1).item())
        return sums, collective.all_reduce(1).item()

    found = [outcome.result() for outcome in ranks(4, act, fresh=False)]
    assert found == [([], 4), ([1], 4), ([2, 1, 2], 4), ([2, 1, 2], 4)]


def test_horovod_is_there_for_the_operations_of_the_script_too():
    def act(_):
        import horovod.torch as hvd

        import collective_strategy

        with collective_strategy.init("horovod", timeout=30) as collective:
            total = collective.all_reduce(1.0).item()
        # ours ended, its own goes on
        x = hvd.allreduce(torch.ones(1), name="own", op=hvd.Sum)
        with collective_strategy.init("horovod", timeout=30) as collective:
            return total, x.item(), collective.all_reduce(1.0).item()

    assert [o.result() for o in run_ranks(2, act, backend=None, fresh=True, timeout=60)] == [(2.0, 2.0, 2.0)] * 2
