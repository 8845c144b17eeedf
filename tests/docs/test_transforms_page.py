"""What the page on transforms says and no other test does."""

import pytest
import torch
from torch.autograd import forward_ad

from collective_strategy.testing import run_ranks


def results(function, **settings):
    return [outcome.result() for outcome in run_ranks(2, function, **settings)]


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_transforms_that_map_are_refused(transform):
    def refused(collective):
        with pytest.raises(NotImplementedError, match=r"under torch\.vmap is refused"):
            transform(lambda x: collective.all_reduce(x * x).sum())(torch.ones(2))
        return collective.all_reduce(1).item()

    assert results(refused) == [2, 2]


def test_the_tangent_of_a_collective_is_the_collective_of_the_tangents():
    def tangents(collective):
        x = torch.ones(2)
        with forward_ad.dual_level():
            y = collective.all_gather(forward_ad.make_dual(x, x * (collective.rank + 1)), dim=0)
            forward = forward_ad.unpack_dual(y).tangent.tolist()
        return forward, torch.func.jvp(collective.all_reduce, (x,), (x * (collective.rank + 1),))[1].tolist()

    assert results(tangents) == [([1, 1, 2, 2], [3, 3])] * 2


def test_vjp_and_nested_grad():
    def derivatives(collective):
        weight = collective.rank + 1.0
        _, pull = torch.func.vjp(collective.all_reduce, torch.tensor(2.0))
        # f = weight * (sum of x^3), so f' is 3 x^2 times the sum of the weights, 3, and so on.
        cubes = torch.func.grad(lambda x: weight * collective.all_reduce(x**3))
        return pull(torch.tensor(weight))[0].item(), cubes(torch.tensor(2.0)).item()

    assert results(derivatives) == [(3, 36)] * 2


def test_any_compiled_graph_refuses_gradients_of_gradients():
    compiled = torch.compile(lambda x: (x.sin() * x).sum(), backend="aot_eager")
    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_compiler_eager_fails_on_any_uncompiled_function_inside_torch_func():
    """If this fails, torch has learned it: correct the page, and add "eager" to the test of torch.func there."""
    same = torch.compiler.disable(lambda x: x * 1)

    def loss(x):
        return same(x.sin()).cos().sum()

    with pytest.raises(AssertionError):
        torch.compile(torch.func.grad(loss), backend="eager")(torch.ones(2))
