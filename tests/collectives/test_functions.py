"""Functions made from the operations: by the adjoint, by lists of tensors in one process, and beside DTensor."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from collective_strategy import redistribute, scale_grad
from collective_strategy.collectives import (
    CollectiveMismatchError,
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from collective_strategy.testing import run_ranks

GRADIENT_TYPE = {"replicate": "partial", "partial": "replicate", "invariant": "invariant", "varying": "varying"}
EQUAL = ("replicate", "invariant")  # equal values on all ranks
SIZES = {2: [1, 5], 3: [4, 0, 2], 4: [1, 2, 0, 3]}


def results(ranks, function, *arguments, **settings):
    return [outcome.result() for outcome in run_ranks(ranks, function, *arguments, **settings)]


def in_one_process(tensors, source, destination, dim, sizes):
    """What redistribute is on a list with every rank's tensor."""
    n = len(tensors)
    if source == "partial":
        whole = sum(tensors)
    elif source == "varying":
        whole = torch.cat(tensors, dim)
    else:
        whole = None
    if destination == "varying":
        return [(tensors[r] if whole is None else whole).split(sizes, dim)[r] for r in range(n)]
    if destination == "partial" and source == "replicate":
        return [tensors[0], *[0 * x for x in tensors[1:]]]
    if destination == "partial":
        zeros = [torch.zeros_like(x) for x in tensors]
        return [torch.cat([*zeros[:r], tensors[r], *zeros[r + 1 :]], dim) for r in range(n)]
    return list(tensors) if whole is None else [whole] * n


PAIRS = [
    ("partial", "replicate"),
    ("partial", "invariant"),
    ("partial", "varying"),
    ("invariant", "replicate"),
    ("invariant", "varying"),
    ("replicate", "varying"),
    ("replicate", "partial"),
    ("varying", "replicate"),
    ("varying", "invariant"),
    ("varying", "partial"),
]


def drawn(kind, n, dim, sizes, seed):
    """Every rank's tensor of a type, float64: random, equal where the type says so."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        shape = [6, 6]
        shape[dim] = length
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind in EQUAL:
        return [draw(6)] * n
    return [draw(sizes[rank] if kind == "varying" else 6) for rank in range(n)]


def cotangents(kind, n, dim, sizes, seed):
    """Every rank's gradient of a value of the type: random, of the type that gradients of the type have."""
    if kind == "varying":
        return drawn("varying", n, dim, sizes, seed)
    return drawn(GRADIENT_TYPE[kind], n, dim, sizes, seed)


@pytest.mark.parametrize(("source", "destination"), PAIRS, ids=[" to ".join(pair) for pair in PAIRS])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_conversion_is_that_of_a_list_of_tensors_and_its_gradients_too(ranks, source, destination):
    def compare(collective):
        n, rank = collective.world_size, collective.rank
        for dim, uneven in itertools.product((0, 1, -1), (False, True)):
            sizes = SIZES[n] if uneven else [6 // n] * n
            values = drawn(source, n, dim, sizes, seed=1)
            weights = cotangents(destination, n, dim, sizes, seed=2)

            if source == "invariant":  # one tensor that all ranks compute with
                inputs = [values[0].clone().requires_grad_()] * n
            else:
                inputs = [x.clone().requires_grad_() for x in values]
            outputs = in_one_process(inputs, source, destination, dim, sizes)
            share = n if destination == "invariant" else 1  # one computation that all ranks repeat
            loss = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)) / share
            loss.backward()

            given = None if not uneven or "varying" not in (source, destination) else sizes
            x = values[rank].clone().requires_grad_()
            y = redistribute(x, collective, source, destination, dim=dim, sizes=given)
            assert type(y) is torch.Tensor
            torch.testing.assert_close(y, outputs[rank], rtol=0, atol=1e-14)
            (gradient,) = torch.autograd.grad(y, x, weights[rank], create_graph=True)
            torch.testing.assert_close(gradient, inputs[rank].grad, rtol=0, atol=1e-14)
        return True

    assert all(results(ranks, compare))


def inner_product(collective, kind, a, b):
    total = collective.all_reduce((a * b).sum().detach()).item()
    return total / collective.world_size if kind == "invariant" else total


@pytest.mark.parametrize(("source", "destination"), PAIRS, ids=[" to ".join(pair) for pair in PAIRS])
@pytest.mark.parametrize("ranks", [2, 3])
def test_backward_of_every_conversion_is_its_adjoint_and_so_is_backward_of_backward(ranks, source, destination):
    def compare(collective):
        n, rank = collective.world_size, collective.rank
        for dim, uneven in itertools.product((0, -1), (False, True)):
            sizes = SIZES[n] if uneven else [6 // n] * n
            given = sizes if uneven and "varying" in (source, destination) else None
            x, v = (drawn(source, n, dim, sizes, seed=seed)[rank].clone().requires_grad_() for seed in (1, 2))
            w = cotangents(destination, n, dim, sizes, seed=3)[rank].clone().requires_grad_()
            y = redistribute(x, collective, source, destination, dim=dim, sizes=given)
            (gradient,) = torch.autograd.grad(y, x, w, create_graph=True)
            forward = inner_product(collective, destination, y, w)
            backward = inner_product(collective, source, x, gradient)
            assert forward == pytest.approx(backward, abs=1e-12)

            (twice,) = torch.autograd.grad(gradient, w, v.detach())
            again = redistribute(v.detach(), collective, source, destination, dim=dim, sizes=given)
            torch.testing.assert_close(twice, again, rtol=0, atol=1e-14)
        return True

    assert all(results(ranks, compare))


@pytest.mark.parametrize("ranks", [2, 3])
def test_varying_along_another_dim_is_an_exchange_with_lengths_on_both_sides(ranks):
    def compare(collective):
        n, rank = collective.world_size, collective.rank
        whole = torch.arange(36.0, dtype=torch.float64).reshape(6, 6)
        for rows, columns in ((None, None), (SIZES[n], None), (None, SIZES[n]), (SIZES[n], SIZES[n][::-1])):
            of_rows, of_columns = rows or [6 // n] * n, columns or [6 // n] * n
            x = whole.split(of_rows, 0)[rank].clone().requires_grad_()
            y = redistribute(x, collective, "varying", "varying", dim=0, to_dim=-1, sizes=rows, to_sizes=columns)
            assert torch.equal(y, whole.split(of_columns, 1)[rank])
            y.backward(10 * whole.split(of_columns, 1)[rank])
            assert torch.equal(x.grad, 10 * x.detach())
        return True

    assert all(results(ranks, compare))


def test_conversions_that_do_not_exist_are_refused_with_the_reason_and_the_collective_stays_usable():
    def refused(collective):
        x = torch.ones(4, 4)
        for source, destination, reason in [
            ("replicate", "invariant", "counted once per rank"),
            ("invariant", "partial", "go over 'replicate'"),
            ("invariant", "invariant", "no such pair"),
            ("varying", "varying", "no such pair"),
            ("sharded", "replicate", "no such pair"),
        ]:
            with pytest.raises(ValueError, match=reason):
                redistribute(x, collective, source, destination)
        with pytest.raises(ValueError, match="belong to varying to varying"):
            redistribute(x, collective, "partial", "varying", to_dim=1)
        with pytest.raises(ValueError, match="the same dim"):
            redistribute(x, collective, "varying", "varying", dim=1, to_dim=-1)
        return collective.all_reduce(1).item()

    assert results(2, refused) == [2, 2]


def test_the_ranks_sum_to_the_value_whichever_of_them_keeps_it():
    """Replicate to partial: leaving x as it is would change the sum from 5 to 5 per rank."""

    def summed(collective):
        infinite = redistribute(torch.tensor([torch.inf]), collective, "replicate", "partial")
        assert collective.all_reduce(infinite).item() == torch.inf
        x = torch.tensor([5.0], requires_grad=True)
        parts = redistribute(x, collective, "replicate", "partial")
        total = redistribute(parts, collective, "partial", "replicate")
        (total * (collective.rank + 1)).backward()
        return parts.item(), total.item(), x.grad.item()

    # The weights 1, 2, 3 meet one x: the ranks' contributions to its gradient sum to 6.
    values = results(3, summed)
    assert sum(part for part, _, _ in values) == 5
    assert [total for _, total, _ in values] == [5, 5, 5]
    assert sum(gradient for _, _, gradient in values) == 6


# Beside DTensor


def dtensor(x, collective, before, after, gradient):
    """x on this rank, redistributed by DTensor and unwrapped with its gradient's placement given."""
    mesh = init_device_mesh("cpu", (collective.world_size,))
    wrapped = DTensor.from_local(x, mesh, [before], run_check=False)
    return wrapped.redistribute(placements=[after]).to_local(grad_placements=gradient and [gradient])


SAME_AS_DTENSOR = [
    ("varying", "replicate", (Shard(0), Replicate(), Partial())),
    ("varying", "invariant", (Shard(0), Replicate(), None)),
    ("varying", "invariant", (Shard(0), Replicate(), Replicate())),
    ("partial", "replicate", (Partial(), Replicate(), Partial())),
    ("partial", "invariant", (Partial(), Replicate(), None)),
    ("partial", "varying", (Partial(), Shard(0), None)),
    ("invariant", "replicate", (Replicate(), Replicate(), Partial())),
    ("invariant", "varying", (Replicate(), Shard(0), None)),
]


@pytest.mark.parametrize(("source", "destination", "placements"), SAME_AS_DTENSOR, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_our_two_types_are_dtensors_three_placements(ranks, source, destination, placements):
    def compare(collective):
        n, rank = collective.world_size, collective.rank
        sizes = [6 // n] * n
        values = drawn(source, n, 0, sizes, seed=1)[rank]
        w = cotangents(destination, n, 0, sizes, seed=2)[rank]
        pairs = []
        for call in (
            lambda x: redistribute(x, collective, source, destination),
            lambda x: dtensor(x, collective, *placements),
        ):
            x = values.clone().requires_grad_()
            y = call(x)
            y.backward(w)
            pairs.append((y.detach(), x.grad))
        torch.testing.assert_close(*pairs, rtol=0, atol=1e-14)
        return True

    assert all(results(ranks, compare))


def test_varying_to_varying_is_dtensors_shard_to_shard():
    def compare(collective):
        n, rank = collective.world_size, collective.rank
        values, w = (drawn("varying", n, dim, [6 // n] * n, seed=dim)[rank] for dim in (0, 1))
        pairs = []
        for call in (
            lambda x: redistribute(x, collective, "varying", "varying", dim=0, to_dim=1),
            lambda x: dtensor(x, collective, Shard(0), Shard(1), None),
        ):
            x = values.clone().requires_grad_()
            y = call(x)
            y.backward(w)
            pairs.append((y.detach(), x.grad))
        torch.testing.assert_close(*pairs, rtol=0, atol=0)
        return True

    assert all(results(3, compare))


# Small functions


def test_scale_grad_scales_the_gradient_and_only_it():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = scale_grad(x, 0.5)
    assert torch.equal(y, x)
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert gradient.tolist() == [1.5, 6.0]  # 3 x^2 / 2
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert second.tolist() == [1.5, 3.0]  # 6 x, halved on the way through each y: once per derivative
    assert torch.func.grad(lambda t: (scale_grad(t, 0.5) ** 3).sum())(x.detach()).tolist() == [1.5, 6.0]
    assert torch.func.vmap(torch.func.grad(lambda t: scale_grad(t, 0.5) ** 3))(x.detach()).tolist() == [1.5, 6.0]


def test_a_gather_whose_gradient_is_the_mean_is_one_with_scale_grad():
    def gradient(collective):
        x = torch.ones(2, requires_grad=True)
        gathered = collective.all_gather(scale_grad(x, 1 / collective.world_size))
        (gathered * (collective.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert results(3, gradient) == [[2.0, 2.0]] * 3  # (1 + 2 + 3) / 3


def test_the_names_of_tensor_parallel_regions():
    """Two ranks, x = [1, 2] and [2, 4], gradients [1, 1] and [2, 2] where the result is whole."""

    def values(collective):
        weight = collective.rank + 1.0
        found = {}
        for function in (
            copy_to_parallel_region,
            reduce_from_parallel_region,
            scatter_to_parallel_region,
            gather_from_parallel_region,
        ):
            x = torch.tensor([[1.0, 2.0]]) * weight
            x.requires_grad_()
            y = function(x, collective)
            (y * weight).sum().backward()
            found[function.__name__.split("_")[0]] = (y.tolist(), x.grad.tolist())
        return found

    assert results(2, values) == [
        {
            "copy": ([[1.0, 2.0]], [[3.0, 3.0]]),
            "reduce": ([[3.0, 6.0]], [[1.0, 1.0]]),
            "scatter": ([[1.0]], [[1.0, 2.0]]),
            "gather": ([[1.0, 2.0, 2.0, 4.0]], [[1.0, 1.0]]),
        },
        {
            "copy": ([[2.0, 4.0]], [[3.0, 3.0]]),
            "reduce": ([[3.0, 6.0]], [[2.0, 2.0]]),
            "scatter": ([[4.0]], [[1.0, 2.0]]),
            "gather": ([[1.0, 2.0, 2.0, 4.0]], [[2.0, 2.0]]),
        },
    ]


def test_the_first_dim_has_tensor_parallel_names_too():
    def values(collective):
        x = torch.arange(4.0).reshape(2, 2)
        own = scatter_to_parallel_region(x, collective, dim=0)
        return own.tolist(), gather_from_parallel_region(own, collective, dim=0).tolist()

    assert results(2, values) == [([[0.0, 1.0]], [[0.0, 1.0], [2.0, 3.0]]), ([[2.0, 3.0]], [[0.0, 1.0], [2.0, 3.0]])]


# Halos


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("width", [1, 2, (2, 0), (0, 1)])
def test_a_halo_of_uneven_pieces_and_its_gradient_are_those_of_the_padded_whole(width, wrap):
    def compare(collective):
        n, rank = collective.world_size, collective.rank
        before, after = (width, width) if isinstance(width, int) else width
        sizes = [2, 4, 3][:n]
        starts = [0, 2, 6][:n]
        whole = torch.arange(2.0 * sum(sizes), dtype=torch.float64).reshape(2, -1).sin().requires_grad_()
        ends = (whole[:, sum(sizes) - before :], whole[:, :after])
        padded = torch.cat([ends[0], whole, ends[1]] if wrap else [0 * ends[0], whole, 0 * ends[1]], 1)
        expected = [padded[:, start : start + size + before + after] for start, size in zip(starts, sizes, strict=True)]
        sum((piece**3 * (other + 1)).sum() for other, piece in enumerate(expected)).backward()

        x = whole.detach()[:, starts[rank] : starts[rank] + sizes[rank]].clone().requires_grad_()
        y = collective.halo_exchange(x, -1, width, wrap=wrap)
        torch.testing.assert_close(y, expected[rank], rtol=0, atol=0)
        (y**3 * (rank + 1)).sum().backward()
        own = whole.grad[:, starts[rank] : starts[rank] + sizes[rank]]
        torch.testing.assert_close(x.grad, own, rtol=0, atol=1e-14)
        return True

    assert all(results(1, compare) + results(2, compare) + results(3, compare))


def test_a_piece_that_is_too_short_is_refused_on_all_ranks_and_the_next_call_works():
    def refused(collective):
        x = torch.ones(1 if collective.rank == 1 else 3)
        with pytest.raises((ValueError, CollectiveMismatchError), match="rank 1 holds 1 entries of x along dim 0"):
            collective.halo_exchange(x, 0, 2)
        return collective.halo_exchange(x, 0, 1).tolist()

    assert results(3, refused) == [[0, 1, 1, 1, 1], [1, 1, 1], [1, 1, 1, 1, 0]]
