"""Which ranks draw the same random numbers. On the 2 x 2 mesh ranks 0 and 1, and 2 and 3, hold one model together."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from collective_strategy import seed_ranks
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}


def ranks(function, n=4, mesh=None, **options):
    return [o.result() for o in run_ranks(n, function, mesh=mesh or MESH, timeout=90, **options)]


def draws():
    return torch.rand(4).tolist(), random.random(), np.random.rand(2).tolist()


def pattern(values):
    """Which ranks have the same: the first rank with each one's value."""
    return [values.index(value) for value in values]


@pytest.mark.parametrize("seed", [0, 7, None])
def test_seeds_differ_over_the_data_axis_only(seed):
    def draw(collective):
        if seed is None:
            torch.manual_seed(collective.rank)  # whatever a script did before
        seed_ranks(collective, seed)
        return draws()

    found = ranks(draw)
    for kind in zip(*found, strict=True):
        assert pattern(kind) == [0, 0, 2, 2]
    if seed is not None:
        assert found == ranks(draw)  # reproducible


def test_another_seed_and_one_process_draw_other_and_the_first_ranks_numbers():
    def draw(collective):
        seed_ranks(collective, 7)
        return draws()

    (one,) = ranks(draw, n=1, mesh={"data": 1, "model": 1})
    assert one == ranks(draw)[0]  # of the first data rank

    def draw_8(collective):
        seed_ranks(collective, 8)
        return draws()

    assert one != ranks(draw_8)[0]


def test_inside_varying_rng_model_ranks_differ_and_outside_they_go_on_alike():
    def draw(collective):
        seed_ranks(collective, 0)
        before = torch.rand(2).tolist()
        with collective["model"].varying_rng():
            first = torch.rand(2).tolist()
            if collective["model"].rank == 1:
                torch.rand(100)  # pieces may be of different sizes
        with collective["model"].varying_rng():
            second = torch.rand(2).tolist()
        return before, first, second, torch.rand(2).tolist()

    before, first, second, after = (pattern(list(kind)) for kind in zip(*ranks(draw), strict=True))
    assert before == after == [0, 0, 2, 2]
    assert first == second == [0, 1, 2, 3]
    one = ranks(draw)[0]
    assert len({str(value) for value in one}) == 4


def test_one_axis_of_several_and_one_in_another():
    def draw(collective):
        seed_ranks(collective, 0)
        with collective["space"].varying_rng():
            over_space = torch.rand(1).item()
            with collective["model"].varying_rng():
                over_both = torch.rand(1).item()
        return over_space, over_both, torch.rand(1).item()

    found = ranks(draw, mesh={"data": 1, "model": 2, "space": 2})
    over_space, over_both, outside = (pattern(list(kind)) for kind in zip(*found, strict=True))
    assert over_space == [0, 1, 0, 1]
    assert over_both == [0, 1, 2, 3]
    assert outside == [0, 0, 0, 0]


def test_an_error_inside_puts_the_outer_generator_back():
    def draw(collective):
        torch.manual_seed(0)

        def fails():
            with collective["model"].varying_rng():
                torch.rand(3)
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        return torch.rand(1).item()

    assert len(set(ranks(draw, n=2, mesh={"data": 1, "model": 2}))) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_masks(reentrant):
    """The gradient of dropout(x) is its mask, which recomputation must draw again: inside and outside."""

    def draw(collective):
        seed_ranks(collective, 1)
        masks = []

        def block(x):
            y = dropout(x, 0.5)
            with collective["model"].varying_rng():
                z = dropout(torch.ones_like(x) * 3 + 0 * x, 0.5)
            masks.append((y.detach(), z.detach()))
            return y * z

        x = torch.ones(64, requires_grad=True)
        torch.rand(5)
        result = checkpoint(block, x, use_reentrant=reentrant)
        torch.rand(17)
        with collective["model"].varying_rng():
            torch.rand(3)
        result.sum().backward()
        (y, z), again = masks[0], masks[1]
        same = torch.equal(y, again[0]) and torch.equal(z, again[1]) and torch.equal(x.grad, y * z)
        return same, len(masks), y.tolist(), z.tolist()

    found = ranks(draw)
    assert [rank[:2] for rank in found] == [(True, 2)] * 4
    assert pattern([rank[2] for rank in found]) == [0, 0, 2, 2]
    assert pattern([rank[3] for rank in found]) == [0, 1, 2, 3]


def test_masks_go_on_after_the_generator_was_saved_and_put_back():
    def draw(collective):
        seed_ranks(collective, 1)
        state = torch.get_rng_state()

        def masks():
            with collective["model"].varying_rng():
                return dropout(torch.ones(32)).tolist(), torch.rand(1).item()

        first = masks(), masks()
        torch.set_rng_state(state)
        return first == (masks(), masks())

    assert ranks(draw) == [True] * 4


def test_start_values_of_pieces_differ_and_shared_ones_are_equal():
    def build(collective):
        seed_ranks(collective, 3)
        common = nn.Linear(2, 2)
        with collective["model"].varying_rng():
            piece = nn.Linear(2, 2)
        return common.weight.tolist(), piece.weight.tolist()

    common, piece = (pattern(list(kind)) for kind in zip(*ranks(build), strict=True))
    assert common == [0, 0, 2, 2]
    assert piece == [0, 1, 2, 3]


class Noisy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1).item(), random.random()


def test_workers_of_a_plain_data_loader_follow_the_data_rank():
    def load(collective):
        seed_ranks(collective, 3)
        return [[value.tolist() for value in batch] for batch in DataLoader(Noisy(), batch_size=2, num_workers=1)]

    assert pattern(ranks(load)) == [0, 0, 2, 2]


def test_a_compiled_function_may_use_it():
    def draw(collective):
        seed_ranks(collective, 3)

        def function(x):
            with collective["model"].varying_rng():
                y = dropout(x, 0.5)
            return y + dropout(x, 0.5)

        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager")
        state = torch.get_rng_state()
        right = function(torch.ones(16))
        torch.set_rng_state(state)
        return torch.equal(compiled(torch.ones(16)), right)

    assert ranks(draw, n=2, mesh={"data": 1, "model": 2}) == [True, True]


def test_before_set_up_it_is_refused():
    from collective_strategy import SingleProcessCollective

    with pytest.raises(RuntimeError, match="varying_rng was called before the collective was set up"):
        SingleProcessCollective().varying_rng()
