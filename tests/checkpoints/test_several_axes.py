"""Weights cut over two axes of the mesh: by rows and columns, over a union, over one axis only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import piece, same, whole
from torch import nn

from collective_strategy import Collective, SingleProcessCollective, sharded, shared
from collective_strategy.checkpoints import CheckpointError, consolidate, load_checkpoint, save_checkpoint
from collective_strategy.testing import run_ranks

AXES = {"data": 1, "rows": 2, "columns": 2}


class Grid(nn.Module):
    """``both``: rows over one axis, columns over the other; ``joined``: 7 rows over four ranks; ``one``: rows."""

    def __init__(self, collective: Collective, private: bool = False) -> None:
        super().__init__()
        rows, columns = (collective[axis] for axis in ("rows", "columns"))
        (n, r), (m, c) = ((part.world_size, part.rank) for part in (rows, columns))
        half = piece(whole(5, 4), 0, n, r).weight.detach()
        self.both = piece(half, 1, m, c)
        sharded(self.both, "weight", over="rows", dim=0)
        sharded(self.both, "weight", over="columns", dim=1)
        self.joined = sharded(piece(whole(7, 2), 0, n * m, collective["model"].rank), "weight", over="model", dim=0)
        self.one = shared(sharded(piece(whole(5), 0, n, r), "weight", over="rows", dim=0), over="columns")
        self.common = shared(piece(whole(3), 0, 1, 0), over=("rows", "columns"))
        if private:  # cut over one axis, its own on the other
            self.own = sharded(piece(whole(4) + 10 * c, 0, n, r), "weight", over="rows", dim=0)


UNIONS = {"model": ("rows", "columns")}


def save(collective: Collective, path: str, private: bool) -> Any:
    module = Grid(collective, private)
    adam = torch.optim.Adam(module.parameters())
    sum((p.square().sum() for p in module.parameters()), torch.zeros(())).backward()
    adam.step()
    module.load_state_dict(Grid(collective, private).state_dict())
    state = {"state_dict": module.state_dict(), "optimizer_states": [adam.state_dict()]}
    save_checkpoint(path, state, module, collective, optimizers=[adam])
    again = load_checkpoint(path, Grid(collective, private), collective)
    return all(same(again[key], value) for key, value in state.items())


def on_mesh(function: Any, *args: Any, **axes: int) -> list[Any]:
    outcomes = run_ranks(4, function, *args, mesh={**AXES, **axes}, unions=UNIONS, timeout=30)
    return [outcome.result() for outcome in outcomes]


@pytest.mark.parametrize("private", [False, True])
def test_on_the_same_mesh_all_comes_back(tmp_path: Path, private: bool) -> None:
    assert on_mesh(save, f"{tmp_path}/last.ckpt", private) == [True] * 4


def test_the_whole_is_that_of_one_process(tmp_path: Path) -> None:
    path = f"{tmp_path}/last.ckpt"
    on_mesh(save, path, False)
    found = consolidate(path)
    wholes = {"both": whole(5, 4), "joined": whole(7, 2), "one": whole(5), "common": whole(3)}
    assert {name.partition(".")[0]: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in wholes.items()
    }


@pytest.mark.parametrize("axes", [{"rows": 4, "columns": 1}, {"rows": 1, "columns": 4}, {"data": 2, "rows": 1}])
def test_axes_may_change_their_sizes(tmp_path: Path, axes: dict[str, int]) -> None:
    path = f"{tmp_path}/last.ckpt"
    on_mesh(save, path, False)

    def load(collective: Collective) -> bool:
        module = Grid(collective)
        state = load_checkpoint(path, module, collective)
        # after one step from zero the first moment is a tenth of the gradient, which is twice the weight
        moments = [state["optimizer_states"][0]["state"][i]["exp_avg"] for i in range(4)]
        expected = [0.2 * parameter for parameter in module.parameters()]
        right = all(torch.allclose(one, other) for one, other in zip(moments, expected, strict=True))
        return same(state["state_dict"], module.state_dict()) and right

    assert on_mesh(load, **axes) == [True] * 4


def test_what_is_private_on_one_axis_may_be_cut_anew_on_the_other(tmp_path: Path) -> None:
    path = f"{tmp_path}/last.ckpt"
    on_mesh(save, path, True)

    def load(collective: Collective) -> list[float]:
        own: torch.Tensor = load_checkpoint(path, Grid(collective, True), collective)["state_dict"]["own.weight"]
        return own.tolist()

    # two ranks: one row of columns
    outcomes = run_ranks(2, load, mesh={**AXES, "rows": 1}, unions=UNIONS, timeout=30)
    assert [outcome.result() for outcome in outcomes] == [[1.0, 2, 3, 4], [11.0, 12, 13, 14]]
    with pytest.raises(CheckpointError, match=r"own\.weight is private to each model rank"):
        consolidate(path)
    one = SingleProcessCollective(mesh={**AXES, "rows": 1, "columns": 1}, unions=UNIONS).setup()
    with pytest.raises(CheckpointError, match=r"own\.weight is private to each model rank"):
        load_checkpoint(path, Grid(one, True), one)


def test_the_axes_may_stand_in_another_order(tmp_path: Path) -> None:
    """What is cut, what is private and what is no tensor goes to the same position, which is another rank now."""
    path = f"{tmp_path}/last.ckpt"

    def place(collective: Collective) -> list[int]:
        return [collective["rows"].rank, collective["columns"].rank]

    def save_place(collective: Collective) -> None:
        module = Grid(collective, True)
        save_checkpoint(path, {"state_dict": module.state_dict(), "place": place(collective)}, module, collective)

    def load(collective: Collective) -> bool:
        module = Grid(collective, True)
        state = load_checkpoint(path, module, collective)
        return same(state["state_dict"], module.state_dict()) and state["place"] == place(collective)

    on_mesh(save_place)
    outcomes = run_ranks(4, load, mesh={"columns": 2, "rows": 2, "data": 1}, unions=UNIONS, timeout=30)
    assert [outcome.result() for outcome in outcomes] == [True] * 4


def test_two_marks_that_cut_one_dim_do_not_say_which_comes_first(tmp_path: Path) -> None:
    def twice(collective: Collective) -> str:
        module = nn.Module()
        module.part = piece(whole(4), 0, 1, 0)
        sharded(module.part, "weight", over="rows", dim=0)
        sharded(module.part, "weight", over="columns", dim=0)
        try:
            save_checkpoint(str(tmp_path / "last.ckpt"), {"state_dict": module.state_dict()}, module, collective)
        except CheckpointError as error:
            return str(error)
        return ""

    for said in on_mesh(twice):
        assert "part.weight is cut along one dim by two marks" in said
        assert "Mark it once, over a union of the axes." in said
