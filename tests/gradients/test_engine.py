"""What a gradient is after unusual backwards, on two ranks whose factors are 1 and 3, so that a mean is 2."""

import warnings

import pytest
import torch
from engine_ranks import common, filled, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from collective_strategy import GradientReducer
from collective_strategy.gradients import BucketSizes


def factor(collective) -> float:
    return 1.0 + 2 * collective.rank


def test_several_backwards_of_one_graph_add_up():
    def gradients(collective):
        (w,) = module = weights(0.0)
        reducer = GradientReducer(module, collective)
        y = w * factor(collective)
        seen = []
        for retain in (True, True, False):
            with reducer.backward():
                y.backward(retain_graph=retain)
            seen.append(w.grad.item())
        return seen

    assert common(2, gradients) == [2.0, 4.0, 6.0]


def test_several_backwards_in_one_context_add_up():
    """v is only in the second loss, w in both, and each has a bucket of its own."""

    def gradients(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective, sizes=BucketSizes(packed=1, first=1))
        seen = []
        for _ in range(3):
            module.zero_grad()
            with reducer.backward():
                (w * factor(collective)).backward()
                ((w + v) * factor(collective)).backward()
            seen.append((w.grad.item(), v.grad.item()))
        return seen

    assert common(2, gradients) == [(4.0, 2.0)] * 3


def test_a_gradient_asked_for_inside_leaves_nothing():
    def gradients(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            torch.autograd.grad(w * factor(collective), w)
        with reducer.backward():
            (w * v * factor(collective)).backward(inputs=[torch.ones(1, requires_grad=True), v])
        return w.grad is None, v.grad.item()

    assert common(2, gradients) == (True, 0.0)


def test_a_gradient_penalty():
    """f = c w^2, penalty (df/dx)^2 with f = c x w^2: 2 c w + 4 c^2 w^3 at w = x = 1; c is 1 and 3."""

    def gradients(collective):
        (w,) = module = weights(1.0)
        reducer = GradientReducer(module, collective)
        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        f = factor(collective) * x * w**2
        (slope,) = torch.autograd.grad(f, x, create_graph=True)
        with reducer.backward():
            (f + slope**2).backward()
        return w.grad.item()

    assert common(2, gradients) == (2 + 6 + 4 + 36) / 2


def test_create_graph_gives_a_reduced_gradient_without_a_graph():
    def gradients(collective):
        (w,) = module = weights(2.0)
        reducer = GradientReducer(module, collective)
        with warnings.catch_warnings(), reducer.backward():
            warnings.simplefilter("ignore")
            (w**2 * factor(collective)).backward(create_graph=True)
        return w.grad.item(), w.grad.requires_grad

    assert common(2, gradients) == (8.0, False)


class BackwardInside(torch.autograd.Function):
    """Runs a backward of its own inside backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            ctx.layer(x.detach()).sum().backward()
        return gradient, None


@pytest.mark.parametrize(
    "sizes",
    [BucketSizes(packed=1, first=1), BucketSizes(moved=1, packed=1, first=1), BucketSizes(), BucketSizes(moved=1)],
    ids=["a bucket each", "moved, a bucket each", "packed", "moved, packed"],
)
def test_a_backward_inside_backward(sizes):
    """Layers of ones: h = (2f, 2f) goes twice into the second, once inside."""

    def gradients(collective):
        first, second = module = filled(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        reducer = GradientReducer(module, collective, sizes=sizes)
        seen = []
        for _ in range(3):
            module.zero_grad()
            h = first(torch.full((1, 2), factor(collective)))
            with reducer.backward():
                second(BackwardInside.apply(h, second)).sum().backward()
            seen.append((first.weight.grad[0, 0].item(), second.weight.grad[0, 0].item()))
        return seen

    assert common(2, gradients) == [(4.0, 8.0)] * 3


@pytest.mark.parametrize(
    "sizes",
    [BucketSizes(packed=1, first=1), BucketSizes(moved=1, packed=1, first=1), BucketSizes(), BucketSizes(moved=1)],
    ids=["a bucket each", "moved, a bucket each", "packed", "moved, packed"],
)
def test_a_layer_in_two_reentrant_checkpoints_counts_once_each(sizes):
    def gradients(collective):
        (layer,) = module = filled(nn.Linear(1, 1, bias=False))
        reducer = GradientReducer(module, collective, sizes=sizes)
        seen = []
        for _ in range(4):
            module.zero_grad()
            x = torch.full((1, 1), factor(collective), requires_grad=True)
            h = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
            with reducer.backward():
                h.sum().backward()
            seen.append(layer.weight.grad.item())
        return seen

    assert common(2, gradients) == [4.0] * 4  # d(w w x)/dw = 2x


def test_zeroed_gradients_are_kept_as_tensors_or_dropped():
    def gradients(collective):
        (w,) = module = weights(0.0)
        reducer = GradientReducer(module, collective)
        seen = []
        for to_none in (False, True, False, False, True):
            module.zero_grad(set_to_none=to_none)
            with reducer.backward():
                (w * factor(collective)).backward()
            seen.append(w.grad.item())
        return seen

    assert common(2, gradients) == [2.0] * 5


def test_local_increments_leave_the_reduced_part_equal_bit_by_bit():
    def gradients(collective):
        torch.manual_seed(collective.rank)
        layer = nn.Linear(50, 1, bias=False)
        reducer = GradientReducer(layer, collective)
        for sync in (True, False, False, True):
            with reducer.backward(sync=sync):
                layer(torch.randn(1, 50) * (1e3 if not sync else 1)).sum().backward()
        return layer.weight.grad.tolist()

    common(2, gradients)


def test_lbfgs_calls_its_closure_as_often_as_it_likes():
    """One least-squares problem over the samples of both ranks."""
    x = torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train(closure_of, layer):
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=8)
        for _ in range(3):
            optimizer.step(closure_of(optimizer))
        return layer.weight.tolist()

    def on_ranks(collective):
        (layer,) = filled(nn.Linear(3, 1, bias=False, dtype=torch.float64))
        reducer = GradientReducer(layer, collective)

        def closure_of(optimizer):
            def closure():
                optimizer.zero_grad()
                loss = (layer(x[collective.rank].to(collective.device)) - 1).square().mean()
                with reducer.backward():
                    loss.backward()
                return collective.all_reduce(loss.detach(), "mean")

            return closure

        return train(closure_of, layer)

    (alone,) = filled(nn.Linear(3, 1, bias=False, dtype=torch.float64))

    def closure_of(optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (alone(x).squeeze(-1) - 1).square().mean()
            loss.backward()
            return loss

        return closure

    expected = torch.tensor(train(closure_of, alone))
    assert torch.allclose(torch.tensor(common(2, on_ranks)), expected, rtol=0, atol=1e-6)


def test_a_loss_that_is_not_finite_or_missing_on_one_rank():
    def gradients(collective):
        (w,) = module = weights(0.0)
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            (w * (float("nan") if collective.rank else 1.0)).backward()
        finite = bool(w.grad.isfinite())
        module.zero_grad()
        with reducer.backward():
            if collective.rank == 0:
                (w * 3).backward()
        return finite, w.grad.item()

    assert common(2, gradients) == (False, 1.5)
