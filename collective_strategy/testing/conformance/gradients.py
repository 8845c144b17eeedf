"""The gradient of every pair is the adjoint of its forward, for the types in the table of operations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from collective_strategy.collectives import OPERATIONS, Collective
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.gradient_cases import Case, cases, product, sampled
from collective_strategy.testing.conformance.suite import check

PAIRED = tuple(row.name for row in OPERATIONS if row.pairs)
_RTOL = 1e-12


def _tensor(collective: Collective, values: np.ndarray) -> Tensor:
    """On the collective's device, where a model's tensors are."""
    return torch.from_numpy(values).to(collective.device)


def _check_case(case: Case, seed: int, collective: Collective, expect: Expect) -> tuple[float, float]:
    """Forward, gradient and second derivative on this rank; this rank's terms of the two inner products."""
    rank, n = collective.rank, collective.world_size
    source, destination = case.types
    xs = sampled(source, case.shapes, seed)
    ys = case.forward(xs)
    ws = sampled(destination, [y.shape for y in ys], seed, cotangent=True)
    gradients = case.backward(ws)
    x, w = _tensor(collective, xs[rank]).requires_grad_(), _tensor(collective, ws[rank]).requires_grad_()
    y = case.call(x)
    expect.close(y, ys[rank], torch.float64, "result", _RTOL)
    if y.shape != w.shape:
        return 0.0, 1.0
    (gradient,) = torch.autograd.grad(y, x, w, create_graph=True)
    expect.close(gradient, gradients[rank], torch.float64, "gradient", _RTOL)
    vs = sampled(source, case.shapes, seed + 1)
    (second,) = torch.autograd.grad(gradient, w, _tensor(collective, vs[rank]))
    expect.close(second, case.forward(vs)[rank], torch.float64, "second derivative", _RTOL)
    expect.bits(x, xs[rank], torch.float64, "the input")
    expect.bits(w, ws[rank], torch.float64, "the incoming gradient")
    left = float((y * w).detach().sum()) / (n if destination == "invariant" else 1)
    return left, float((gradient * x).detach().sum()) / (n if source == "invariant" else 1)


def _check_all(collective: Collective, expect: Expect) -> None:
    products: list[tuple[float, float]] = []
    names: list[str] = []
    for seed, case in enumerate(cases(collective)):
        with expect.about(case.name):
            products.append(_check_case(case, 10 * seed, collective, expect))
            names.append(case.name)
    totals = np.sum(collective.all_gather_object(products), axis=0)
    for name, (left, right) in zip(names, totals, strict=True):
        agree = abs(left - right) <= 1e-9 * (1 + abs(left))
        expect.true(agree, f"{name} is not the adjoint: sum of y w is {left}, sum of x grad is {right}")


@check(*PAIRED)
def gradients_are_adjoints(collective: Collective, expect: Expect) -> None:
    _check_all(collective, expect)


@check(*PAIRED, world_sizes=(3, 4))
def gradients_are_adjoints_in_groups_without_rank_zero(collective: Collective, expect: Expect) -> None:
    group = collective.split(collective.rank == 0)
    _check_all(group, expect)


@check(*PAIRED, world_sizes=(4,), mesh={"data": -1, "model": 2})
def gradients_are_adjoints_along_every_axis(collective: Collective, expect: Expect) -> None:
    for axis in ("model", "data"):
        _check_all(collective[axis], expect)


@check(*PAIRED)
def every_pair_of_the_table_is_tested(collective: Collective, expect: Expect) -> None:
    tested = {(case.operation, case.key) for case in cases(collective)}
    for row in OPERATIONS:
        for key, _ in row.pairs:
            expect.true((row.name, key) in tested, f"{row.name} {key!r} has no case")
    for case in cases(collective):  # the oracle itself: the two maps are adjoint
        source, destination = case.types
        xs = sampled(source, case.shapes, 1)
        ys = case.forward(xs)
        ws = sampled(destination, [y.shape for y in ys], 2, cotangent=True)
        left, right = product(destination, ys, ws), product(source, xs, case.backward(ws))
        expect.true(abs(left - right) < 1e-9, f"{case.name}: the expected values are not adjoint, {left} and {right}")


@check(*PAIRED)
def gradients_do_not_depend_on_strides(collective: Collective, expect: Expect) -> None:
    rank = collective.rank
    for seed, case in enumerate(cases(collective)):
        source, destination = case.types
        xs = sampled(source, case.shapes, seed)
        ys = case.forward(xs)
        ws = sampled(destination, [y.shape for y in ys], seed, cotangent=True)
        reverse = list(range(xs[rank].ndim))[::-1]
        x = _tensor(collective, xs[rank].transpose(reverse).copy()).permute(reverse).requires_grad_()
        back = list(range(ws[rank].ndim))[::-1]
        w = _tensor(collective, ws[rank].transpose(back).copy()).permute(back)
        with expect.about(f"{case.name}, transposed"):
            y = case.call(x)
            expect.close(y, ys[rank], torch.float64, "result", _RTOL)
            if y.shape == w.shape:
                (gradient,) = torch.autograd.grad(y, x, w)
                expect.close(gradient, case.backward(ws)[rank], torch.float64, "gradient", _RTOL)
        with expect.about(f"{case.name}, expanded"):
            leaf = _tensor(collective, xs[rank]).requires_grad_()
            case.call(leaf).sum().backward()  # its gradient is one expanded number
            ones = case.backward([np.ones_like(y) for y in ys])[rank]
            expect.close(leaf.grad, ones, torch.float64, "gradient of the sum", _RTOL)


@check(*PAIRED)
def gradients_pass_by_siblings_and_saved_values(collective: Collective, expect: Expect) -> None:
    rank = collective.rank
    for seed, case in enumerate(cases(collective)):
        source, destination = case.types
        xs = sampled(source, case.shapes, seed)
        ys = case.forward([np.exp(x) for x in xs])
        ws = sampled(destination, [y.shape for y in ys], seed, cotangent=True)
        x = _tensor(collective, xs[rank]).requires_grad_()
        activated = x.exp()  # its backward needs its result: an operation that writes into it is found here
        y = case.call(activated)
        own = _tensor(collective, np.ones_like(xs[rank]))
        torch.autograd.backward([y, activated, x * 3], [_tensor(collective, ws[rank]), own, own])
        through = case.backward(ws)[rank] + 1
        expect.close(x.grad, through * np.exp(xs[rank]) + 3, torch.float64, f"{case.name} with siblings", _RTOL)


@check(*PAIRED)
def low_precision_gradients_keep_their_dtype(collective: Collective, expect: Expect) -> None:
    rank = collective.rank
    for dtype in (torch.bfloat16, torch.complex64):
        for case in cases(collective):
            x = torch.ones(case.shapes[rank], dtype=dtype, device=collective.device, requires_grad=True)
            y = case.call(x)
            expect.same((y.dtype, y.requires_grad), (dtype, True), f"{case.name} of {dtype}")
            (y * y.conj()).real.sum().backward()
            expect.true(x.grad is not None and x.grad.dtype == dtype, f"{case.name}: the gradient of {dtype}")
