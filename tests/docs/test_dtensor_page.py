"""Every number of the page on DTensor, from the calls that stand beside it."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from collective_strategy import redistribute
from collective_strategy.testing import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "dtensor.md").read_text()
NAMES = {"Partial": Partial, "Replicate": Replicate, "Shard": Shard, "redistribute": redistribute}


def rows_of(heading):
    """The table below a heading, each row as the list of the code in its cells, or of their words."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


BESIDE_DTENSOR = rows_of("A placement says what the values are, not what the gradients are")
EQUIVALENT = rows_of("Which call is which")


def on_ranks(function, *arguments):
    return [outcome.result() for outcome in run_ranks(2, function, *arguments)]


def input_of(collective, replicated):
    x = torch.tensor([1.0, 2.0]) * (1 if replicated else collective.rank + 1)
    return x.requires_grad_()


def value_and_gradient(collective, call, replicated):
    x = input_of(collective, replicated)
    y = call(x)
    ((collective.rank + 1) * y.sum()).backward()
    return y.tolist(), x.grad.tolist()


@pytest.mark.parametrize("row", BESIDE_DTENSOR, ids=[f"{row[0]}-{row[2]}" for row in BESIDE_DTENSOR])
def test_both_libraries_give_the_gradient_of_the_page(row):
    placements, with_dtensor, with_plain_tensors, *gradients = row

    def both(collective):
        mesh = init_device_mesh("cpu", (2,))

        def theirs(x):
            d = DTensor.from_local(x, mesh, eval(placements, NAMES), run_check=False)
            return eval(with_dtensor, {**NAMES, "d": d})

        def ours(x):
            return eval(with_plain_tensors, {**NAMES, "x": x, "c": collective})

        replicated = placements == "[Replicate()]"
        return [value_and_gradient(collective, call, replicated) for call in (theirs, ours)]

    for (theirs, ours), gradient in zip(on_ranks(both), gradients, strict=True):
        assert theirs == ours
        assert ours[1] == eval(gradient)


@pytest.mark.parametrize("row", EQUIVALENT, ids=[row[2] for row in EQUIVALENT])
def test_the_short_names_are_the_same_calls(row):
    _, _, long, short = row

    def both(collective):
        results = []
        for call in (long, short):
            x = torch.arange(4.0).reshape(2, 2) * (collective.rank + 1)
            x.requires_grad_()
            y = eval(call, {**NAMES, "x": x, "c": collective, "d": 0, "e": 1})
            (y * y.detach().cos() * (collective.rank + 1)).sum().backward()
            results.append((y.tolist(), x.grad.tolist()))
        return results

    for by_types, by_name in on_ranks(both):
        assert by_types == by_name


def test_replicate_to_partial():
    def parts(collective):
        return redistribute(torch.tensor(5.0), collective, "replicate", "partial").item()

    assert on_ranks(parts) == [5, 0]
    (replicate, kept) = rows_of("Replicate to partial is not a no-op")
    assert replicate[1:] == ["5", "5", ""]
    assert kept[1:] == ["5", "0", "5"]

    def theirs(collective):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(RuntimeError, match="redistributing to Partial is for internal use only"):
            DTensor.from_local(torch.ones(2), mesh, [Replicate()]).redistribute(placements=[Partial()])

        def divided(x):
            wrapped = DTensor.from_local(x, mesh, [Replicate()], run_check=False, grad_placements=[Partial()])
            return wrapped.to_local()

        return value_and_gradient(collective, divided, True)[1]

    assert on_ranks(theirs) == [[0.5, 0.5], [1, 1]]


def test_the_mean():
    def gradients(collective):
        mesh = init_device_mesh("cpu", (2,))

        def theirs(x):
            wrapped = DTensor.from_local(x, mesh, [Partial("avg")], run_check=False)
            return wrapped.redistribute(placements=[Replicate()]).to_local()

        calls = [
            theirs,
            *[lambda x, to=to: collective.all_reduce(x, "mean", to=to) for to in ("invariant", "replicate")],
        ]
        found = [value_and_gradient(collective, call, False) for call in calls]
        assert found[0][0] == found[1][0] == found[2][0] == [1.5, 3]
        return [gradient for _, gradient in found]

    assert on_ranks(gradients) == [[[1, 1], [0.5, 0.5], [1.5, 1.5]], [[2, 2], [1, 1], [1.5, 1.5]]]


def test_the_calls_of_the_page_are_all_tested():
    calls = set(re.findall(r"`(d\.[^`]*|redistribute\([^`]*|c\.[^`]*)`", PAGE))
    tested = {cell for row in [*BESIDE_DTENSOR, *EQUIVALENT] for cell in row}
    shown_elsewhere = {
        'redistribute(x, c, "replicate", "partial")',
        'redistribute(x, c, "varying", "varying", dim=0, to_dim=1)',
        'c.all_reduce(x, "mean", to="invariant")',
    }
    assert calls - tested == shown_elsewhere
