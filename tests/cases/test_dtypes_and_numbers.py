"""Dtypes that only some backends carry, integers that lost digits, and reductions that meant something else."""

import pytest
import torch
from on_ranks import error_of, values

from collective_strategy.collectives import Collective


def test_bool_masks_are_gathered_and_broadcast_as_bools() -> None:
    """pytorch #89197, pytorch #24137, horovod #79."""

    def masks(c: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.tensor([c.rank == 0, c.rank == 1, True])
        return c.all_gather(mask), c.broadcast(mask, src=1)

    for gathered, sent in values(2, masks):
        assert gathered.dtype == sent.dtype == torch.bool
        assert gathered.tolist() == [[True, False, True], [False, True, True]]
        assert sent.tolist() == [False, True, True]


def test_sums_of_bools_are_refused_and_the_way_to_count_is_named() -> None:
    def count(c: Collective) -> tuple[tuple[str, str], int, bool]:
        flag = torch.tensor([c.rank < 3])
        return error_of(lambda: c.all_reduce(flag)), c.all_reduce(flag.long()).item(), c.any(c.rank == 2)

    for (kind, text), counted, anybody in values(4, count):
        assert kind == "TypeError"
        assert ".long()" in text
        assert (counted, anybody) == (3, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_works_on_the_cpu(dtype: torch.dtype) -> None:
    """pytorch #111131, torchmetrics #1809."""

    def halves(c: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            c.reduce(torch.ones(4, dtype=dtype) * (c.rank + 1), "sum"),
            c.all_gather(torch.tensor([1.5 * c.rank], dtype=dtype)),
        )

    for total, gathered in values(2, halves):
        assert total.dtype == gathered.dtype == dtype
        assert total.tolist() == [3.0] * 4
        assert gathered.tolist() == [[0.0], [1.5]]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_summed_and_averaged_and_have_no_maximum(dtype: torch.dtype) -> None:
    """pytorch #71613, pytorch #99518, pytorch #45760."""

    def complexes(c: Collective) -> tuple[list[complex], list[complex], list[list[complex]], list[tuple[str, str]]]:
        z = torch.tensor([1 + 2j], dtype=dtype) * (c.rank + 1)
        refused = [error_of(lambda op=op: c.reduce(z, op)) for op in ("max", "min", "prod")]
        return c.reduce(z, "sum").tolist(), c.reduce(z, "mean").tolist(), c.all_gather(z).tolist(), refused

    first, second = values(2, complexes)
    assert first == second
    total, mean, gathered, refused = first
    assert total == [3 + 6j]
    assert mean == [1.5 + 3j]
    assert gathered == [[1 + 2j], [2 + 4j]]
    assert all(kind == "TypeError" and "complex" in text for kind, text in refused)


def test_64_bit_integers_keep_all_digits() -> None:
    """pytorch #95572, torchrec #2827."""

    def integers(c: Collective) -> tuple[list, list, int, int]:
        x = torch.tensor([2**53 + 1 + c.rank, -(2**62)])
        return (
            c.all_gather(x).tolist(),
            c.broadcast(x, src=1).tolist(),
            c.reduce(torch.tensor([2**53 + 1]), "max").item(),
            c.reduce(torch.tensor([2**53 + c.rank]), "sum").item(),
        )

    for gathered, sent, most, total in values(2, integers):
        assert gathered == [[2**53 + 1, -(2**62)], [2**53 + 2, -(2**62)]]
        assert sent == [2**53 + 2, -(2**62)]
        assert (most, total) == (2**53 + 1, 2**54 + 1)


def test_python_numbers_keep_their_precision() -> None:
    """ignite #2959, Lightning #6580, Lightning #5080."""

    def numbers(c: Collective) -> tuple[torch.Tensor, ...]:
        return (
            c.all_gather(2**53 + 1 + c.rank),
            c.all_gather(0.1),
            c.all_gather(c.rank == 1),
            c.reduce(1 + c.rank, "mean"),
        )

    for integers, floats, flags, mean in values(2, numbers):
        assert integers.tolist() == [2**53 + 1, 2**53 + 2]
        assert floats.tolist() == [0.1, 0.1]
        assert (flags.dtype, flags.tolist()) == (torch.bool, [False, True])
        assert mean.item() == 1.5


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64],
)
def test_every_integer_type_is_carried(dtype: torch.dtype) -> None:
    """pytorch #2699, pytorch_xla #2609."""

    def integers(c: Collective) -> list[tuple[bool, list]]:
        x = torch.tensor([1 + c.rank, 5], dtype=dtype)
        results = (c.all_gather(x), c.broadcast(x, src=1), c.reduce(x, "sum"))
        return [(y.dtype == dtype, y.tolist()) for y in results]

    assert values(2, integers) == [[(True, [[1, 5], [2, 5]]), (True, [2, 5]), (True, [3, 10])]] * 2


def test_the_mean_of_integers_is_not_floored() -> None:
    """horovod #2054, torchcomms #287."""

    def mean(c: Collective) -> tuple[torch.Tensor, list[int]]:
        x = torch.tensor([1 + c.rank, 5])
        return c.reduce(x, "mean"), x.tolist()

    for rank, (y, x) in enumerate(values(2, mean)):
        assert y.is_floating_point()
        assert y.tolist() == [1.5, 5.0]
        assert x == [1 + rank, 5]


def test_ranks_that_disagree_on_the_dtype_all_hear_both() -> None:
    """ms-swift #9550, pytorch #118696."""

    def mixed(c: Collective) -> tuple[str, str]:
        return error_of(lambda: c.reduce(torch.ones(4, dtype=torch.float32 if c.rank == 0 else torch.float64), "sum"))

    first, second = values(2, mixed)
    assert first == second
    assert first[0] == "CollectiveMismatchError"
    assert "rank 0: reduce" in first[1]
    assert "float32" in first[1]
    assert "float64" in first[1]


def test_reductions_have_one_spelling_and_one_default() -> None:
    """Lightning #9100, horovod #2627."""

    def spelled(c: Collective) -> tuple[set[float], list[float]]:
        x = torch.tensor([1.0 + c.rank])
        same = {c.reduce(x, op).item() for op in ("mean", "avg", "AVG")} | {c.reduce(x).item()}
        return same, [c.reduce(x, op).item() for op in ("sum", "max", "min")]

    assert values(2, spelled) == [({1.5}, [3.0, 2.0, 1.0])] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_an_unknown_reduction_is_refused_with_the_list_of_known_ones(n: int) -> None:
    for kind, text in values(n, lambda c: error_of(lambda: c.reduce(torch.tensor([1.0]), "avgg"))):
        assert kind == "ValueError"
        assert "sum, mean, max, min" in text
