"""Gradients of every dtype and layout, and of compiled modules; two ranks with factors 1 and 3, so that a mean is 2."""

import copy
import dataclasses

import torch
from engine_ranks import common, filled, per_rank
from torch import nn

from collective_strategy import GradientReducer
from collective_strategy.collectives import TorchDistributedCollective
from collective_strategy.gradients import BucketSizes


def factor(collective) -> float:
    return 1.0 + 2 * collective.rank


def test_every_dtype_in_one_model():
    def gradients(collective):
        kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
        module = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds])
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            for w in module:
                term = (w * factor(collective) * (1 + 2j)).real if w.is_complex() else w * factor(collective)
                term.sum().float().backward()
        same = [w.grad.dtype == w.dtype for w in module]
        pairs = (torch.view_as_real(w.grad) if w.is_complex() else w.grad for w in module)
        return same, [pair.tolist() for pair in pairs]

    assert common(2, gradients) == ([True] * 6, [[2.0, 2.0]] * 4 + [[[2.0, -4.0]] * 2] * 2)


def test_narrow_gradients_can_travel_wide():
    """Rank r has 512 at place r and 1 elsewhere: the mean 128.75 rounds to 129; bfloat16 cannot add 0.25 to 128."""

    def gradients(collective):
        w = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        reducer = GradientReducer(nn.ParameterList([w]), collective, reduce_dtype=torch.float32)
        values = torch.ones(4, dtype=torch.bfloat16)
        values[collective.rank] = 512
        with reducer.backward():
            (w * values).sum().backward()
        return str(w.grad.dtype), w.grad.tolist()

    assert common(4, gradients) == ("torch.bfloat16", [129.0] * 4)


def test_wide_gradients_can_travel_narrow():
    """1 and 1 + 2^-9: bfloat16 knows neither the second nor the mean."""

    def gradients(collective):
        module = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros((), dtype=torch.complex64))])
        reducer = GradientReducer(module, collective, compression=torch.bfloat16)
        with reducer.backward():
            (module[0].sum() * (1 + 2**-9 * collective.rank) + (module[1] * (1 + 2**-9)).real).backward()
        sent = [bucket._wire for bucket in reducer._plan.buckets]
        return str(module[0].grad.dtype), module[0].grad.tolist(), module[1].grad.item(), torch.bfloat16 in sent

    assert common(2, gradients) == ("torch.float32", [1.0] * 3, 1 + 2**-9, True)


def test_sparse_gradients_stay_sparse_beside_dense_ones():
    """Rank r uses rows r and 2."""

    def gradients(collective):
        table, layer = module = filled(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False))
        reducer = GradientReducer(module, collective)
        for _ in range(3):
            module.zero_grad()
            with reducer.backward():
                layer(table(torch.tensor([collective.rank, 2]))).sum().backward()
        return table.weight.grad.is_sparse, table.weight.grad.to_dense().tolist(), layer.weight.grad.tolist()

    assert common(2, gradients) == (True, [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0], [0.0, 0.0]], [[2.0, 2.0]])


def test_a_compiled_module():
    """Its hooks come after the one backward of the compiled graph, in an order of their own."""
    x = torch.randn(2, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(collective):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        twin = copy.deepcopy(module)
        compiled = torch.compile(module, backend="aot_eager")
        everybody = x.to(collective.device)
        own = everybody[collective.rank]
        reducer = GradientReducer(compiled, collective)
        for _ in range(2):
            compiled.zero_grad()
            with reducer.backward():
                compiled(own).square().sum().backward()
        (twin(everybody).square().sum() / 2).backward()
        pairs = zip(module.parameters(), twin.parameters(), strict=True)
        return max((a.grad - b.grad).abs().max().item() for a, b in pairs)

    assert max(per_rank(2, gradients, fresh=True)) < 1e-12  # compiling starts threads


def test_compiled_autograd():
    x = torch.randn(2, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(collective):
        import torch._dynamo

        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        twin = copy.deepcopy(module)
        everybody = x.to(collective.device)
        reducer = GradientReducer(module, collective, sizes=BucketSizes(packed=1, first=1))
        for _ in range(2):
            module.zero_grad()
            loss = module(everybody[collective.rank]).square().sum()
            compiler = torch.compile(backend="eager")
            with torch._dynamo.compiled_autograd._enable(compiler), reducer.backward():
                loss.backward()
        (twin(everybody).square().sum() / 2).backward()
        pairs = zip(module.parameters(), twin.parameters(), strict=True)
        return max((a.grad - b.grad).abs().max().item() for a, b in pairs)

    assert max(per_rank(2, gradients, fresh=True)) < 1e-12


def test_a_gradient_keeps_the_memory_format_of_its_weight():
    def gradients(collective):
        (layer,) = module = filled(nn.Conv2d(3, 4, 3))
        module.to(memory_format=torch.channels_last)
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            image = torch.ones(1, 3, 3, 3).to(memory_format=torch.channels_last)
            (layer(image) * factor(collective)).sum().backward()
        gradient = layer.weight.grad
        return gradient.is_contiguous(memory_format=torch.channels_last), bool((gradient == 2).all())

    assert common(2, gradients) == (True, True)


def test_weights_without_elements_and_with_odd_strides():
    """A transposed weight, every second column of a table, and one of no elements at all; alone and packed."""

    def gradients(collective):
        turned, cut = nn.Parameter(torch.zeros(3, 2).t()), nn.Parameter(torch.zeros(4, 6)[:, ::2])
        module = nn.ParameterList([turned, cut, nn.Parameter(torch.zeros(0))])
        a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        right = []
        for sizes in (BucketSizes(moved=1, packed=1, first=1), BucketSizes()):
            module.zero_grad()
            reducer = GradientReducer(module, collective, sizes=sizes)
            for _ in range(2):
                with reducer.backward():
                    (sum(x.sum() for x in (turned * a, cut * b, module[2])) * factor(collective)).backward()
            right += [torch.equal(turned.grad, 4 * a), torch.equal(cut.grad, 4 * b), module[2].grad.shape == (0,)]
            right.append(reducer.grad_norm(norm_type=float("inf")).item() == 44)
            reducer.close()
        return right

    assert common(2, gradients) == [True] * 8


class Blocking(TorchDistributedCollective):
    """A backend whose operations are done when they return."""

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, asynchronous=False)


def test_a_backend_that_is_not_asynchronous_sends_at_the_end():
    def gradients(collective):
        module = filled(nn.Linear(2, 2), nn.Linear(2, 2))
        reducer = GradientReducer(module, collective, sizes=BucketSizes(packed=1, first=1))
        with reducer.backward():
            (module[1](module[0](torch.ones(1, 2))) * factor(collective)).sum().backward()
        return module[1].bias.grad.tolist(), reducer.statistics.launched_by

    assert common(2, gradients, backend=Blocking) == ([2.0, 2.0], [4, 4, 4, 4])
