"""Source ranks that meant something else in a group, outsiders that passed for members, and means of the wrong size."""

from typing import Any

import pytest
import torch
from on_ranks import error_of, values

from collective_strategy.collectives import Collective

MESH = {"data": 2, "model": 2}  # rows (model): 0 1 | 2 3; columns (data): 0 2 | 1 3


def test_source_ranks_count_within_the_group() -> None:
    """torchrec #4601, pytorch #149200: rows that do not begin at rank 0."""

    def broadcast(c: Collective) -> tuple[float, float, int, float | None]:
        model, x = c["model"], torch.tensor([float(c.rank)])
        reduced = model.reduce(x, "sum", dst=1)
        return (
            model.broadcast(x, src=1).item(),
            model.broadcast(x, src=0).item(),
            model.broadcast_object(c.rank, src=1),
            None if reduced is None else reduced.item(),
        )

    assert values(4, broadcast, mesh=MESH) == [
        (1.0, 0.0, 1, None),
        (1.0, 0.0, 1, 1.0),
        (3.0, 2.0, 3, None),
        (3.0, 2.0, 3, 5.0),
    ]


def test_nonsense_as_source_is_refused_and_the_group_stays_usable() -> None:
    """Megatron-LM #774, pytorch #67600."""

    def refuse(c: Collective) -> tuple[list[tuple[str, str]], float]:
        x = torch.tensor([1.0])
        bad: list[Any] = [7, -1, [0, 1], None, 0.5, "0"]
        return [error_of(lambda src=src: c.broadcast(x, src=src)) for src in bad], c.all_reduce(x).item()

    for refused, total in values(2, refuse):
        assert {kind for kind, _ in refused} == {"ValueError", "TypeError"}
        assert all("src" in text and "rank" in text for _, text in refused)
        assert total == 2.0


def test_a_global_rank_is_no_source_in_a_group_of_two() -> None:
    def refuse(c: Collective) -> tuple[tuple[str, str] | None, float]:
        model = c["model"]
        error = error_of(lambda: model.broadcast(torch.ones(1), src=2)) if c.rank >= 2 else None
        return error, model.reduce(torch.ones(1), "sum").item()

    results = values(4, refuse, mesh=MESH)
    assert [total for _, total in results] == [2.0] * 4
    for error, _ in results[2:]:
        assert error is not None
        assert error[0] == "ValueError"
        assert "'model'" in error[1]
        assert "global ranks [2, 3]" in error[1]


def test_outsiders_are_told_and_members_are_not_disturbed() -> None:
    """pytorch #67600, Lightning #15195, pytorch #81291."""

    def outside(c: Collective) -> Any:
        group = c.split("first" if c.rank == 0 else None)
        if group.is_member:
            return group.reduce(torch.tensor([5.0]), "sum").item()
        x = torch.tensor([5.0])
        calls = (lambda: group.reduce(x), lambda: group.all_gather(x), lambda: group.broadcast(x), group.barrier)
        return group.rank, [error_of(call) for call in calls], x.item()

    member, *outsiders = values(4, outside)
    assert member == 5.0
    for rank, errors, x in outsiders:
        assert (rank, x) == (-1, 5.0)
        assert all(kind == "CollectiveStateError" and "not a member" in text for kind, text in errors)


def test_rows_use_their_groups_in_different_order() -> None:
    """pytorch #130102, pytorch #14528, pytorch #81291."""

    def crossing(c: Collective) -> dict[str, list[float]]:
        x = torch.tensor([2.0**c.rank])
        order = ("model", "data", "model", "data") if c.rank < 2 else ("model", "model", "data", "data")
        found: dict[str, list[float]] = {"model": [], "data": []}
        for axis in order:
            found[axis].append(c[axis].reduce(x, "sum").item())
        return found

    results = values(4, crossing, mesh=MESH)
    assert [found["model"] for found in results] == [[3.0] * 2, [3.0] * 2, [12.0] * 2, [12.0] * 2]
    assert [found["data"] for found in results] == [[5.0] * 2, [10.0] * 2, [5.0] * 2, [10.0] * 2]


def test_a_mean_over_a_group_divides_by_its_size() -> None:
    """aws-neuron-sdk #1107, pytorch #36516."""

    def means(c: Collective) -> tuple[float, float]:
        x = torch.tensor([float(c.rank)])
        return c["model"].reduce(x, "mean").item(), c["data"].reduce(x, "mean").item()

    assert values(4, means, mesh=MESH) == [(0.5, 1.0), (0.5, 2.0), (2.5, 1.0), (2.5, 2.0)]


@pytest.mark.parametrize("axes", ["heads", ("model", "data")])
def test_an_axis_that_is_not_there_is_named_with_those_that_are(axes: Any) -> None:
    for kind, text in values(4, lambda c: error_of(lambda: c[axes]), mesh=MESH):
        assert kind == "KeyError"
        assert "'data'" in text
        assert "'model'" in text


def test_groups_that_ranks_made_in_different_numbers_do_not_mix_up() -> None:
    """Rank 2 of 3 is alone in its first group, so it has made fewer groups than the others when all meet again."""

    def groups(c: Collective) -> tuple[int, int, int]:
        pair = c.split(c.rank < 2)
        everyone = c.split("all")
        again = everyone.split(c.rank > 0)
        return pair.all_reduce(c.rank).item(), everyone.all_reduce(c.rank).item(), again.all_reduce(c.rank).item()

    assert values(3, groups) == [(1, 3, 0), (1, 3, 3), (2, 3, 3)]
