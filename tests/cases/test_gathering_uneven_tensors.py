"""Gathers of batches that differ in length, shape, layout or number froze, padded silently or mixed rows."""

import re

import pytest
import torch
from on_ranks import error_of, errors, values

from collective_strategy.collectives import Collective, CollectiveMismatchError


def test_batches_of_different_length_come_back_exact() -> None:
    """Lightning #7773, Lightning #19485, pytorch #156627."""

    def gather(c: Collective) -> list[torch.Tensor]:
        return c.all_gather(torch.full((c.rank + 1, 2), float(c.rank)), ragged=True)

    for n in (2, 4):
        for pieces in values(n, gather):
            assert [piece.tolist() for piece in pieces] == [[[float(k)] * 2] * (k + 1) for k in range(n)]


def test_different_lengths_without_ragged_are_an_error_on_all_ranks_that_names_the_way() -> None:
    def gather(c: Collective) -> tuple[tuple[str, str], float]:
        error = error_of(lambda: c.all_gather(torch.ones(c.rank + 1, 2)))
        return error, c.all_reduce(1.0).item()

    first, second = values(2, gather)
    assert first == second
    (kind, text), after = first
    assert kind == "CollectiveMismatchError"
    assert "[1, 2]" in text
    assert "[2, 2]" in text
    assert "ragged=True" in text
    assert after == 2.0


def test_shapes_that_differ_in_several_dims_come_back_exact() -> None:
    """Lightning-Universe bolts #791, transformers #30357."""

    def made(rank: int) -> torch.Tensor:
        return torch.arange(5 * (8 - 2 * rank) * (3 + rank)).reshape(5, 8 - 2 * rank, 3 + rank)

    for n in (2, 4):
        for pieces in values(n, lambda c: c.all_gather(made(c.rank), ragged=True)):
            for rank, piece in enumerate(pieces):
                assert torch.equal(piece, made(rank))


@pytest.mark.parametrize("check", [True, False])
def test_different_numbers_of_dims_are_one_clear_error_on_all_ranks(check: bool) -> None:
    def gather(c: Collective) -> None:
        c.all_gather(torch.ones([2] * (c.rank + 1)), ragged=True)

    for error in errors(2, gather, check=check):
        assert isinstance(error, CollectiveMismatchError)
        assert "dim" in str(error)


def test_lists_with_another_number_of_tensors_are_an_error_before_data_moves() -> None:
    """torchmetrics #2170."""

    def gather(c: Collective) -> None:
        c.all_gather([torch.tensor(float(c.rank))] * (c.rank + 2))

    first, second = errors(2, gather)
    assert isinstance(first, CollectiveMismatchError)
    assert str(first) == str(second)
    assert re.search(r"list\(\*, \*\).*list\(\*, \*, \*\)", str(first))


def test_zero_dim_tensors_are_stacked_and_keep_their_shape() -> None:
    """pytorch_xla #5797, accelerate #152, pytorch #6983."""

    def scalars(c: Collective) -> tuple[torch.Tensor, ...]:
        r = c.rank
        return (
            c.all_gather(torch.tensor(float(r))),
            c.reduce(torch.tensor(2.0 + r), "mean"),
            c.broadcast(torch.tensor(r), src=1),
        )

    for gathered, mean, sent in values(2, scalars):
        assert gathered.tolist() == [0.0, 1.0]
        assert (mean.shape, mean.item()) == ((), 2.5)
        assert (sent.shape, sent.item()) == ((), 1)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_the_logical_values_of_a_strided_tensor_are_gathered(layout: str) -> None:
    """pytorch #74809, pytorch #159548, fairscale #1173."""

    def made(rank: int) -> torch.Tensor:
        x = torch.arange(6.0).reshape(2, 3) + 10 * rank
        return {"transposed": x.t(), "strided": x[:, ::2], "expanded": x[:1].expand(4, 3)}[layout]

    for n in (2, 4):
        for gathered in values(n, lambda c: c.all_gather(made(c.rank))):
            assert torch.equal(gathered, torch.stack([made(rank) for rank in range(n)]))


def test_memory_formats_may_differ_between_ranks() -> None:
    """pytorch #163483."""

    def made(rank: int) -> torch.Tensor:
        return torch.arange(16.0).reshape(2, 2, 2, 2) + 100 * rank

    def gather(c: Collective) -> torch.Tensor:
        x = made(c.rank)
        return c.all_gather(x.to(memory_format=torch.channels_last) if c.rank == 0 else x)

    for gathered in values(2, gather):
        assert torch.equal(gathered, torch.stack([made(0), made(1)]))
