"""Models that change while they are trained: frozen, toggled, replaced, converted and copied weights."""

import copy
import pickle

import pytest
import torch
from engine_ranks import MESH_2X2, common, errors, filled, per_rank, weights
from torch import nn

from collective_strategy import GradientReducer
from collective_strategy.collectives.errors import CollectiveError, CollectiveMismatchError
from collective_strategy.gradients import BucketSizes
from collective_strategy.sharing import shared


def factor(collective) -> float:
    return 1.0 + 2 * collective.rank


def backward(reducer, collective, *terms, sync=True):
    with reducer.backward(sync=sync):
        (sum(terms) * factor(collective)).sum().backward()


def test_freezing_and_unfreezing():
    def gradients(collective):
        w, v = module = weights(0.0, 0.0)
        v.requires_grad_(False)
        reducer = GradientReducer(module, collective)
        seen = []
        for trainable in (False, True, True, False, True):
            module.zero_grad()
            v.requires_grad_(trainable)
            backward(reducer, collective, w, v)
            seen.append((w.grad.item(), v.grad.item() if v.grad is not None else None))
        return seen, reducer.statistics.agreements

    frozen, thawed = (2.0, None), (2.0, 2.0)
    assert common(2, gradients) == ([frozen, thawed, thawed, frozen, thawed], 2)


def test_a_gan_that_toggles_for_50_steps_agrees_twice():
    """Beside DistributedDataParallel's answer, the mean by hand: each optimizer only moves its own weights."""

    def train(collective):
        generator, discriminator = module = weights(1.0, 1.0)
        reducer = GradientReducer(module, collective)
        optimizers = [torch.optim.SGD([w], lr=0.01) for w in module]
        for step in range(50):
            for turn, optimizer in enumerate(optimizers):
                generator.requires_grad_(turn == 0)
                discriminator.requires_grad_(turn == 1)
                optimizer.zero_grad()
                sign = 1 if turn else -1
                with reducer.backward():
                    (sign * generator * discriminator * (factor(collective) + step)).backward()
                optimizer.step()
        return generator.item(), discriminator.item(), reducer.statistics.agreements

    g = d = 1.0
    for step in range(50):
        g += 0.01 * d * (2 + step)
        d -= 0.01 * g * (2 + step)
    ours_g, ours_d, agreements = common(2, train)
    assert (ours_g, ours_d) == pytest.approx((g, d), rel=1e-10)
    assert agreements == 1 + 2


def test_old_gradients_of_a_frozen_weight_stay():
    def gradients(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        backward(reducer, collective, w, v)
        v.requires_grad_(False)
        for _ in range(2):
            backward(reducer, collective, w)
        return w.grad.item(), v.grad.item()

    assert common(2, gradients) == (6.0, 2.0)


def test_a_local_gradient_of_a_weight_that_is_frozen_afterwards_is_reduced():
    def gradients(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        backward(reducer, collective, w, v, sync=False)
        v.requires_grad_(False)
        backward(reducer, collective, w)
        return w.grad.item(), v.grad.item()

    assert common(2, gradients) == (4.0, 2.0)


def test_replaced_and_converted_weights_are_found():
    def gradients(collective):
        (layer,) = module = filled(nn.Linear(1, 1, bias=False))
        reducer = GradientReducer(module, collective)

        def step(sync=True):
            x = torch.full((1, 1), factor(collective), dtype=layer.weight.dtype)
            with reducer.backward(sync=sync):
                layer(x).sum().backward()
            return layer.weight.grad.item()

        seen = [step()]
        layer.load_state_dict({"weight": torch.zeros(1, 1)}, assign=True)
        seen += [step(), step()]
        layer.weight = nn.Parameter(torch.zeros(1, 1))
        step(sync=False)
        seen.append(step())
        module.zero_grad()
        layer.bfloat16()
        seen += [step(), step()]
        return seen, str(layer.weight.grad.dtype)

    assert common(2, gradients) == ([2.0, 2.0, 4.0, 4.0, 2.0, 4.0], "torch.bfloat16")


def test_added_and_removed_weights():
    def gradients(collective):
        module = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.0))})
        reducer = GradientReducer(module, collective)
        backward(reducer, collective, module["a"])
        module["b"] = nn.Parameter(torch.tensor(0.0))
        backward(reducer, collective, module["a"], module["b"])
        del module["a"]
        backward(reducer, collective, module["b"])
        return module["b"].grad.item()

    assert common(2, gradients) == 4.0


def test_a_module_without_weights_may_be_replaced_at_will():
    def agreements(collective):
        module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
        reducer = GradientReducer(module, collective)
        for _ in range(3):
            module[1] = nn.Tanh()
            backward(reducer, collective, module(torch.ones(1)))
        module[2] = nn.Linear(1, 1, bias=False)
        backward(reducer, collective, module(torch.ones(1)))
        return reducer.statistics.agreements, module[2].weight.grad is not None

    assert common(2, agreements) == (2, True)


def test_copies_are_free_and_the_original_goes_on():
    def gradients(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        backward(reducer, collective, w, v)
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for other in copies:
            (other[0] * factor(collective)).backward()
        backward(reducer, collective, w)
        return w.grad.item(), v.grad.item(), [other[1].grad is not None for other in copies]

    assert common(2, gradients)[:2] == (4.0, 2.0)


# What is refused, and how


def test_a_lazy_weight_is_refused_with_its_name():
    for error in errors(2, lambda collective: GradientReducer(nn.Sequential(nn.LazyLinear(2)), collective)):
        assert "parameter 0.weight has no shape yet" in str(error)
        assert "dummy batch" in str(error)


def test_a_weight_frozen_on_one_rank_only_is_refused_on_all():
    def train(collective):
        w, v = module = weights(0.0, 0.0)
        reducer = GradientReducer(module, collective)
        try:
            v.requires_grad_(collective.rank == 0)
            backward(reducer, collective, w, v)
        finally:
            reducer.close()

    for error in errors(2, train):
        assert isinstance(error, CollectiveMismatchError)
        assert "parameter 1 has requires_grad True on rank 0 and False on rank 1" in str(error)


def test_toggling_on_one_rank_only_is_refused_on_all_also_where_the_choice_is_known():
    def train(collective):
        first, second = module = filled(nn.Linear(2, 2), nn.Linear(3, 2))
        reducer = GradientReducer(module, collective)
        try:
            for turns in ((True, True), (False, False), (True, True), (True, False)):
                first.requires_grad_(turns[collective.rank])
                backward(reducer, collective, first(torch.ones(1, 2)), second(torch.ones(1, 3)))
        finally:
            reducer.close()

    for error in errors(2, train):
        assert isinstance(error, CollectiveMismatchError)
        assert "parameter 0.weight has requires_grad True on rank 0 and False on rank 1" in str(error)


@pytest.mark.parametrize("difference", ["role", "mark", "shape", "dtype", "missing", "order"])
def test_a_difference_between_two_ranks_is_refused_on_all_four(difference):
    """Ranks 0 and 2 are one data column, 1 and 3 the other; only 2 and 3 differ."""

    def build(collective):
        other = collective.rank >= 2
        head = nn.Linear(4 if difference == "shape" and other else 3, 2)
        if difference == "dtype" and other:
            head.double()
        parts = {"body": nn.Linear(2, 3), "head": head}
        if difference == "missing" and other:
            del parts["head"]
        if difference == "order" and other:
            parts = dict(reversed(parts.items()))
        module = nn.ModuleDict(parts)
        if difference == "role":
            shared(module["body"], over="model", grad="mean" if other else "sum")
        if difference == "mark" and not other:
            shared(module["body"], over="model")
        GradientReducer(module, collective)

    found = errors(4, build, mesh=MESH_2X2)
    texts = {str(error) for error in found}
    assert len(texts) == 1
    assert all(isinstance(error, CollectiveMismatchError) for error in found)
    (text,) = texts
    assert "head" in text if difference in ("shape", "dtype", "missing") else "body" in text or difference == "order"
    assert "rank 2" in text or "rank 3" in text


@pytest.mark.parametrize("sizes", [BucketSizes(), BucketSizes(moved=1)], ids=["packed", "moved"])
def test_an_exception_before_anything_was_sent_leaves_the_gradients_of_this_rank(sizes):
    """They are local, as after no_sync, and the next backward reduces them too."""

    def train(collective):
        w, v, unused = module = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(3)])
        reducer = GradientReducer(module, collective, sizes=sizes)

        def backward(raising):
            middle = w * 1.0
            if raising:
                middle.register_hook(lambda _gradient: 1 / 0)
            with reducer.backward():
                ((middle + 2 * v) * (1.0 + 2 * collective.rank)).sum().backward()

        backward(False)
        module.zero_grad()
        with pytest.raises(ZeroDivisionError):
            backward(True)
        after = w.grad, v.grad.tolist(), unused.grad
        backward(False)
        return after, w.grad.tolist(), v.grad.tolist(), unused.grad

    for rank, outcome in enumerate(per_rank(2, train)):
        assert outcome == ((None, [2.0 + 4 * rank] * 3, None), [2.0] * 3, [8.0] * 3, None)


def test_an_exception_after_buckets_were_sent_ends_the_reducer():
    """The last layer's 360 kB are sent alone before the first layer's gradient raises."""

    def train(collective):
        layers = nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(3)])
        reducer = GradientReducer(layers, collective, sizes=BucketSizes(packed=1, first=1))

        def fail(_gradient):
            raise ValueError("no")

        x = layers[0](torch.ones(1, 300))
        x.register_hook(fail)
        texts = []
        for _ in range(2):
            try:
                with reducer.backward():
                    layers[1:](x).sum().backward(retain_graph=True)
            except (ValueError, CollectiveError) as error:
                texts.append(str(error))
        return texts

    for first, second in per_rank(2, train):
        assert first == "no"
        assert "raised ValueError after some of its gradients were sent" in second
        assert "Make a new GradientReducer on all ranks" in second


def test_a_backward_on_top_of_reduced_gradients():
    """Averaging again is right where all are averaged; a sum over a model axis cannot be taken apart."""

    def average(collective):
        (w,) = module = weights(0.0)
        reducer = GradientReducer(module, collective)
        backward(reducer, collective, w)
        (w * factor(collective)).backward()
        reducer.reduce_gradients()
        return w.grad.item()

    def summed(collective):
        (layer,) = module = filled(nn.Linear(1, 1))
        shared(layer, over="model")
        reducer = GradientReducer(module, collective)
        try:
            backward(reducer, collective, layer(torch.ones(1)))
            if collective.rank == 1:
                layer(torch.ones(1)).backward()
            reducer.reduce_gradients()
        finally:
            reducer.close()

    assert common(2, average) == 4.0
    here, there = sorted((str(error) for error in errors(2, summed, mesh={"data": 1, "model": 2})), key=len)
    assert "(0.weight)" in here
    assert "on another rank" in there
