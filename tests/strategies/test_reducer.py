"""GradientReducer in a plain PyTorch loop on two real ranks; the oracle is DistributedDataParallel, bit by bit."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collective_strategy import Collective, GradientReducer, SingleProcessCollective
from collective_strategy.collectives.errors import CollectiveError, CollectiveMismatchError
from collective_strategy.testing import run_ranks


def _network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(6)]


def test_gradients_are_bit_equal_to_distributed_data_parallel() -> None:
    def train(collective: Collective) -> list[bool]:
        results = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            ours, theirs = _network().to(dtype), _network().to(dtype)
            ddp = DistributedDataParallel(theirs)
            reducer = GradientReducer(ours, collective)
            steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
            for i, x in enumerate(_batches(collective.rank)):
                x = x.to(dtype)
                last = i % 3 == 2
                with reducer.backward(sync=last):
                    ours(x).square().sum().backward()
                if last:
                    ddp(x).square().sum().backward()
                    for step in steps:
                        step.step()
                        step.zero_grad()
                else:
                    with ddp.no_sync():
                        ddp(x).square().sum().backward()
            reducer.close()
            results += [torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
        return results

    for outcome in run_ranks(2, train, fresh=True):
        assert all(outcome.result())


def test_only_the_fresh_part_is_reduced() -> None:
    """x is 1 and 3: reduced to 2, scaled in place, then zeroed in place, each followed by another backward."""

    def train(collective: Collective) -> list[float]:
        w = nn.Parameter(torch.tensor(0.0))
        module = nn.ParameterList([w])
        reducer = GradientReducer(module, collective)
        x = 1.0 + 2 * collective.rank
        seen = []
        for change in (None, "scale", "zero", "drop"):
            if change == "scale":
                w.grad.mul_(10)
            elif change == "zero":
                w.grad.zero_()
            elif change == "drop":
                w.grad = None
            with reducer.backward():
                (w * x).backward()
            seen.append(w.grad.item())
        with reducer.no_sync(), reducer.backward():
            (w * x).backward()
        seen.append(w.grad.item() - x)
        reducer.reduce_gradients()
        seen.append(w.grad.item())
        reducer.close()
        return seen

    for outcome in run_ranks(2, train):
        assert outcome.result() == [2.0, 22.0, 2.0, 2.0, 2.0, 4.0]


def test_a_backward_behind_the_back_is_refused_on_all_ranks_at_the_next_reduction() -> None:
    def train(collective: Collective) -> None:
        layer = nn.Linear(1, 1)
        reducer = GradientReducer(layer, collective)
        if collective.rank == 1:
            layer(torch.ones(1)).backward()
        try:
            with reducer.backward():
                layer(torch.ones(1)).backward()
        finally:
            reducer.close()

    zero, one = run_ranks(2, train, fresh=True)
    assert isinstance(zero.error, CollectiveError)
    assert "on 1 other rank(s)" in str(zero.error)
    assert "of weight, bias on rank 1" in str(one.error)


def test_hooks_stay_with_the_module_and_go_with_the_reducer() -> None:
    def check(collective: Collective) -> list[Any]:
        module = _network()
        reducer = GradientReducer(module, collective)
        twin, thawed = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        twin(torch.ones(1, 3)).sum().backward()
        thawed(torch.ones(1, 3)).sum().backward()
        with reducer.backward():  # nothing of the copies' backwards is held against the module
            module(torch.ones(1, 3)).sum().backward()
        reducer.close()
        reducer.close()
        hooks = [len(p._post_accumulate_grad_hooks or {}) for p in module.parameters()]
        module(torch.ones(1, 3)).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return hooks

    for outcome in run_ranks(2, check):
        assert outcome.result() == [0, 0, 0, 0]


def test_an_exception_inside_backward_leaves_the_reducer_usable() -> None:
    def train(collective: Collective) -> float:
        w = nn.Parameter(torch.tensor(0.0))
        reducer = GradientReducer(nn.ParameterList([w]), collective)
        with reducer.backward():
            (w * 2).backward()
        try:
            with reducer.backward():
                raise ValueError("boom")
        except ValueError:
            pass
        with reducer.backward():
            (w * (1 + collective.rank)).backward()
        reducer.close()
        return w.grad.item()

    for outcome in run_ranks(2, train):
        assert outcome.result() == 3.5


def test_different_models_are_refused_on_all_ranks_with_names() -> None:
    def build(collective: Collective) -> None:
        module = _network()
        if collective.rank == 1:
            module[2].requires_grad_(False)
        GradientReducer(module, collective)

    for outcome in run_ranks(2, build, fresh=True):
        assert isinstance(outcome.error, CollectiveMismatchError)
        assert "parameter 2.weight has requires_grad True on rank 0 and False on rank 1" in str(outcome.error)


def test_one_process_needs_nothing() -> None:
    collective = SingleProcessCollective().setup()
    layer = nn.Linear(1, 1)
    reducer = GradientReducer(layer, collective)
    layer(torch.ones(1)).backward()
    with reducer.backward(), reducer.no_sync():
        layer(torch.ones(1)).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert layer.weight.grad.item() == 2.0
    reducer.close()


def test_a_backward_inside_a_backward_is_refused() -> None:
    def nest(collective: Collective) -> None:
        reducer = GradientReducer(nn.Linear(1, 1), collective)
        try:
            with reducer.backward(), reducer.backward():
                pass
        finally:
            reducer.close()

    for outcome in run_ranks(2, nest, fresh=True):
        with pytest.raises(CollectiveError, match="inside itself"):
            outcome.result()
