"""No graph is run by another graph's program: torch_xla's hash does not say which of several equal nodes is used.

https://github.com/pytorch/xla/issues/8353
"""

import os

import pytest
import torch

from collective_strategy import GradientReducer
from collective_strategy.collectives import create_collective
from collective_strategy.testing import run_ranks

ONE, TWO, FIVE = torch.full((3,), 1.0), torch.full((3,), 2.0), torch.full((3,), 5.0)


def on_device():
    import torch_xla

    return [values.to(torch_xla.device()) for values in (ONE, TWO, FIVE)]


def squares_and_sum(chosen):
    """A square of each of three tensors, and the sum of two of the squares."""
    import torch_xla

    squares = [x.square() for x in on_device()]
    total = squares[chosen[0]] + squares[chosen[1]]
    torch_xla.sync()
    return total[0].item()


def difference(turned):
    import torch_xla

    x, y = on_device()[:2]
    torch_xla.sync()
    double, result = x * 2, y - x if turned else x - y
    torch_xla.sync()
    return double[0].item(), result[0].item()


def in_a_process_of_its_own(function):
    """With an XLA device, but not as a rank."""
    return run_ranks(1, lambda _: function(), backend=None, ranks="process", fresh=True)[0].result()


def in_ranks(n, function):
    return [outcome.result() for outcome in run_ranks(n, function, backend="xla")]


def test_torch_xla_alone_confuses_which_of_two_equal_nodes_is_meant():
    assert in_a_process_of_its_own(lambda: [squares_and_sum((0, 1)), squares_and_sum((1, 2))]) == [5.0, 5.0]  # not 29
    assert in_a_process_of_its_own(lambda: [difference(False), difference(True)]) == [(2.0, -1.0), (2.0, -1.0)]  # not 1


def test_in_ranks_each_graph_has_a_program_of_its_own():
    def values(_):
        return [squares_and_sum(chosen) for chosen in ((0, 1), (1, 2), (0, 2), (0, 1))]

    assert in_ranks(2, values) == [[5.0, 29.0, 26.0, 5.0]] * 2


def test_which_of_two_equal_nodes_is_a_result_counts_too():
    def values(_):
        import torch_xla

        seen = []
        for kept in (0, 1):
            squares = [x.square() for x in on_device()]
            total = squares[0] - squares[1]
            squares = squares[kept]
            torch_xla.sync()
            seen.append((squares[0].item(), total[0].item()))
        return seen

    assert in_ranks(1, values) == [[(1.0, -3.0), (4.0, -3.0)]]


class SumOfSquares(torch.autograd.Function):
    """Whose backward computes `squares_and_sum`."""

    @staticmethod
    def forward(ctx, x, chosen):
        ctx.chosen = chosen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * squares_and_sum(ctx.chosen), None


def test_graphs_that_are_cut_in_the_thread_of_a_backward_have_their_own_programs_too():
    def gradients(collective):
        x = torch.ones(1, device=collective.device, requires_grad=True)
        pairs = (0, 1), (0, 1), (1, 2)
        return [torch.autograd.grad(SumOfSquares.apply(x, pair).sum(), x)[0].item() for pair in pairs]

    assert in_ranks(2, gradients) == [[5.0, 5.0, 29.0]] * 2


def test_layers_in_another_order_have_their_own_backward():
    """The order changes, the graphs differ in nothing else."""

    def gradients(collective):
        layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
        for layer, factor in zip(layers, (2.0, 3.0), strict=True):
            layer.to(collective.device)
            torch.nn.init.constant_(layer.weight, factor)
        seen = []
        for order in (layers, layers[::-1]):
            x = torch.ones(1, 2, device=collective.device)
            for layer in order:
                layer.zero_grad()
                x = torch.tanh(layer(x) / 10)
            x.sum().backward()
            seen.append([layer.weight.grad[0, 0].item() for layer in layers])
        return seen

    def expected():
        layers = [torch.full((2, 2), factor, requires_grad=True) for factor in (2.0, 3.0)]
        seen = []
        for order in (layers, layers[::-1]):
            x = torch.ones(1, 2)
            for weight in order:
                weight.grad = None
                x = torch.tanh(x @ weight.T / 10)
            x.sum().backward()
            seen.append([weight.grad[0, 0].item() for weight in layers])
        return seen

    right = expected()
    assert right[0] != pytest.approx(right[1])
    for seen in in_ranks(2, gradients):
        for one, other in zip(seen, right, strict=True):
            assert one == pytest.approx(other)


def test_what_no_result_needs_makes_no_new_program():
    """Ranks that drop a value on the way still share a program, and numbers that change are data."""

    def programs(collective):
        import torch_xla
        import torch_xla.debug.metrics as metrics

        x = on_device()[0]
        counts = []
        for step in range(4):
            collective.barrier()
            counts.append(metrics.counter_value("UncachedCompile"))
            collective.barrier()
            if step % 2 == collective.rank:
                _ = x.exp()
                del _
            result = x * (2.5 + step)
            torch_xla.sync()
            del result
        return counts

    for counts in in_ranks(2, programs):
        assert counts[1] == counts[0] + 1
        assert counts[1:] == counts[1:2] * 3


def norms(norm_of):
    """The norms of two of three gradients, pending squares of (1, 2, 5): of the first two, then of the last two."""
    import torch_xla

    with create_collective("xla").setup() as collective:
        weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
        module = torch.nn.ParameterList(weights).to(collective.device)
        reducer = GradientReducer(module, collective)
        seen = []
        for start in (0, 1):
            module.zero_grad()
            gradients = on_device()
            with reducer.backward():
                sum(p * g for p, g in zip(module, gradients, strict=True)).sum().backward()
            for parameter in module:
                parameter.grad = parameter.grad * parameter.grad
            norm = norm_of(reducer, list(module)[start : start + 2])
            torch_xla.sync()
            seen.append(norm.item())
        reducer.close()
        return seen, os.getpid()


def test_the_norm_of_some_gradients_is_right_without_ranks_too():
    """Two optimizers with equal shapes, each clipped: the engine's norm is a program of its own, on TPUs as well."""

    def ours(reducer, parameters):
        return reducer.grad_norm(parameters)

    def torchs(_, parameters):
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])

    right = [(3 * (1 + 16)) ** 0.5, (3 * (16 + 625)) ** 0.5]
    assert in_a_process_of_its_own(lambda: norms(ours))[0] == pytest.approx(right)
    assert in_a_process_of_its_own(lambda: norms(torchs))[0] == pytest.approx([right[0]] * 2)  # confused
