"""Slow drift of replicated parameters, by symptom."""

import torch
from on_ranks import values
from torch import nn

from collective_strategy import GradientReducer, shared, verify
from collective_strategy.inspection import ReplicaDriftError

MODEL_2 = {"data": 1, "model": 2}


def outcome(module, collective):
    try:
        return str(verify(module, collective))
    except ReplicaDriftError as error:
        return str(error).splitlines()[1].strip()


def train(collective, module, steps):
    """Each model rank sees another x; a mark that says 'none' leaves the gradients as they are."""
    reducer = GradientReducer(module, collective)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    for step in range(steps):
        optimizer.zero_grad()
        with reducer.backward():
            module(torch.full((1, 1), 1.0 + collective.rank + step)).sum().backward()
        optimizer.step()


def weight(mark="sum"):
    module = shared(nn.Linear(1, 1, bias=False), over="model", grad=mark)
    nn.init.ones_(module.weight)
    return module


def test_a_small_difference_on_one_rank_is_found_named_and_mended():
    def check(collective):
        module = weight()
        if collective.rank == 1:
            module.weight.data += 2**-10
        found = outcome(module, collective)
        mended = verify(module, collective, repair=True)
        return found, len(mended.differences), module.weight.item(), outcome(module, collective)

    message = "weight differs over axis model: rank 1 from rank 0 by at most 0.000977 in 1 of 1 elements"
    assert values(2, check, mesh=MODEL_2) == [(message, 1, 1.0, "All copies are equal: 1 tensors, 4 bytes.")] * 2


def test_copies_whose_gradients_are_not_reduced_drift_apart_and_reduced_ones_do_not():
    def check(collective):
        module, control = weight("none"), weight("sum")
        train(collective, module, 1)
        train(collective, control, 5)
        return outcome(module, collective), outcome(control, collective)

    message = "weight differs over axis model: rank 1 from rank 0 by at most 0.25 in 1 of 1 elements"
    assert values(2, check, mesh=MODEL_2) == [(message, "All copies are equal: 1 tensors, 4 bytes.")] * 2


def test_nan_on_both_ranks_is_reported_as_not_finite_not_as_drift():
    def check(collective):
        module = weight()
        nn.init.constant_(module.weight, float("nan"))
        return outcome(module, collective)

    said = "All copies are equal: 1 tensors, 4 bytes.\nNot all values are finite in: weight."
    assert values(2, check, mesh=MODEL_2) == [said] * 2
