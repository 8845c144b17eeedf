"""What four ranks save comes back, on the same mesh all of it, on another one what can be taken apart."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import Odd, Pieces, same, state_of, stepped, whole
from torch import nn

from collective_strategy import Collective, SingleProcessCollective, sharded
from collective_strategy.checkpoints import (
    CheckpointError,
    consolidate,
    load_checkpoint,
    save_checkpoint,
)
from collective_strategy.checkpoints.__main__ import main
from collective_strategy.checkpoints.whole_files import WholeCheckpoint
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "odd": lambda p: Odd(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


def on_ranks(n: int, function: Callable[..., Any], *args: Any, mesh: dict[str, int] = MESH) -> list[Any]:
    return [outcome.result() for outcome in run_ranks(n, function, *args, mesh=mesh, timeout=60)]


def alone() -> Collective:
    return SingleProcessCollective(mesh={"data": 1, "model": 1}).setup()


def error_of(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


def save_all(collective: Collective, path: str) -> list[bool]:
    """One checkpoint per optimizer, and one of the module without private weights."""
    results = []
    for name, make in OPTIMIZERS.items():
        module = Pieces(collective)
        module.head.bias.requires_grad_(name != "momentum")  # frozen: no state
        optimizer = stepped(make([p for p in module.parameters() if p.requires_grad]), module)
        module.load_state_dict(Pieces(collective).state_dict())  # LBFGS lets the copies of shared weights drift apart
        state = state_of(module, optimizer, epoch=3, note=("text", collective.rank))
        save_checkpoint(f"{path}/{name}", state, module, collective, optimizers=[optimizer])
        again = load_checkpoint(f"{path}/{name}", Pieces(collective), collective)
        own = {**state, "note": ("text", collective["model"].rank)}  # that of the first data rank
        results.append(same({key: again[key] for key in own}, own))
    module = Pieces(collective, own=False)
    optimizer = stepped(OPTIMIZERS["adam"](list(module.parameters())), module)
    state = state_of(module, optimizer)
    state["state_dict"] = Pieces(collective, own=False).state_dict()  # the values that can be checked by hand
    save_checkpoint(f"{path}/whole", state, module, collective, optimizers=[optimizer])
    return results


@pytest.fixture(scope="module")
def saved(path: str) -> list[list[bool]]:
    return on_ranks(4, save_all, path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_the_same_mesh_everything_comes_back_bit_by_bit(saved: list[list[bool]], name: str) -> None:
    assert [rank[list(OPTIMIZERS).index(name)] for rank in saved] == [True] * 4


def test_shared_tensors_are_in_one_file_and_pieces_in_their_ranks(saved: Any, path: str) -> None:
    manifest = json.loads(next(Path(path, "adam").glob("save-*/manifest.json")).read_text())
    ranks = {
        name: [[at for at, _ in whole["pieces"]] for whole in wholes] for name, wholes in manifest["weights"].items()
    }
    assert ranks["common.weight"] == ranks["scale.running_mean"] == [[[0]]]
    assert ranks["rows.weight"] == ranks["fused.weight"] == [[[0], [1]]]
    assert ranks["head.weight"] == ranks["head.offset"] == [[[0]], [[1]]]
    assert manifest["aliases"] == {"again.weight": "common.weight"}
    spans = [spans for _, spans in manifest["weights"]["fused.weight"][0]["pieces"]]
    assert spans == [[[0, [[0, 2], [4, 2], [8, 2]]]], [[0, [[2, 2], [6, 2], [10, 2]]]]]
    assert [spans for _, spans in manifest["weights"]["rows.weight"][0]["pieces"]] == [[[0, [[0, 4]]]], [[0, [[4, 3]]]]]
    first = torch.load(next(Path(path, "adam").glob("save-*/rank-0.weights.pt")))
    second = torch.load(next(Path(path, "adam").glob("save-*/rank-1.weights.pt")))
    assert "common.weight" in first
    assert "common.weight" not in second
    assert first["rows.weight"].shape == (4, 2)
    assert second["rows.weight"].shape == (3, 2)


def expected_of(name: str) -> torch.Tensor:
    shapes = {"common": (2, 3), "again": (2, 3), "rows": (7, 2), "columns": (2, 6), "fused": (12, 2)}
    return whole(*shapes[name])


def test_consolidated_it_is_the_whole_in_its_order(saved: Any, path: str) -> None:
    found = consolidate(f"{path}/whole")
    for name in ("common", "again", "rows", "columns", "fused"):
        assert torch.equal(found[f"{name}.weight"], expected_of(name)), name
    assert torch.equal(found["norm.running_mean"], whole(4))
    assert found["norm.num_batches_tracked"].shape == ()


@pytest.mark.parametrize("n", [1, 4])
def test_on_another_mesh_each_rank_gets_its_piece_and_its_moments(saved: Any, path: str, n: int) -> None:
    def load(collective: Collective) -> bool:
        module = Pieces(collective, own=False)
        module.norm = sharded(nn.BatchNorm1d(4 // n), "*", over="model", dim=0)
        state = load_checkpoint(f"{path}/whole", module, collective)
        kept = {name: value.clone() for name, value in module.state_dict().items() if "norm" not in name}
        adam = OPTIMIZERS["adam"](list(module.parameters()))
        adam.load_state_dict(state["optimizer_states"][0])
        for parameter in module.parameters():
            assert adam.state[parameter]["exp_avg"].shape == parameter.shape
            assert adam.state[parameter]["step"] == 2
        assert len(state["optimizer_parameters"][0]) == len(list(module.parameters()))
        # of square() the gradient is twice the weight, so after one step the moment is a fifth of it
        module.load_state_dict(state["state_dict"])
        return all(torch.equal(module.state_dict()[name], value) for name, value in kept.items())

    mesh = {"data": 4 // n, "model": n}
    assert on_ranks(4, load, mesh=mesh) == [True] * 4


def test_private_weights_and_states_that_cannot_be_cut_are_refused_by_name(saved: Any, path: str) -> None:
    """On another model size; a weight or number that is equal on all ranks is no obstacle."""
    message = error_of(lambda: consolidate(f"{path}/adam"))
    assert "head." in message
    assert "is private to each model rank" in message
    assert "Resume with the model axes of the checkpoint, model=2; the data axis may have any size." in message
    message = error_of(lambda: load_checkpoint(f"{path}/adam", Pieces(), alone()))
    assert "head." in message
    loaded = load_checkpoint(f"{path}/adam", Pieces(), alone(), strict=False, optimizers=False)
    assert "head.weight" not in loaded["state_dict"]
    assert loaded["state_dict"]["rows.weight"].shape == (7, 2)


def test_the_command_line_shows_and_consolidates(saved: Any, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{path}/adam"]) == 0
    shown = capsys.readouterr().out
    assert "4 ranks, mesh {'data': 2, 'model': 2}, 1 optimizers" in shown
    assert "rows.weight  float32 [7, 2]  rank 0 [4, 2], rank 1 [3, 2]" in shown
    assert "head.weight model=1  float32 [1, 2]  rank 1 [1, 2]" in shown
    assert "again.weight  is common.weight" in shown
    assert main(["consolidate", f"{path}/whole", f"{path}/one.ckpt"]) == 0
    file = torch.load(f"{path}/one.ckpt")
    assert torch.equal(file["state_dict"]["rows.weight"], whole(7, 2))
    assert file["optimizer_states"][0]["state"][0]["step"] == 2
    assert main(["consolidate", f"{path}/adam", f"{path}/none.ckpt"]) == 1
    assert "is private to each model rank" in capsys.readouterr().err
    assert not os.path.exists(f"{path}/none.ckpt")


class Bare(nn.Module):
    """Without private weights, so that only the optimizer is in the way."""

    def __init__(self, collective: Collective | None = None) -> None:
        super().__init__()
        whole_module = Pieces(collective, own=False)
        self.common, self.rows = whole_module.common, whole_module.rows

    forward = Pieces.forward


def save_optimizers(collective: Collective, path: str) -> None:
    for name, make in OPTIMIZERS.items():
        module = Bare(collective)
        optimizer = stepped(make(list(module.parameters())), module)
        save_checkpoint(f"{path}/bare-{name}", state_of(module, optimizer), module, collective, optimizers=[optimizer])
    module = Bare(collective)
    optimizer = stepped(OPTIMIZERS["adam"](list(module.parameters())), module)
    optimizer.state[module.rows.weight]["step"] += collective["model"].rank
    save_checkpoint(f"{path}/uneven", state_of(module, optimizer), module, collective, optimizers=[optimizer])
    extra = {"ema": {"rows": module.rows.weight.detach(), "equal": torch.ones(3)}, "seconds": torch.rand(())}
    save_checkpoint(f"{path}/extra", {**state_of(module), **extra}, module, collective)


def test_optimizer_states_that_cannot_be_cut_are_refused_by_name(path: str) -> None:
    """On another model size; numbers are taken as they are, if they are equal on all pieces."""
    on_ranks(4, save_optimizers, path)
    for name in ("adam", "momentum", "plain"):
        load_checkpoint(f"{path}/bare-{name}", Bare(), alone())
    message = error_of(lambda: load_checkpoint(f"{path}/bare-adafactor", Bare(), alone()))
    assert "row_var of rows.weight in optimizer 0 is neither a number nor a tensor of the weight's shape" in message
    assert "a Tensor of shape (4, 1)" in message
    message = error_of(lambda: load_checkpoint(f"{path}/bare-odd", Bare(), alone()))
    assert "list of rows.weight in optimizer 0 is neither" in message
    message = error_of(lambda: load_checkpoint(f"{path}/bare-lbfgs", Bare(), alone()))
    assert "common.weight in optimizer 0" in message
    message = error_of(lambda: load_checkpoint(f"{path}/uneven", Bare(), alone()))
    assert "step of rows.weight in optimizer 0 is 2.0 on rank 0 and 3.0 on rank 1" in message
    message = error_of(lambda: load_checkpoint(f"{path}/extra", Bare(), alone()))
    assert "checkpoint['ema']['rows'] is a tensor of shape (4, 2) that differs between the model ranks" in message
    for name in ("adafactor", "odd", "lbfgs"):  # the weights can be had
        assert consolidate(f"{path}/bare-{name}")["rows.weight"].shape == (7, 2)


def test_a_checkpoint_in_one_piece_is_cut_for_the_ranks(path: str) -> None:
    """What has no whole, or is no whole, is refused by name."""
    one = alone()
    module = Pieces(one, own=False)
    optimizer = stepped(OPTIMIZERS["adam"](list(module.parameters())), module)
    file = {"state_dict": Pieces(one, own=False).state_dict(), "optimizer": optimizer.state_dict()}
    owned = {name: value for name, value in Pieces(one).state_dict().items() if "norm" not in name}
    del file["state_dict"]["norm.running_mean"], file["state_dict"]["norm.running_var"]
    del file["state_dict"]["norm.weight"], file["state_dict"]["norm.bias"]

    def cut(collective: Collective) -> list[Any]:
        here = Pieces(collective, own=False)
        whole_file = WholeCheckpoint("one.ckpt", here, collective, "private")
        state = whole_file.state_dict(file["state_dict"])
        equal = [same(value, here.state_dict()[name]) for name, value in state.items() if "norm" not in name]
        moments = whole_file.optimizer_state(file["optimizer"], [name for name, _ in here.named_parameters()])
        shapes = [moments["state"][i]["exp_avg"].shape == p.shape for i, p in enumerate(here.parameters())][:5]
        said = []
        for refused in (
            lambda: WholeCheckpoint("one.ckpt", Pieces(collective), collective, "private").state_dict(owned),
            lambda: whole_file.state_dict({"rows.weight": here.rows.weight}),
        ):
            try:
                refused()
            except CheckpointError as error:
                said.append(str(error))
        left = WholeCheckpoint("one.ckpt", Pieces(collective), collective, "private", strict=False)
        return [all(equal) and all(shapes), said, sorted(owned.keys() - left.state_dict(owned).keys())]

    for fits, said, left_out in on_ranks(4, cut):
        assert fits
        assert "head.weight is private to each of the 2 model ranks, but one.ckpt was saved in one piece" in said[0]
        assert "in one.ckpt, but the pieces of 2 model ranks make (7, 2). It may be one rank's piece." in said[1]
        assert left_out == ["head.bias", "head.offset", "head.weight"]
