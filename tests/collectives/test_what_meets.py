"""What must not meet: backwards of different calls, and messages of another shape."""

import pytest
import torch

from collective_strategy.collectives import Collective, CollectiveError, CollectiveMismatchError
from collective_strategy.gradients import GradientReducer
from collective_strategy.testing import run_ranks


@pytest.mark.parametrize("other", ["all_reduce", "all_gather"])
def test_backwards_of_different_calls_are_refused_on_all_ranks(other: str):
    def run(collective: Collective) -> str:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = torch.tensor([1.0, 2.0], requires_grad=True)
        a, b = collective.all_reduce(x), getattr(collective, other)(y)
        with pytest.raises(CollectiveMismatchError) as raised:
            (a if collective.rank == 0 else b).sum().backward()
        assert collective.all_reduce(1).item() == 2
        return str(raised.value)

    for outcome in run_ranks(2, run, timeout=10, check=True):
        assert "call 1" in outcome.result()
        assert "call 2" in outcome.result()


def test_backwards_in_one_order_pass_also_twice():
    def run(collective: Collective) -> tuple[list[float], list[float]]:
        x = torch.full((2,), 2.0 + collective.rank, dtype=torch.float64, requires_grad=True)
        y = (collective.all_gather(collective.all_reduce(x * x)) ** 3).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad((gradient**2).sum(), x)
        return gradient.tolist(), second.tolist()

    # y = 2 sum_i s_i^3 on each rank, s = x_0^2 + x_1^2 = 13, and both ranks' y count: 2 * 2 * 3 s^2 * 2 x_r
    s = 13.0
    for rank, outcome in enumerate(run_ranks(2, run, timeout=10, check=True)):
        x = 2.0 + rank
        first, _ = outcome.result()
        assert first == pytest.approx([24 * s**2 * x] * 2)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (torch.ones(2), torch.zeros(3)),
        (torch.ones(3), torch.zeros(2)),
        (torch.ones(2, 3), torch.zeros(3, 2)),
        (torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)),
        (torch.ones(2, dtype=torch.float64), torch.zeros(2)),
    ],
)
def test_a_received_tensor_of_another_kind_is_refused(sent: torch.Tensor, expected: torch.Tensor):
    def run(collective: Collective) -> str:
        text = ""
        if collective.rank == 0:
            collective.send(sent, 1)
        else:
            with pytest.raises(CollectiveMismatchError, match="rank 0 sent") as raised:
                collective.recv(expected, 0)
            text = str(raised.value)
        assert collective.all_reduce(1).item() == 2
        return text

    assert "expects" in run_ranks(2, run, timeout=10)[1].result()


@pytest.mark.parametrize("how", ["outside", "local"])
def test_a_norm_of_gradients_that_are_not_reduced_is_refused(how: str):
    def run(collective: Collective) -> list[float]:
        module = torch.nn.Linear(2, 1, bias=False)
        reducer = GradientReducer(module, collective)
        x = torch.ones(1, 2) * (1 + 9 * collective.rank)
        if how == "outside":
            module(x).sum().backward()
        else:
            with reducer.backward(sync=False):
                module(x).sum().backward()
        with pytest.raises(CollectiveError, match="reduce"):
            reducer.clip_grad_norm_(2.0)
        reducer.reduce_gradients()
        reducer.clip_grad_norm_(2.0)
        return module.weight.grad.flatten().tolist()

    for outcome in run_ranks(2, run, timeout=10):
        assert outcome.result() == pytest.approx([2**0.5, 2**0.5], abs=1e-5)
