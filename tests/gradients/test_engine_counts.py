"""How much is sent, when, and in which memory."""

import itertools
import random
import time

import pytest
import torch
from engine_ranks import MESH_2X2, MODEL_2, common, per_rank, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from collective_strategy import GradientReducer
from collective_strategy.gradients import BucketSizes
from collective_strategy.sharing import shared

LAYERS = 6
A_BUCKET_EACH = BucketSizes(packed=1, first=1)


def deep(collective, marked=()) -> nn.Sequential:
    """Layers of 360 kB."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(LAYERS)])
    for i in marked:
        shared(layers[i], over="model")
    return layers


def pointers(reducer) -> list[int]:
    return [bucket._buffer.data_ptr() for bucket in reducer._plan.buckets]


class Counting:
    """Counts the all-reduces that leave the engine, on every group of it."""

    def __init__(self, monkeypatched: pytest.MonkeyPatch, reducer: GradientReducer) -> None:
        self.count = 0
        for group in reducer._communicators._made.values():
            original = group.all_reduce_

            def counted(*args, original=original, **kwargs):
                self.count += 1
                return original(*args, **kwargs)

            monkeypatched.setattr(group, "all_reduce_", counted)

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


def test_one_all_reduce_per_bucket_and_none_on_inner_micro_batches():
    """Shared weights travel over both axes at once: 3 buckets over all ranks, 3 over the data axis, and the flags of
    both groups."""

    def count(collective):
        layers = deep(collective, marked=(0, 2, 4))
        reducer = GradientReducer(layers, collective, sizes=A_BUCKET_EACH)
        with pytest.MonkeyPatch.context() as patch:
            counting = Counting(patch, reducer)
            seen = []
            for micro in range(6):
                with reducer.backward(sync=micro % 3 == 2):
                    layers(torch.ones(1, 300)).sum().backward()
                seen.append(counting.since())
            with reducer.no_sync(), reducer.backward():
                layers(torch.ones(1, 300)).sum().backward()
            seen.append(counting.since())
            with reducer.backward():
                pass
            seen.append(counting.since())
        return seen, len(reducer._plan.buckets), reducer.statistics.all_reduces, reducer.statistics.reductions

    assert common(4, count, mesh=MESH_2X2) == ([0, 0, 8, 0, 0, 8, 0, 8], 6, 24, 3)


def test_small_gradients_share_a_bucket():
    def count(collective):
        module = weights(*[0.0] * 400)
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            sum(module).backward()
        return len(reducer._plan.buckets), reducer.statistics.all_reduces

    assert common(2, count) == (1, 2)


def test_choosing_among_plans_costs_one_more_until_none_was_chosen_for_100_backwards():
    def count(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)

        def step(trainable):
            module.zero_grad()
            v.requires_grad_(trainable)
            before = reducer.statistics.all_reduces
            with reducer.backward():
                ((w + v) * (1 + 2 * collective.rank)).backward()
            assert w.grad.item() == 2.0
            assert (v.grad.item() if trainable else 2.0) == 2.0
            return reducer.statistics.all_reduces - before

        seen = [step(trainable) for trainable in (True, False, True, False)]
        settling = [step(False) for _ in range(100)]
        seen.append(step(False))
        seen += [step(True), step(True)]
        return seen, set(settling), reducer.statistics.agreements

    assert common(2, count) == ([2, 2, 3, 3, 2, 2, 3], {3}, 3)


@pytest.mark.parametrize(
    ("marked", "mesh"), [((), None), (range(LAYERS), MODEL_2), ((1, 4), MESH_2X2)], ids=["private", "shared", "both"]
)
@pytest.mark.parametrize("unused_on_one_rank", [False, True])
def test_all_buckets_but_the_last_two_are_sent_before_the_last_hook(marked, mesh, unused_on_one_rank):
    def log(collective):
        layers = deep(collective, marked)
        reducer = GradientReducer(layers, collective, sizes=A_BUCKET_EACH)
        used = [layer for i, layer in enumerate(layers) if not (unused_on_one_rank and collective.rank == 1 and i == 3)]
        for _ in range(2):
            x = torch.ones(1, 300)
            for layer in used:
                x = layer(x)
            with reducer.backward():
                x.sum().backward()
        return reducer.statistics.launched_by, reducer.statistics.hooks, len(used)

    for launched_by, hooks, used in per_rank(4 if mesh == MESH_2X2 else 2, log, mesh=mesh):
        assert hooks == used
        assert len(launched_by) == LAYERS
        assert launched_by == sorted(launched_by)
        assert all(fired < hooks for fired in launched_by[:-2])
        assert launched_by[0] == 1  # the very first hook sends the first bucket


@pytest.mark.parametrize("moved", [1, 10**6], ids=["moved", "packed"])
def test_a_bucket_is_sent_with_its_last_gradient_in_whatever_order_they_come(moved):
    """Four buckets of three weights; in every backward the weights are ready in another order, on each rank another."""

    def log(collective):
        weights = nn.ParameterList([nn.Parameter(torch.ones(10)) for _ in range(12)])
        reducer = GradientReducer(weights, collective, sizes=BucketSizes(moved, packed=120, first=120))
        dice = random.Random(collective.rank)
        outcomes = []
        for _ in range(20):
            weights.zero_grad()
            order = dice.sample(range(12), 12)
            y = torch.ones(10) * (1.0 + 2 * collective.rank)
            for i in reversed(order):  # the last factor's gradient is ready first
                y = y * weights[i]
            with reducer.backward():
                y.sum().backward()
            complete = [max(order.index(i) for i in range(k, k + 3)) + 1 for k in (9, 6, 3)]
            expected = [*itertools.accumulate(complete, max), 12]
            outcomes.append(reducer.statistics.launched_by == expected)
            outcomes += [weight.grad.tolist() == [2.0] * 10 for weight in weights]
        return all(outcomes)

    assert common(2, log)


def test_a_bucket_whose_last_weight_is_left_out_goes_with_the_next():
    """Three buckets of two weights. The second weight of the first bucket is left out by every second backward."""

    def log(collective):
        weights = nn.ParameterList([nn.Parameter(torch.ones(10)) for _ in range(6)])
        reducer = GradientReducer(weights, collective, sizes=BucketSizes(packed=80, first=80))
        seen = []
        for step in range(6):
            weights.zero_grad()
            y = torch.ones(10)
            for i in [0, 1, 2, 3, *([4] if step % 2 == 0 else []), 5]:
                y = y * weights[i]
            with reducer.backward():
                y.sum().backward()
            seen.append((reducer.statistics.launched_by, weights[4].grad is None))
        return seen

    assert common(2, log) == [([2, 4, 6], False), ([3, 3, 5], True)] * 3


def test_reentrant_checkpoints_are_overlapped_once_they_are_known():
    def log(collective):
        layers = deep(collective)
        reducer = GradientReducer(layers, collective, sizes=A_BUCKET_EACH)
        for _ in range(2):
            x = torch.ones(1, 300, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=True)
            with reducer.backward():
                x.sum().backward()
        return reducer.statistics.launched_by

    assert common(2, log) == [1, 2, 3, 4, 5, 6]


def test_a_buffer_is_used_again_but_never_while_a_gradient_in_it_is_alive():
    def check(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        x = 1.0 + 2 * collective.rank

        def step(k, **how):
            module.zero_grad(**how)
            with reducer.backward():
                ((w + v) * k * x).backward()

        step(1.0)
        held = w.grad
        step(10.0)
        values = [held.item(), w.grad.item()]
        array = v.grad.numpy()
        step(100.0)
        values += [float(array), v.grad.item()]
        detached = v.grad.detach()
        step(1000.0)
        values += [detached.item(), v.grad.item()]
        del held, array, detached
        step(1.0)
        places = []
        for k in range(20):
            time.sleep(0.002)  # the backend lets go of a tensor a moment after its operation is done
            step(float(k))
            places.append(pointers(reducer))
        reused = sum(a == b for a, b in itertools.pairwise(places)) > 10
        step(3.0, set_to_none=False)
        kept = w.grad
        step(5.0, set_to_none=False)
        return values, reused, kept is w.grad, kept.item()

    assert common(2, check) == ([2.0, 20.0, 20.0, 200.0, 200.0, 2000.0], True, True, 10.0)


@pytest.mark.parametrize("in_a_bucket", [True, False])
def test_a_gradient_is_a_tensor_of_its_own_to_autograd(in_a_bucket):
    """`detach_` refuses views; older optimizers call it."""

    def check(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        if in_a_bucket:
            with reducer.backward():
                (w + v).backward()
        else:
            (w + v).backward()
            reducer.reduce_gradients()
        w.grad.detach_().mul_(5)
        return w.grad.item(), v.grad.item()

    assert common(2, check) == (5.0, 1.0)


def test_gradients_lie_in_the_buckets_memory_which_is_used_again_when_nobody_holds_them():
    """Both ways into it: small gradients are copied there together, large ones are moved."""

    def check(collective):
        w, v = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(10))
        module = nn.ParameterList([w, v])
        reducer = GradientReducer(module, collective, sizes=BucketSizes(moved=4000))
        (bucket,) = reducer._plan.buckets
        seen, buffers, kept = [], [], []
        for step in range(4):
            module.zero_grad()
            with reducer.backward():
                ((w.sum() + v.sum()) * (1.0 + 2 * collective.rank)).backward()
            seen.append((w.grad[-1].item(), v.grad[-1].item()))
            time.sleep(0.05)  # torch.distributed's thread lets go of the buffer a moment after the all-reduce
            buffers.append(bucket._buffer.data_ptr())
            inside = range(buffers[-1], buffers[-1] + 4 * 1010)
            assert w.grad.data_ptr() in inside
            assert v.grad.data_ptr() in inside
            if step == 1:
                kept.append(v.grad)  # somebody holds one of them: that memory is left alone
        return (
            set(seen),
            buffers[0] == buffers[1],
            buffers[1] == buffers[2],
            buffers[2] == buffers[3],
            kept[0][0].item(),
        )

    assert common(2, check) == ({(2.0, 2.0)}, True, False, True, 2.0)


def test_a_rank_that_is_late_is_waited_for():
    def check(collective):
        (w,) = module = weights(0.0)
        reducer = GradientReducer(module, collective)
        time.sleep(0.3 * collective.rank)
        with reducer.backward():
            if collective.rank == 0:
                w.backward()
        return w.grad.item()

    assert common(2, check) == 0.5
