"""Use that XLA makes dangerous: reading, branching and failing on one rank alone; threads; copies."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from collective_strategy.collectives import CollectiveError, CollectiveStateError, RankLeftError
from collective_strategy.testing import run_ranks


def results(n, function, **options):
    return [outcome.result() for outcome in run_ranks(n, function, backend="xla", timeout=20, **options)]


def test_one_rank_may_look_at_everything_between_two_collectives():
    """Also with operations that torch_xla does on the host."""

    def values(collective):
        x = collective.all_reduce(torch.eye(4).to(collective.device) * (1 + collective.rank))
        if collective.rank == 0:
            assert "device='xla:0'" in repr(x)
            assert f"{x.sum()}" == "12.0"
            assert bool((x >= 0).all())
            assert x[x > 0].tolist() == [3.0] * 4
            assert x.unique().tolist() == [0.0, 3.0]
            assert torch.linalg.svdvals(x).sum().item() == pytest.approx(12)
            assert copy.deepcopy(x).sum().item() == pickle.loads(pickle.dumps(x)).sum().item() == 12
            torch.save(x, io.BytesIO())
        collective.barrier()
        return collective.all_reduce(x).sum().item()

    assert results(2, values) == [24.0] * 2


def test_ranks_may_compute_other_things_between_two_collectives():
    def values(collective):
        x = torch.tensor([1.0]).to(collective.device)
        for turn in range(4):
            if collective.rank == turn % 2:
                x = 2 * x + 1
            x = collective.all_reduce(x)
        return x.item()

    assert results(2, values) == [121.0] * 2  # x -> (2 x + 1) + x: 1, 4, 13, 40, 121


def test_ranks_may_hand_over_values_that_came_about_otherwise():
    """Functionalization makes a view again where it is used; XLA's graphs of the ranks would differ by that."""

    def values(collective):
        x = torch.arange(4.0).to(collective.device)
        base = torch.zeros(4, 2, device=collective.device)
        base[:, 1] = x
        value = x if collective.rank == 0 else base[:, 1]
        results = [
            collective.all_reduce(value),
            collective.all_reduce(value, "max"),
            collective.all_gather(value, 0),
            collective.broadcast(value, 1),
            collective.broadcast(value.long(), 1),
            collective.reduce_scatter(value),
            collective.all_to_all(value),
            collective.shift(value),
        ]
        return [result.tolist() for result in results]

    seen, halves = [0.0, 1.0, 2.0, 3.0], [[0.0, 1.0], [2.0, 3.0]]
    for rank, found in enumerate(results(2, values)):
        assert found == [
            [0.0, 2.0, 4.0, 6.0], seen, seen + seen, seen, [0, 1, 2, 3],
            [2 * value for value in halves[rank]], halves[rank] * 2, seen,
        ]  # fmt: skip


def test_an_exception_on_one_rank_is_an_error_on_the_others():
    def values(collective):
        x = torch.ones(2).to(collective.device) * 3
        if collective.rank == 1:
            raise ValueError("mine")
        return collective.all_reduce(x)

    first, second = run_ranks(2, values, backend="xla", timeout=20, fresh=True)
    assert isinstance(first.error, RankLeftError)
    assert str(second.error) == "mine"


def test_shapes_that_differ_are_refused_on_all_ranks():
    def values(collective):
        return collective.all_reduce(torch.ones(2 + collective.rank).to(collective.device))

    for outcome in run_ranks(2, values, backend="xla", timeout=20):
        assert "rank 0: all_reduce(op=sum, to=replicate) of float32[2]; rank 1:" in str(outcome.error)
        assert isinstance(outcome.error, CollectiveError)


def test_a_thread_of_the_users_is_refused_where_it_has_another_device():
    def values(collective):
        errors = []

        def call():
            try:
                collective.all_reduce(torch.ones(1))
            except CollectiveError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise errors[0]

    first, second = run_ranks(2, values, backend="xla", timeout=20, fresh=True)
    assert isinstance(first.error, RankLeftError)
    assert isinstance(second.error, CollectiveStateError)
    assert "of rank 1, whose device is xla:1, was called in a thread whose device is xla:0" in str(second.error)


def test_double_backward():
    """y = x0^2 + x1^2 and L = 2 y^2 over both ranks, at (1, 2): dL/dx = 8 y x, and the sum of both once more."""

    def values(collective):
        x = torch.tensor([1.0 + collective.rank]).to(collective.device).requires_grad_()
        y = collective.all_reduce(x**2)
        (slope,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.sum(), x)
        return slope.item(), again.item()

    assert results(2, values) == [(40.0, 88.0), (80.0, 136.0)]


def test_copies_of_a_module_leave_the_collective_behind():
    def values(collective):
        module = nn.Linear(2, 2).to(collective.device)
        module.collective = collective
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        total = collective.all_reduce(torch.ones(1).to(collective.device)).item()
        refused = 0
        for other in copies:
            try:
                other.collective.all_reduce(torch.ones(1))
            except CollectiveStateError:
                refused += 1
        return total, refused, [next(other.parameters()).device.type for other in copies]

    assert results(2, values) == [(2.0, 2, ["xla", "xla"])] * 2


def test_a_value_that_changes_after_an_asynchronous_start_does_not_travel_with_it():
    def values(collective):
        x = torch.ones(2).to(collective.device)
        handle = collective.all_reduce_(x, async_op=True)
        gathered = collective.all_gather(torch.ones(1).to(collective.device))
        handle.wait()
        return x.tolist(), gathered.flatten().tolist()

    assert results(2, values) == [([2.0, 2.0], [1.0, 1.0])] * 2
