"""Groups of a mesh: torch's DeviceMesh over them, and what their set-up costs."""

import os
from collections import Counter

import torch
import torch.distributed as dist

from collective_strategy.collectives import (
    Collective,
    LaunchEnvironment,
    TorchDistributedCollective,
    rendezvous,
)
from collective_strategy.testing import run_ranks

MESH = {"data": -1, "model": 2}
UNIONS = {"all": ("data", "model")}


def test_a_device_mesh_of_the_same_groups_serves_dtensor():
    def shards(collective: Collective) -> tuple[list[list[float]], float]:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = collective.device_mesh()
        assert mesh.mesh_dim_names == ("data", "model")
        assert dist.get_process_group_ranks(mesh.get_group("model")) == list(collective["model"].ranks)
        tensor = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])
        return tensor.to_local().tolist(), tensor.full_tensor().sum().item()

    values = [outcome.result() for outcome in run_ranks(4, shards, mesh={"data": 2, "model": 2})]
    assert [local for local, _ in values] == [
        [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[8, 9], [12, 13]], [[10, 11], [14, 15]],
    ]  # fmt: skip
    assert {total for _, total in values} == {120.0}


def test_a_device_mesh_has_axes_of_size_one():
    def sizes(collective: Collective) -> tuple[int, int, int]:
        mesh = collective.device_mesh()
        return mesh["data"].size(), mesh["model"].size(), dist.get_rank(mesh.get_group("data"))

    values = [outcome.result() for outcome in run_ranks(2, sizes, mesh={"data": 1, "model": 2})]
    assert values == [(1, 2, 0), (1, 2, 0)]


class CountingStore(dist.Store):
    """Hands every call on and counts it."""

    def __init__(self, inner: dist.Store, calls: Counter) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls

    def has_extended_api(self) -> bool:
        return True


def _handing_on(name: str):
    def method(self: CountingStore, *arguments):
        self.calls[name] += 1
        return getattr(self.inner, name)(*arguments)

    return method


for _name in ("set", "get", "add", "compare_set", "wait", "check", "delete_key", "multi_get", "multi_set", "append"):
    setattr(CountingStore, _name, _handing_on(_name))


def _operations_of_set_up(world_size: int) -> int:
    def count(nothing: None) -> int:
        calls: Counter = Counter()
        connect = rendezvous._connect
        rendezvous._connect = lambda *arguments: CountingStore(connect(*arguments), calls)
        rank = int(os.environ["RANK"])
        place = LaunchEnvironment(rank, world_size, rank, world_size, master_port=int(os.environ["MASTER_PORT"]))
        with TorchDistributedCollective("gloo", mesh=MESH, unions=UNIONS, timeout=60, check=False).setup(place):
            return calls.total()

    return max(outcome.result() for outcome in run_ranks(world_size, count, backend=None, fresh=True))


def test_store_operations_of_set_up_do_not_grow_with_the_ranks():
    # The last rank to arrive announces it, at the world's rendezvous and in each group: one or two operations more.
    four, eight = _operations_of_set_up(4), _operations_of_set_up(8)
    assert eight <= four + 4
    assert four <= 20


def test_sixteen_thousand_ranks_are_set_up_by_their_own_groups_only():
    def set_up(nothing: None) -> tuple[tuple[int, ...], int, int]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=8195, world_size=16384)
        mesh = {"data": -1, "ensemble": 4, "model": 8}
        collective = TorchDistributedCollective(mesh=mesh, unions={"batch": ("data", "ensemble")})
        collective.setup(LaunchEnvironment(rank=8195, world_size=16384))
        return collective["model"].ranks, collective["data"].world_size, collective["batch"].world_size

    (outcome,) = run_ranks(1, set_up, backend=None, fresh=True, timeout=20)
    assert outcome.result() == (tuple(range(8192, 8200)), 512, 2048)
