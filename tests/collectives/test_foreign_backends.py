"""A torch.distributed backend that nobody told us about: what it has is found out, what it lacks is composed."""

import pytest
import torch
import torch.distributed as dist
from lacking_backend import LackingCollective, LackingGroup

from collective_strategy.collectives import CollectiveError, ReduceOp, TorchDistributedCollective
from collective_strategy.testing import run_ranks
from collective_strategy.testing.conformance import CollectiveConformance


class TestLacking(CollectiveConformance):
    backend = LackingCollective
    world_sizes = (2,)


def test_what_the_backend_has_is_found_out():
    def found(collective):
        group = dist.distributed_c10d._get_default_group()
        capabilities = collective.capabilities
        sums = capabilities.reduces(ReduceOp.SUM, torch.float32), capabilities.reduces(ReduceOp.SUM, torch.float64)
        return isinstance(group, LackingGroup), capabilities.composed, sums, capabilities.device_types

    composed = {"reduce_scatter", "all_to_all", "send", "recv"}
    for outcome in run_ranks(2, found, backend=LackingCollective):
        assert outcome.result() == (True, composed, (True, False), {"cpu"})


def test_all_ranks_make_all_groups_of_a_partition():
    """Also those that are alone, or in no group."""

    def groups(collective):
        made = []
        original = dist.distributed_c10d.new_group

        def record(ranks, *args, **kwargs):
            made.append(tuple(ranks))
            return original(ranks, *args, **kwargs)

        dist.distributed_c10d.new_group = record
        try:
            uneven = collective.split(None if collective.rank == 3 else collective.rank == 2)
            even = collective.split(collective.rank % 2)
        finally:
            dist.distributed_c10d.new_group = original
        total = None if collective.rank == 3 else uneven.all_reduce(collective.rank).item()
        model = collective["model"].all_gather(collective.rank).tolist()
        return made, total, even.all_gather(collective.rank).tolist(), model

    outcomes = run_ranks(4, groups, backend=LackingCollective, mesh={"data": 2, "model": 2})
    made, totals, evens, models = zip(*[outcome.result() for outcome in outcomes], strict=True)
    assert all(one == [(0, 1), (0, 2), (1, 3)] for one in made)
    assert totals == (1, 1, 2, None)
    assert evens == ([0, 2], [1, 3], [0, 2], [1, 3])
    assert models == ([0, 1], [0, 1], [2, 3], [2, 3])


def test_a_part_cannot_be_divided_without_the_others():
    def divide(collective):
        with pytest.raises(CollectiveError, match="Divide the whole collective"):
            collective["model"].split(0)

    for outcome in run_ranks(4, divide, backend=LackingCollective, mesh={"data": 2, "model": 2}):
        outcome.result()


def test_devices_and_backends_may_have_any_name():
    collective = TorchDistributedCollective(backend="cpu:gloo,tpu:tpu_dist", device="cpu")
    assert collective.capabilities.device_types == {"cpu", "tpu"}
    assert torch.float16 not in collective.capabilities.movement_dtypes  # nobody knows before set-up
