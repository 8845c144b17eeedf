"""Containers taken apart and put together."""

import dataclasses
import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from collective_strategy.collectives.trees import Tree

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = 2


class Size(enum.IntEnum):
    SMALL = 1


def doubled(value: Any) -> Any:
    return Tree.of(value, "all_gather").map(lambda leaf: leaf * 2)


def test_every_container_is_rebuilt_as_what_it_was() -> None:
    x = torch.ones(2)
    for value in ([x], (x,), {"k": x}, OrderedDict(k=x), Pair(x, x), Slotted(x), [], (), {}, [[[x]]]):
        result = doubled(value)
        assert type(result) is type(value)
    assert doubled(defaultdict(list, k=x)).default_factory is list
    assert doubled(Slotted(x)).b.item() == 4
    assert isinstance(doubled(torch.max(torch.ones(2, 2), 0)), torch.return_types.max)


def test_the_value_taken_apart_is_left_alone() -> None:
    x = torch.ones(2)
    value = {"a": [x], "b": Slotted(x)}
    doubled(value)
    assert value["a"][0] is x
    assert value["b"].a is x


def test_dicts_are_equal_whatever_the_order_of_insertion() -> None:
    one, other = {"a": torch.ones(1), "b": torch.zeros(1)}, {"b": torch.zeros(1), "a": torch.ones(1)}
    first, second = Tree.of(one, "all_gather"), Tree.of(other, "all_gather")
    assert first.structure == second.structure
    assert [leaf.item() for leaf in first.leaves] == [leaf.item() for leaf in second.leaves]
    assert list(first.rebuild([1, 2])) == ["a", "b"]
    assert list(second.rebuild([1, 2])) == ["b", "a"]


def test_keys_of_different_types_do_not_collide() -> None:
    tree = Tree.of({1: torch.ones(1), "1": torch.zeros(1), (1,): torch.ones(1)}, "all_gather")
    assert tree.rebuild(["int", "str", "tuple"]) == {1: "int", "1": "str", (1,): "tuple"}


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (1, torch.int64), (True, torch.bool), (0.5, torch.float64), (1j, torch.complex128), (Size.SMALL, torch.int64),
        (np.int8(3), torch.int64), (np.float32(0.5), torch.float64), (Fraction(1, 2), torch.float64),
    ],
)  # fmt: skip
def test_numbers_are_leaves(number: Any, dtype: torch.dtype) -> None:
    (leaf,) = Tree.of(number, "all_gather").leaves
    assert (leaf.dtype, leaf.shape) == (dtype, ())
    assert leaf.item() == complex(number) if dtype.is_complex else leaf.item() == number


@pytest.mark.parametrize(
    "bad", ["s", b"b", None, {1}, object(), Decimal("1.5"), torch.float32, int, {"a": [None]}, len]
)
def test_other_leaves_are_refused_with_place_and_object_method(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)all_gather: x.*all_gather_object") as error:
        Tree.of(bad, "all_gather")
    if isinstance(bad, dict):
        assert "x['a'][0] is None" in str(error.value)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_integers_that_do_not_fit_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="int64"):
        Tree.of(number, "all_gather")


def test_counters_are_dicts_of_numbers() -> None:
    result = doubled(Counter("aab"))
    assert type(result) is Counter
    assert {key: value.item() for key, value in result.items()} == {"a": 4, "b": 2}


def test_the_text_of_a_tree_says_what_ranks_must_have_in_common() -> None:
    tree = Tree.of({"a": [torch.ones(2, 3), 1]}, "all_gather")
    assert tree.describe() == "dict(['a']: list(*, *)) with float32[2, 3], int64[]"
    assert tree.describe(shapes=False) == "dict(['a']: list(*, *)) with float32, 2 dims, int64, 0 dims"
