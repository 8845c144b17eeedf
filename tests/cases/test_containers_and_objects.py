"""Containers that came back as something else, strings that passed for gathered, and objects that lost their form."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from on_ranks import error_of, values

from collective_strategy.collectives import Collective

Pair = namedtuple("Pair", "a b")


@dataclass
class Batch:
    a: torch.Tensor


@dataclass(frozen=True)
class FrozenBatch:
    a: torch.Tensor
    n: int = 3


def test_containers_keep_their_types_at_every_level() -> None:
    """accelerate #65, pytorch #50510, Lightning #7696."""

    def gather(c: Collective) -> list[Any]:
        r = c.rank
        y = c.all_gather(Pair(torch.tensor([r]), {"k": [torch.tensor(r)]}))
        z = c.all_gather(Batch(torch.tensor([r])))
        o = c.all_gather(OrderedDict(b=torch.tensor(r), a=torch.tensor(-r)))
        return [type(y) is Pair, y.a.tolist(), y.b["k"][0].tolist(), type(z) is Batch, z.a.tolist(),
                type(o) is OrderedDict, list(o), o["b"].tolist()]  # fmt: skip

    assert values(2, gather) == [[True, [[0], [1]], [0, 1], True, [[0], [1]], True, ["b", "a"], [0, 1]]] * 2


def test_frozen_dataclasses_come_back_as_new_ones() -> None:
    """Lightning #10873, Lightning #21577."""

    def gather(c: Collective) -> tuple[bool, list, list]:
        batch = FrozenBatch(torch.tensor([c.rank]))
        y = c.all_gather(batch)
        return type(y) is FrozenBatch, y.a.tolist(), batch.a.tolist()

    assert values(2, gather) == [(True, [[0], [1]], [rank]) for rank in range(2)]


@pytest.mark.parametrize("case", ["a string", "None in a dict"])
def test_strings_and_none_do_not_pass_as_gathered(case: str) -> None:
    """Lightning #7695, Lightning #7696, accelerate #1383."""

    def gather(c: Collective) -> tuple[tuple[str, str], list[str]]:
        bad = f"hi{c.rank}" if case == "a string" else {"x": torch.tensor([c.rank]), "id": None}
        return error_of(lambda: c.all_gather(bad)), c.all_gather_object(f"hi{c.rank}")

    for (kind, text), objects in values(2, gather):
        assert kind == "TypeError"
        assert "all_gather_object" in text
        assert ("x['id']" if case == "None in a dict" else "'hi") in text
        assert objects == ["hi0", "hi1"]


def test_gathered_objects_are_not_flattened() -> None:
    """accelerate #2537, accelerate #238."""

    def gather(c: Collective) -> tuple[list, list[int]]:
        r = c.rank
        nested = c.all_gather_object((["p%d" % r, "q"], {"n": [r, [r]]}))  # noqa: UP031
        return nested, [len(text) for text in c.all_gather_object("x" * 10 ** (5 * r))]

    assert (
        values(2, gather)
        == [
            ([(["p0", "q"], {"n": [0, [0]]}), (["p1", "q"], {"n": [1, [1]]})], [1, 100000]),
        ]
        * 2
    )


def test_objects_are_broadcast_from_any_source_with_their_type() -> None:
    """Lightning #9691, ignite #1700."""

    def broadcast(c: Collective) -> list[Any]:
        r = c.rank
        return [
            c.broadcast_object(o if r == 1 else None, src=1) for o in ({"r": r}, (r,), None, "s", [torch.tensor([r])])
        ]

    for received in values(2, broadcast):
        assert received[:4] == [{"r": 1}, (1,), None, "s"]
        assert [type(value) for value in received] == [dict, tuple, type(None), str, list]
        assert received[4][0].tolist() == [1]
