"""Ranks laid out over named axes: arithmetic only."""

from typing import Any

import pytest

from collective_strategy.collectives import MeshLayout, SingleProcessCollective, TorchDistributedCollective

CUBE = {"data": 2, "reader": 2, "lane": 3}


def resolved(mesh: dict[str, int], world_size: int, **settings: Any) -> MeshLayout:
    return MeshLayout.resolve(mesh, settings.get("unions"), settings.get("data_axis", "data"), world_size)


def test_the_last_axis_varies_fastest() -> None:
    layout = resolved({"data": -1, "model": 2}, 6)
    assert layout.axes == {"data": 3, "model": 2}
    assert [tuple(layout.coordinates(rank).values()) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert layout.members(("model",), 3) == (2, 3)
    assert layout.members(("data",), 3) == (1, 3, 5)


def test_groups_of_every_axis_and_union_are_a_partition() -> None:
    layout = resolved(CUBE, 12, unions={"model": ("reader", "lane"), "odd": ("data", "lane")})
    for axes in [*((name,) for name in CUBE), *layout.unions.values(), ("lane", "data")]:
        groups = layout.partition(axes, 0).groups()
        assert sorted(rank for group in groups for rank in group) == list(range(12))
        for group in groups:
            assert list(group) == sorted(group)
            assert all(layout.members(axes, rank) == group for rank in group)


def test_members_are_found_without_looking_at_all_ranks() -> None:
    layout = resolved({"data": -1, "model": 8}, 2**40)
    assert layout.members(("model",), 2**39 + 3) == tuple(range(2**39, 2**39 + 8))


@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        ({}, {}, "must map"),
        ({"data": 0}, {}, "positive"),
        ({"data": -2}, {}, "positive"),
        ({"data": True}, {}, "positive"),
        ({"data": 2.0}, {}, "positive"),
        ({"data": -1, "model": -1}, {}, "only one"),
        ({"": 2, "data": 1}, {}, "strings"),
        ({1: 2, "data": 1}, {}, "strings"),
        ({"model": 2}, {}, "no axis named 'data'"),
        ({"model": 2}, {"data_axis": "batch"}, "'batch'"),
        ({"data": 2}, {"unions": {"data": ("data",)}}, "name of an axis"),
        ({"data": 2}, {"unions": {"all": ("data", "model")}}, "'all'"),
        ({"data": 2}, {"unions": {"all": ()}}, "'all'"),
        ({"data": 2}, {"unions": {"all": "data"}}, "'all'"),
        ({"data": 2}, {"unions": {"all": ("data", "data")}}, "'all'"),
    ],
)
@pytest.mark.parametrize("collective", [TorchDistributedCollective, SingleProcessCollective])
def test_a_wrong_layout_is_refused_at_construction(
    mesh: Any, settings: dict[str, Any], words: str, collective: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        collective(mesh=mesh, **settings)


@pytest.mark.parametrize("settings", [{"unions": {"a": ("data",)}}, {"data_axis": "data"}])
def test_unions_and_data_axis_belong_to_a_mesh(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mesh"):
        TorchDistributedCollective(**settings)


@pytest.mark.parametrize(
    ("mesh", "world_size"), [({"data": -1, "model": 3}, 4), ({"data": 2, "model": 4}, 4), ({"data": 2}, 4)]
)
def test_sizes_must_multiply_to_the_number_of_ranks(mesh: dict[str, int], world_size: int) -> None:
    with pytest.raises(ValueError, match=str(world_size)):
        resolved(mesh, world_size)


def test_the_data_axis_may_have_another_name_or_be_none() -> None:
    assert resolved({"batch": 2, "model": 2}, 4, data_axis="batch").data_axis == "batch"
    assert resolved({"row": 2, "model": 2}, 4, data_axis=None).data_axis is None
    joined = resolved({"a": 2, "b": 2}, 4, data_axis="ab", unions={"ab": ("a", "b")})
    assert joined.data_axis == "ab"
