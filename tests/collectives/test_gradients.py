"""Gradients: the property test can fail, numbers worked out by hand, and modules against one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from collective_strategy.collectives import Collective
from collective_strategy.collectives.operations import SpmdType
from collective_strategy.testing import run_ranks
from collective_strategy.testing.conformance.gradient_cases import sampled

# The wrong pairings: forward, backward as somebody once had it, the types under which it must fail, shape per rank.
Wrong = tuple[Callable[[Collective, Tensor], Tensor], Callable[[Collective, Tensor], Tensor], SpmdType, SpmdType, int]


def per_rank(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Every rank's result; the tensors that the function makes lie on the collective's device."""

    def on_its_device(c: Collective, *args: Any) -> Any:
        with torch.device(c.device):
            return function(c, *args)

    return [outcome.result() for outcome in run_ranks(n, on_its_device, *args)]


def _own(c: Collective, g: Tensor) -> Tensor:
    return g.chunk(c.world_size)[c.rank]


def _all(c: Collective, g: Tensor) -> Tensor:
    return g


WRONG: dict[str, Wrong] = {
    "Megatron's g with an all_reduce in backward": (
        lambda c, x: c.all_reduce(x), lambda c, g: c.all_reduce(g), "partial", "invariant", 4,
    ),
    "an invariant gather with a reduce_scatter": (
        lambda c, x: c.all_gather(x, 0), lambda c, g: c.reduce_scatter(g), "varying", "invariant", 2,
    ),
    "a replicated gather with a slice": (lambda c, x: c.all_gather(x, 0), _own, "varying", "replicate", 2),
    "a broadcast with the identity": (lambda c, x: c.broadcast(x), _all, "varying", "replicate", 3),
    "Megatron's f without its all_reduce": (lambda c, x: x.clone(), _all, "invariant", "replicate", 3),
    "a reduce_scatter times the number of ranks": (
        lambda c, x: c.reduce_scatter(x), lambda c, g: c.all_gather(g, 0) * c.world_size, "partial", "varying", 12,
    ),
    "a gather divided by the number of ranks": (
        lambda c, x: c.all_gather(x, 0), lambda c, g: c.reduce_scatter(g) / c.world_size, "varying", "replicate", 2,
    ),
    "a shift whose backward is not the way back": (
        lambda c, x: c.shift(x, wrap=False), lambda c, g: c.shift(g, wrap=False), "varying", "varying", 3,
    ),
}  # fmt: skip

RIGHT: dict[str, Wrong] = {
    "Megatron's g": (lambda c, x: c.all_reduce(x), _all, "partial", "invariant", 4),
    "a replicated gather": (
        lambda c, x: c.all_gather(x, 0),
        lambda c, g: c.reduce_scatter(g),
        "varying",
        "replicate",
        2,
    ),
}


def disagreement(c: Collective, case: Wrong) -> float:
    """How far backward is from the adjoint of forward: the difference of the two inner products."""
    forward, backward, source, destination, length = case
    n, rank = c.world_size, c.rank
    x = torch.from_numpy(sampled(source, [(length,)] * n, 1)[rank]).to(c.device)
    y = forward(c, x)
    w = torch.from_numpy(sampled(destination, [tuple(y.shape)] * n, 2, cotangent=True)[rank]).to(c.device)
    left = float((y * w).sum()) / (n if destination == "invariant" else 1)
    right = float((backward(c, w) * x).sum()) / (n if source == "invariant" else 1)
    totals = np.sum(c.all_gather_object((left, right)), axis=0)
    return abs(float(totals[0] - totals[1]))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", WRONG)
def test_the_adjoint_test_catches_a_wrong_pair(name: str, n: int) -> None:
    assert min(per_rank(n, disagreement, WRONG[name])) > 1e-3


@pytest.mark.parametrize("name", RIGHT)
def test_the_adjoint_test_accepts_a_right_pair(name: str) -> None:
    assert max(per_rank(3, disagreement, RIGHT[name])) < 1e-12


def gradients(weigh: bool, call: Callable[[Collective, Tensor], Tensor]) -> list[list[float]]:
    """x = [1, 2] * (rank + 1); each rank's loss is the sum of the result, times rank + 1 where weighed."""

    def backward(c: Collective) -> list[float]:
        x = (torch.tensor([1.0, 2.0]) * (c.rank + 1)).requires_grad_()
        (call(c, x).sum() * (1 + c.rank if weigh else 1)).backward()
        assert x.grad is not None
        return x.grad.tolist()

    return per_rank(2, backward)


@pytest.mark.parametrize(
    ("name", "call", "same", "weighed"),
    [
        ("all_reduce replicate", lambda c, x: c.all_reduce(x), [[2, 2]] * 2, [[3, 3]] * 2),
        ("all_reduce invariant", lambda c, x: c.all_reduce(x, to="invariant"), [[1, 1]] * 2, [[1, 1], [2, 2]]),
        ("mean replicate", lambda c, x: c.reduce(x), [[1, 1]] * 2, [[1.5, 1.5]] * 2),
        ("mean invariant", lambda c, x: c.reduce(x, to="invariant"), [[0.5, 0.5]] * 2, [[0.5, 0.5], [1, 1]]),
        ("all_gather replicate", lambda c, x: c.all_gather(x), [[2, 2]] * 2, [[3, 3]] * 2),
        ("all_gather invariant", lambda c, x: c.all_gather(x, to="invariant"), [[1, 1]] * 2, [[1, 1], [2, 2]]),
        ("reduce_scatter", lambda c, x: c.reduce_scatter(x), [[1, 1]] * 2, [[1, 2]] * 2),
        ("broadcast replicate", lambda c, x: c.broadcast(x), [[2, 2], [0, 0]], [[3, 3], [0, 0]]),
        ("broadcast invariant", lambda c, x: c.broadcast(x, to="invariant"), [[1, 1], [0, 0]], [[1, 1], [0, 0]]),
        ("all_to_all", lambda c, x: c.all_to_all(x), [[1, 1]] * 2, [[1, 2]] * 2),
        ("replicate", lambda c, x: c.replicate(x), [[2, 2]] * 2, [[3, 3]] * 2),
        ("shard of invariant", lambda c, x: c.shard(x), [[1, 1]] * 2, [[1, 2]] * 2),
        ("shard of replicate", lambda c, x: c.shard(x, of="replicate"), [[1, 0], [0, 1]], [[1, 0], [0, 2]]),
        ("scatter", lambda c, x: c.scatter(x), [[1, 1], [0, 0]], [[1, 2], [0, 0]]),
        ("shift", lambda c, x: c.shift(x), [[1, 1]] * 2, [[2, 2], [1, 1]]),
        ("shift without wrap", lambda c, x: c.shift(x, wrap=False), [[1, 1], [0, 0]], [[2, 2], [0, 0]]),
    ],
)
def test_gradients_on_two_ranks_by_hand(name: str, call: Any, same: list, weighed: list) -> None:
    assert gradients(False, call) == same
    assert gradients(True, call) == weighed


def test_a_rank_with_an_empty_piece_takes_part_in_both_passes() -> None:
    def backward(c: Collective) -> list[list[float]]:
        x = torch.ones(2 * c.rank, 1, requires_grad=True)
        (c.all_gather(x, 0, ragged=True).sum() * (1 + c.rank)).backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert per_rank(2, backward) == [[], [[3.0], [3.0]]]


def test_a_rank_whose_loss_does_not_need_the_result_takes_part_by_a_term_of_zero() -> None:
    def backward(c: Collective) -> float:
        x = torch.ones(1, requires_grad=True)
        y = c.all_gather(x).sum()
        loss = y * 5 if c.rank == 0 else x.sum() * 0 + 0 * y
        loss.backward()
        assert x.grad is not None
        return x.grad.item()

    assert per_rank(2, backward) == [5.0, 5.0]


def test_a_sequence_parallel_mlp_with_seven_tokens_on_three_ranks_is_the_one_of_one_process() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, first, second = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 4), (6, 4), (4, 6))
    )
    sizes = [3, 2, 2]

    def one_process() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, a, b = (t.clone().requires_grad_() for t in (tokens, first, second))
        y = torch.tanh(x @ a.t()) @ b.t()
        (y**2).sum().backward()
        return y.detach(), x.grad, a.grad, b.grad

    def split(c: Collective) -> tuple[Tensor, ...]:
        own = slice(2 * c.rank, 2 * c.rank + 2)
        pieces = tokens.split(sizes)[c.rank], first[own], second[:, own]
        x, a, b = (piece.clone().to(c.device).requires_grad_() for piece in pieces)
        whole = c.all_gather(x, 0, sizes=sizes)  # replicate: each rank goes on with its own columns
        y = c.reduce_scatter(torch.tanh(whole @ a.t()) @ b.t(), sizes=sizes)
        (y**2).sum().backward()
        return y.detach(), x.grad, a.grad, b.grad

    y, dx, da, db = one_process()
    parts = per_rank(3, split)
    for index, whole, dim in ((0, y, 0), (1, dx, 0), (2, da, 0), (3, db, 1)):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim), whole)


def test_an_exchange_with_experts_that_get_nothing_is_the_one_of_one_process() -> None:
    """Rank r routes its tokens to the ranks; nobody sends to rank 1, which computes nothing."""
    routes = [[2, 0, 1], [1, 0, 3], [0, 0, 2]]  # rank 2 has tokens for itself only

    def routed(c: Collective) -> tuple[Tensor, Tensor]:
        n, rank = c.world_size, c.rank
        sent, received = routes[rank], [routes[source][rank] for source in range(n)]
        x = torch.arange(float(sum(sent))).add(10 * rank).unsqueeze(1).requires_grad_()
        scale = torch.tensor([1.0 + rank], requires_grad=True)
        there = c.all_to_all(x, sizes=(sent, received))
        back = c.all_to_all(there * scale, sizes=(received, sent))
        (back * (1 + rank)).sum().backward()
        return x.grad, scale.grad

    results = per_rank(3, routed)
    for rank, (dx, _) in enumerate(results):
        expected = [(1 + rank) * (1 + target) for target, count in enumerate(routes[rank]) for _ in range(count)]
        assert dx.flatten().tolist() == expected
    # Expert 0 got tokens 0, 1 of rank 0 and 10 of rank 1; expert 2 got 2, then 11, 12, 13, then 20, 21.
    assert [scale.item() for _, scale in results] == [0 + 1 + 2 * 10, 0.0, 2 + 2 * (11 + 12 + 13) + 3 * (20 + 21)]


@pytest.mark.parametrize(
    ("to", "summed", "loss", "factor"),
    [
        ("replicate", False, "global", 1.0),
        ("replicate", True, "global", 2.0),
        ("replicate", False, "own rows", 1.0),
        ("invariant", False, "global", 0.5),
        ("invariant", True, "global", 1.0),
    ],
)
def test_a_contrastive_loss_over_gathered_features_by_type_and_synchronisation(
    to: str, summed: bool, loss: str, factor: float
) -> None:
    """open_clip #616, DeCLUTR #212: the ratio to the gradient of one process."""
    generator = torch.Generator().manual_seed(1)
    images, texts = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    start = torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def contrast(a: Tensor, b: Tensor, rows: slice) -> Tensor:
        targets = torch.arange(4)[rows]
        one = torch.nn.functional.cross_entropy((a @ b.t())[rows], targets)
        return (one + torch.nn.functional.cross_entropy((b @ a.t())[rows], targets)) / 2

    weight = start.clone().requires_grad_()
    contrast(images @ weight, texts @ weight, slice(0, 4)).backward()

    def split(c: Collective) -> Tensor:
        own = slice(2 * c.rank, 2 * c.rank + 2)
        w = start.clone().to(c.device).requires_grad_()
        a, b = (c.all_gather(x[own].to(c.device) @ w, 0, to=to) for x in (images, texts))
        contrast(a, b, own if loss == "own rows" else slice(0, 4)).backward()
        return c.all_reduce(w.grad, "sum" if summed else "mean")

    for gradient in per_rank(2, split):
        torch.testing.assert_close(gradient, factor * weight.grad)
