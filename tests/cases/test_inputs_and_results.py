"""Inputs changed behind the caller's back, results that shared memory, and world size 1 that was another world."""

import dataclasses

import pytest
import torch
from on_ranks import error_of, values

from collective_strategy import init
from collective_strategy.collectives import Capabilities, Collective, LaunchEnvironment, SingleProcessCollective


@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_operation_changes_its_input(n: int) -> None:
    """Lightning #18228, horovod #1742, pytorch #102435."""

    def kept(c: Collective) -> list[str]:
        changed = []
        for op in ("sum", "mean", "max", "min"):
            x = torch.tensor([1.0 + c.rank])
            y = c.reduce(x, op)
            if x.item() != 1.0 + c.rank or y.data_ptr() == x.data_ptr():
                changed.append(op)
        x = torch.tensor([1.0 + c.rank])
        c.broadcast(x, src=c.world_size - 1)
        return changed + (["broadcast"] if x.item() != 1.0 + c.rank else [])

    assert values(n, kept) == [[]] * n


def test_a_reduction_to_one_rank_leaves_the_tensors_elsewhere_alone() -> None:
    """pytorch #76527, pytorch #21480."""

    def to_first(c: Collective) -> tuple[list, list | None]:
        x = torch.tensor([[1, 2], [3, 4]]) + 3 * c.rank
        y = c.reduce(x, "sum", dst=0)
        return x.tolist(), None if y is None else y.tolist()

    assert values(2, to_first) == [
        ([[1, 2], [3, 4]], [[5, 7], [9, 11]]),
        ([[4, 5], [6, 7]], None),
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_gathered_pieces_do_not_share_memory(n: int) -> None:
    """pytorch #14632, pytorch #5506."""

    def edited(c: Collective) -> tuple[list[float], float]:
        x = torch.tensor([float(c.rank)])
        pieces = list(c.all_gather(x))
        pieces[0].add_(100.0)
        return [piece.item() for piece in pieces], x.item()

    assert values(n, edited) == [([100.0, 1.0][:n], float(rank)) for rank in range(n)]


def test_one_device_behaves_as_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning #19195, pytorch_xla #9670: no launcher, no process group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with init() as c:
        assert c.all_gather(torch.ones(2, 3)).shape == (1, 2, 3)
        assert c.all_gather({"a": torch.tensor(1)})["a"].shape == (1,)
        assert c.reduce(torch.tensor([3]), "mean").is_floating_point()
        assert c.all_gather_object("x") == ["x"]
        c.barrier()
    assert not torch.distributed.is_initialized()


def test_parameters_are_plain_data_when_detached() -> None:
    """pytorch #181774, pytorch_xla #6319."""

    def plain(c: Collective) -> list[tuple[bool, float, float, bool]]:
        found = []
        for call in (lambda x: c.reduce(x, "sum"), lambda x: c.broadcast(x, 1), lambda x: c.all_gather(x).sum()):
            p = torch.nn.Parameter(torch.tensor([1.0 + c.rank]))
            y = call(p.detach())
            found.append((y.requires_grad, y.item(), p.item(), p.requires_grad))
        return found

    for rank, found in enumerate(values(2, plain)):
        assert found == [(False, result, 1.0 + rank, True) for result in (3.0, 2.0, 3.0)]


class ElsewhereCollective(SingleProcessCollective):
    """Takes tensors of another device than the caller's, and notes where they lie when they arrive."""

    arrived: list[str]

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, device_types=frozenset({"meta"}))

    def _all_reduce(self, x, op):
        self.arrived.append(x.device.type)
        return super()._all_reduce(torch.full(x.shape, 7.0), op)

    def _all_gather(self, x):
        self.arrived.append(x.device.type)
        return super()._all_gather(torch.full(x.shape, 8.0))


def test_data_travels_over_the_device_of_the_backend_and_comes_back() -> None:
    """torchmetrics #2477, Lightning #18803."""
    c = ElsewhereCollective(device="meta")
    c.arrived = []
    c.setup(LaunchEnvironment(0, 1, 0, 1, 0, "127.0.0.1", 0, "single"))
    x = torch.ones(2)
    reduced, gathered = c.all_reduce(x), c.all_gather(x)
    assert c.arrived == ["meta", "meta"]
    assert reduced.device.type == gathered.device.type == "cpu"
    assert (reduced.tolist(), gathered.tolist()) == ([7.0, 7.0], [[8.0, 8.0]])
    c.teardown()


def test_results_have_one_shape_whatever_the_backend() -> None:
    """horovod #3161, pytorch_xla #5022."""

    def stacked(c: Collective) -> torch.Tensor:
        return c.all_gather(torch.tensor([1, 2]) + 2 * c.rank)

    assert [y.tolist() for y in values(2, stacked)] == [[[1, 2], [3, 4]]] * 2
    assert [y.tolist() for y in values(1, stacked)] == [[[1, 2]]]
    assert [y.tolist() for y in values(1, stacked, backend="single")] == [[[1, 2]]]


def test_a_tensor_on_no_device_is_refused() -> None:
    for kind, text in values(2, lambda c: error_of(lambda: c.all_gather(torch.ones(2, device="meta")))):
        assert kind == "TypeError"
        assert "meta device" in text
