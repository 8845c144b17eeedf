"""Shared weights, meshes and clipping, by symptom, with numbers that can be worked out by hand.

On the 2 x 2 mesh ranks 0 and 1 are one model row, ranks 0 and 2 one data column.
"""

import copy

import pytest
import torch
from on_ranks import errors, values
from torch import nn

from collective_strategy import GradientReducer, SharedModule, sharded, shared

MODEL_2 = {"data": 1, "model": 2}
MESH_2X2 = {"data": 2, "model": 2}


class Weight(nn.Module):
    """One weight."""

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(value, dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def backward(reducer, loss):
    with reducer.backward():
        loss.sum().backward()


# A shared weight is not reduced over the model group


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_shared_weight_gets_the_sum_over_the_model_axis_and_stays_bit_equal(optimizer_class):
    def train(collective):
        module = SharedModule(Weight(1.0), over="model")
        reducer = GradientReducer(module, collective)
        optimizer = optimizer_class(module.parameters(), lr=0.1)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            backward(reducer, module((1 + collective.rank) * (1 + step)))
            seen.append(module.w.grad.item())
            optimizer.step()
        return seen, module.w.item()

    first, second = values(2, train, mesh=MODEL_2)
    assert first == second
    assert first[0] == [3.0, 6.0, 9.0, 12.0, 15.0]


def test_without_the_mark_the_copies_differ():
    def train(collective):
        module = Weight(1.0)
        backward(GradientReducer(module, collective), module(1 + collective.rank))
        return module.w.grad.item()

    assert values(2, train, mesh=MODEL_2) == [1.0, 2.0]


# Sum or mean


def test_partial_gradients_are_summed_and_whole_ones_averaged_in_one_backward():
    def train(collective):
        part = shared(Weight(), over="model", grad="sum")
        whole = shared(Weight(), over="model", grad="mean")
        done = shared(Weight(), over="model", grad="none")
        module = nn.ModuleList([part, whole, done])
        reducer = GradientReducer(module, collective)
        backward(reducer, part(1 + collective.rank) + whole(3) + done(3))
        return [p.grad.item() for p in module.parameters()], reducer.statistics.all_reduces

    # one all-reduce for each of the two kinds, and one for flags; nothing for "none"
    assert values(2, train, mesh=MODEL_2) == [([3.0, 3.0, 3.0], 3)] * 2


def test_an_unknown_reduction_is_refused_at_the_mark():
    with pytest.raises(ValueError, match="grad='max' is not one of 'sum'"):
        shared(Weight(), over="model", grad="max")


# Both reductions together


def test_a_shared_gradient_is_the_mean_over_data_of_the_sum_over_the_model_axis():
    def train(collective):
        both, piece = module = nn.ModuleList([shared(Weight(), over="model"), Weight()])
        sharded(piece, "w", over="model", dim=0)
        reducer = GradientReducer(module, collective)
        backward(reducer, both(1 + collective.rank) + piece(1 + collective.rank))
        return both.w.grad.item(), piece.w.grad.item()

    assert values(4, train, mesh=MESH_2X2) == [(5.0, 2.0), (5.0, 3.0), (5.0, 2.0), (5.0, 3.0)]


@pytest.mark.parametrize("data_axis", ["rows", "batch"])
def test_axes_that_are_used_together_by_a_union(data_axis):
    """As the data axis (4 ranks averaged: 2.5), or as the model axes of a mark (two and two: the sum of both)."""

    def train(collective):
        module = Weight()
        if data_axis == "rows":
            shared(module, over="pair")
        backward(GradientReducer(module, collective), module(1 + collective.rank))
        return module.w.grad.item()

    options = {"mesh": {"rows": 2, "columns": 2, "extra": 1}, "data_axis": data_axis}
    unions = {"batch": ("rows", "columns"), "pair": ("columns", "extra")}
    assert values(4, train, unions=unions, **options) == [5.0 if data_axis == "rows" else 2.5] * 4


# Start values


def test_replicas_start_equal_and_pieces_keep_their_own():
    def build(collective):
        torch.manual_seed(collective.rank)
        own = torch.randn(3)
        both, piece = module = nn.ModuleList([shared(Weight(own), over="model"), Weight(own)])
        GradientReducer(module, collective).broadcast_replicas()
        return own, both.w.detach(), piece.w.detach()

    ranks = values(4, build, mesh=MESH_2X2)
    drawn = [own.double() for own, _, _ in ranks]
    assert all(torch.equal(both, drawn[0]) for _, both, _ in ranks)
    assert [torch.equal(piece, drawn[k % 2]) for k, (_, _, piece) in enumerate(ranks)] == [True] * 4
    assert not torch.equal(drawn[0], drawn[1])


# A data group without rank 0


def test_a_data_group_without_rank_0_has_its_own_first_rank_and_size():
    def train(collective):
        module = Weight(float(collective.rank))
        reducer = GradientReducer(module, collective)
        reducer.broadcast_replicas()
        start = module.w.item()
        backward(reducer, module(1 + collective.rank))
        return start, module.w.grad.item()

    assert values(4, train, mesh=MESH_2X2) == [(0.0, 2.0), (1.0, 3.0), (0.0, 2.0), (1.0, 3.0)]


# Buffers


def test_buffers_are_those_of_the_data_group_unless_marked():
    def build(collective):
        counter, common = module = nn.ModuleList([nn.Module(), shared(nn.Module(), over="model")])
        counter.register_buffer("k", torch.tensor(float(collective["model"].rank)))
        common.register_buffer("k", torch.tensor(5.0 + collective.rank))
        reducer = GradientReducer(module, collective)
        if collective.rank == 3:
            counter.k.fill_(9)
        reducer.broadcast_replicas()
        return counter.k.item(), common.k.item()

    assert values(4, build, mesh=MESH_2X2) == [(0.0, 5.0), (1.0, 5.0), (0.0, 5.0), (1.0, 5.0)]


# Tied weights


class Language(nn.Module):
    """Embedding and output share their weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2, dtype=torch.float64)
        self.output = nn.Linear(2, 3, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def test_a_weight_tied_in_one_process_stays_one_and_is_reduced_once():
    def train(collective):
        torch.manual_seed(0)
        module = Language()
        reducer = GradientReducer(module, collective)
        reducer.broadcast_replicas()
        twin = copy.deepcopy(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        backward(reducer, module(torch.tensor([collective.rank])).square())
        optimizer.step()
        (twin(torch.tensor([0, 1])).square().sum() / 2).backward()
        module.load_state_dict(module.state_dict())
        difference = (module.embedding.weight.grad - twin.embedding.weight.grad).abs().max().item()
        tied = module.output.weight is module.embedding.weight
        return tied, len(optimizer.param_groups[0]["params"]), reducer.statistics.all_reduces, difference < 1e-14

    assert values(2, train) == [(True, 1, 2, True)] * 2


def test_copies_on_different_model_ranks_stay_equal_under_one_name():
    """Rank 0 uses it at its entrance, rank 1 at its exit."""

    def train(collective):
        module = nn.ModuleDict({"tied": shared(Weight(1.0), over="model"), "own": Weight()})
        reducer = GradientReducer(module, collective)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            backward(reducer, module["tied"](1.0) if collective.rank == 0 else module["own"](0) + module["tied"](2.0))
            seen.append(module["tied"].w.grad.item())
            optimizer.step()
        return seen, module["tied"].w.item()

    assert values(2, train, mesh=MODEL_2) == [([3.0] * 3, 1.0 - 9 / 8)] * 2


def test_copies_under_different_names_are_refused_with_both_names():
    def build(collective):
        name = "embedding" if collective.rank == 0 else "head"
        GradientReducer(nn.ModuleDict({name: shared(Weight(), over="model")}), collective)

    for error in errors(2, build, mesh=MODEL_2, fresh=True):
        assert "rank 1 has parameter head.w () that rank 0 lacks" in str(error)


# Clipping


def clipped(collective, both, own, max_norm):
    """Gradients after clipping: `both` is shared (each model rank has half of it), `own` is this model rank's piece."""
    common, piece = module = nn.ModuleList([shared(Weight(), over="model"), Weight()])
    sharded(piece, "w", over="model", dim=0)
    reducer = GradientReducer(module, collective)
    backward(reducer, common(both / 2) + piece(own[collective["model"].rank]))
    norm = reducer.clip_grad_norm_(max_norm).item()
    return norm, common.w.grad.item(), piece.w.grad.item()


def test_the_norm_counts_a_shared_weight_once():
    """3 and 4 in pieces, 12 shared: 13. Counted twice it would be 17.69, locally 12.37 and 12.65."""
    first, second = values(2, lambda collective: clipped(collective, 12.0, (3.0, 4.0), 1.0), mesh=MODEL_2)
    joined = [torch.zeros(1, requires_grad=True, dtype=torch.float64) for _ in range(3)]
    for weight, gradient in zip(joined, (12.0, 3.0, 4.0), strict=True):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
    norm = torch.nn.utils.clip_grad_norm_(joined, 1.0)
    whole, left, right = (weight.grad.item() for weight in joined)
    assert first == pytest.approx((13.0, whole, left), rel=1e-12)
    assert second == pytest.approx((13.0, whole, right), rel=1e-12)
    assert norm == 13.0


def test_all_ranks_clip_with_the_norm_of_the_whole_model():
    factor = 1 / (900 + 0.16 + 0.25) ** 0.5
    for rank, found in enumerate(values(4, lambda c: clipped(c, 0.5, (30.0, 0.4), 1.0), mesh=MESH_2X2)):
        assert found == pytest.approx((1 / factor, 0.5 * factor, (0.4 if rank % 2 else 30.0) * factor), rel=1e-6)


def test_below_the_threshold_gradients_stay_as_they_are():
    found = values(4, lambda c: clipped(c, 0.5, (30.0, 0.4), 100.0), mesh=MESH_2X2)
    assert [gradients for _, *gradients in found] == [[0.5, 30.0], [0.5, 0.4]] * 2


def test_a_shared_weight_is_the_same_after_three_clipped_steps():
    def train(collective):
        common, piece = module = nn.ModuleList([shared(Weight(1.0), over="model"), Weight(1.0)])
        reducer = GradientReducer(module, collective)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            backward(reducer, (common(0.3 * (1 + step)) * piece(30.0 if collective["model"].rank == 0 else 0.4)))
            reducer.clip_grad_norm_(1.0)
            optimizer.step()
        return common.w.item()

    assert len(set(values(4, train, mesh=MESH_2X2))) == 1
