"""Gathers that cut the graph, gradients off by the world size, reductions that were local in backward."""

import pytest
import torch
from on_ranks import values
from torch.utils.checkpoint import checkpoint

from collective_strategy import GradientReducer
from collective_strategy.collectives import Collective

MESH = {"data": 2, "model": 2}


def test_a_gather_carries_the_gradients_of_all_ranks() -> None:
    """accelerate #76, Lightning #4725, SLIP #31."""

    def gather(c: Collective) -> list[float]:
        x = torch.ones(2, requires_grad=True)
        (c.all_gather(x) * (1 + c.rank)).sum().backward()
        return x.grad.tolist()

    assert values(2, gather) == [[3.0, 3.0]] * 2
    assert values(4, gather) == [[10.0, 10.0]] * 4


def test_a_loss_over_the_global_batch_has_the_single_process_gradient() -> None:
    """open_clip #616, lightly #1977, DeCLUTR #212: with w = 1 and x = 1, 3, (mean of w x)^2 = 4 w^2."""

    def trained(c: Collective) -> float:
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        reducer = GradientReducer(module, c)
        features = module(torch.tensor([[1.0 + 2 * c.rank]]))
        with reducer.backward():
            (c.all_gather(features).mean() ** 2).backward()
        return module.weight.grad.item()

    assert values(2, trained) == [8.0, 8.0]


def test_gradients_of_a_group_come_from_its_members() -> None:
    """Lightning #6624, Lightning #5122."""

    def gather(c: Collective) -> tuple[float, float]:
        found = []
        for axis in ("model", "data"):
            x = torch.ones(1, requires_grad=True)
            (c[axis].all_gather(x, to="replicate") * (1 + c.rank)).sum().backward()
            found.append(x.grad.item())
        return found[0], found[1]

    assert values(4, gather, mesh=MESH) == [(3.0, 4.0), (3.0, 6.0), (7.0, 4.0), (7.0, 6.0)]


def test_sum_and_mean_have_their_gradients() -> None:
    """pytorch #190007, horovod #2654."""

    def reduced(c: Collective) -> list[float]:
        found = []
        for op in ("sum", "mean"):
            x = torch.ones(1, requires_grad=True)
            (c.reduce(x, op) * (1 + c.rank)).sum().backward()
            found.append(x.grad.item())
        return found

    assert values(2, reduced) == [[3.0, 1.5]] * 2


def test_a_mean_over_an_axis_divides_the_gradient_by_its_size() -> None:
    def reduced(c: Collective) -> float:
        x = torch.ones(1, requires_grad=True)
        (c["model"].reduce(x, "mean", to="replicate") * (1 + c.rank)).sum().backward()
        return x.grad.item()

    assert values(4, reduced, mesh=MESH) == [1.5, 1.5, 3.5, 3.5]


def test_a_reduction_inside_a_loss_is_not_local_in_backward() -> None:
    """vector-quantize-pytorch #158, pytorch #121587."""

    def reduced(c: Collective) -> tuple[float, float, bool]:
        p = torch.ones(1, requires_grad=True)
        y = c.reduce(p * 2, "sum")
        (y * (1 + c.rank)).sum().backward()
        return y.item(), p.grad.item(), c.reduce((p * 2).detach(), "sum").requires_grad

    assert values(2, reduced) == [(4.0, 6.0, False)] * 2


def test_second_derivatives_keep_the_terms_of_other_ranks() -> None:
    """pytorch #63929, pytorch #63812, pytorch #47562."""

    def twice(c: Collective) -> tuple[float, float]:
        x = torch.full((1,), 2.0 + c.rank, requires_grad=True)
        (g,) = torch.autograd.grad((c.all_gather(x) ** 3).sum(), x, create_graph=True)
        (g**2).sum().backward()
        return g.item(), x.grad.item()

    assert values(2, twice) == [(24.0, 1152.0), (54.0, 3888.0)]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_recomputed_blocks_give_the_same_gradients(reentrant: bool | None) -> None:
    """pytorch #24005, VeOmni #979."""

    def recomputed(c: Collective) -> list[float]:
        def block(z: torch.Tensor) -> torch.Tensor:
            return c.all_gather(z * z).sum() * (1 + c.rank)

        x = torch.full((2,), 1.0 + c.rank, requires_grad=True)
        loss = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        loss.backward()
        return x.grad.tolist()

    assert values(2, recomputed) == [[6.0, 6.0], [12.0, 12.0]]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_layer_used_in_two_recomputed_blocks_stays_equal_on_all_ranks(reentrant: bool | None) -> None:
    def trained(c: Collective) -> list[float]:
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(layer.weight, 0.5)
        reducer = GradientReducer(layer, c)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

        def block(z: torch.Tensor) -> torch.Tensor:
            return c.all_gather(layer(z)).mean(0)

        for _ in range(2):
            x = torch.full((1, 2), 1.0 + c.rank, requires_grad=True)
            for _block in range(2):
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            with reducer.backward():
                x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.flatten().tolist()

    first, second = values(2, trained)
    assert first == second
    # One process on the joined batch: both blocks average over the ranks.
    weight = torch.full((2, 2), 0.5, requires_grad=True)
    for _ in range(2):
        x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
        mean = (x @ weight.t()).mean(0, keepdim=True)
        (gradient,) = torch.autograd.grad((mean @ weight.t()).sum(), weight)
        with torch.no_grad():
            weight -= 0.01 * gradient
    assert first == pytest.approx(weight.flatten().tolist(), rel=1e-5)
