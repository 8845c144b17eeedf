"""A save that fails or is killed leaves what was there before, and no rank writes unless all can."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import Pieces, state_of
from torch import nn

from collective_strategy import Collective, SingleProcessCollective, sharded, shared
from collective_strategy.checkpoints import (
    CheckpointError,
    consolidate,
    is_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from collective_strategy.checkpoints.storage import write_file
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}


class One(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))


def save_one(path: str, value: float) -> None:
    module = One(value)
    save_checkpoint(path, {**state_of(module), "value": value}, module, SingleProcessCollective().setup())


def value_of(path: str) -> float:
    """The value, which tensors and other state agree on."""
    state = load_checkpoint(path, One(), SingleProcessCollective().setup())
    assert state["state_dict"]["weight"].tolist() == [state["value"]] * 3
    return float(state["value"])


def killed_at(step: int, action: Callable[[], None], at: str) -> bool:
    """Runs ``action`` in a forked process that is killed at its step-th access to the files under ``at``.

    Returns:
        Whether it was killed; False if the action has fewer steps.
    """
    pid = os.fork()
    if pid == 0:
        left = [step]

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "shutil.rmtree"):
                if not any(str(argument).startswith(at) for argument in arguments):
                    return
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(audit)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("before", ["a checkpoint", "nothing"])
def test_killed_at_any_step_there_is_the_old_checkpoint_or_the_new_one(tmp_path: Path, before: str) -> None:
    path = str(tmp_path / "last.ckpt")
    seen = set()
    for step in range(200):
        remove_checkpoint(path) if is_checkpoint(path) else None
        if before == "a checkpoint":
            save_one(path, 1.0)
        if not killed_at(step, lambda: save_one(path, 2.0), str(tmp_path)):
            break
        found = value_of(path) if os.path.exists(path) else None
        assert found in ((1.0, 2.0) if before == "a checkpoint" else (None, 2.0))
        seen.add(found)
        # Lightning takes what is at the path, and searches names for "hpc_ckpt_" and ".ckpt"
        assert not any("ckpt" in name for name in os.listdir(tmp_path) if name != "last.ckpt")
        save_one(path, 3.0)  # the next save works, and removes what was left
        assert value_of(path) == 3.0
        assert os.listdir(tmp_path) == ["last.ckpt"]
        assert len([name for name in os.listdir(path) if name.startswith("save-")]) == 1
    assert step > 10
    assert seen == ({1.0, 2.0} if before == "a checkpoint" else {None, 2.0})


def test_killed_while_removing_there_is_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    path = str(tmp_path / "old.ckpt")
    for step in range(100):
        save_one(path, 1.0)
        if not killed_at(step, lambda: remove_checkpoint(path), str(tmp_path)):
            break
        if os.path.exists(path):
            assert value_of(path) == 1.0
    assert step > 3
    assert not os.path.exists(path)


def test_killed_at_any_step_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = str(tmp_path / "hpc_ckpt_1.ckpt")
    for step in range(50):
        write_file({"value": 1.0}, path)
        if not killed_at(step, lambda: write_file({"value": 2.0}, path), str(tmp_path)):
            break
        assert torch.load(path)["value"] in (1.0, 2.0)
        assert [name for name in os.listdir(tmp_path) if "ckpt" in name] == ["hpc_ckpt_1.ckpt"]
    assert step > 2


# -- on ranks ----------------------------------------------------------------------------------------------------------


def save(collective: Collective, path: str, module: nn.Module | None = None) -> None:
    module = module or Pieces(collective)
    save_checkpoint(path, state_of(module), module, collective)


def errors(function: Callable[..., Any], *args: Any, mesh: dict[str, int] = MESH) -> list[str]:
    """Every rank's error, which is a CheckpointError."""
    found = []
    for outcome in run_ranks(4, function, *args, mesh=mesh, timeout=30):
        assert isinstance(outcome.error, CheckpointError), outcome.traceback
        found.append(str(outcome.error))
    return found


def test_a_rank_that_cannot_write_is_named_on_all_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")

    def twice(collective: Collective) -> None:
        save(collective, path)
        if collective.rank == 1:
            from collective_strategy.checkpoints.folders import LocalFolder

            def full(self: Any, name: str, data: Any) -> int:
                raise OSError(28, "No space left on device", name)

            LocalFolder.write, before = full, LocalFolder.write
        try:
            save(collective, path)
        finally:
            if collective.rank == 1:
                LocalFolder.write = before

    found = errors(twice)
    assert len(set(found)) == 1
    assert f"Saving the checkpoint {path} failed; what was there before is unchanged." in found[0]
    assert "rank 1: OSError: [Errno 28] No space left on device: 'rank-1.weights.pt'" in found[0]
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert len([name for name in os.listdir(path) if name.startswith("save-")]) == 1


def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The others hear of it, write nothing more and take nothing away."""
    path = str(tmp_path / "last.ckpt")

    def twice(collective: Collective) -> None:
        save(collective, path)
        if collective.rank == 1:
            from collective_strategy.checkpoints.folders import LocalFolder

            LocalFolder.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        module = Pieces(collective)
        module.rows.weight.data.zero_()
        save(collective, path, module)

    outcomes = run_ranks(4, twice, mesh=MESH, timeout=8)
    assert all(outcome.error is not None for outcome in outcomes)
    collective = SingleProcessCollective(mesh={"data": 1, "model": 1}).setup()
    rows = load_checkpoint(path, Pieces(collective), collective, strict=False)["state_dict"]["rows.weight"]
    assert torch.equal(rows, torch.arange(1.0, 15).reshape(7, 2))


def test_a_save_by_one_rank_only_ends_with_what_it_was(tmp_path: Path) -> None:
    def by_one(collective: Collective) -> None:
        if collective.rank == 0:
            save(collective, str(tmp_path / "last.ckpt"))

    outcomes = run_ranks(4, by_one, mesh=MESH, timeout=3)
    assert "save_checkpoint" in str(outcomes[0].error)
    assert "1" in str(outcomes[0].error)
    assert os.listdir(tmp_path) == []


class Marked(nn.Module):
    """One weight, marked and shaped as a case wants it."""

    def __init__(self, shape: tuple[int, ...], mark: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.part = nn.Module()
        if shape:
            self.part.weight = nn.Parameter(torch.zeros(shape))
        else:
            self.register_parameter("other", nn.Parameter(torch.zeros(1)))
        mark(self.part) if shape else None


CASES: dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[[nn.Module], Any], str]] = {
    "parts": (
        lambda k: (3 if k else 5, 2),
        lambda part: sharded(part, "weight", over="model", dim=0, parts=[4, 4]),
        "part.weight is sharded over model along dim 0, but the pieces are [5, 3] long, but parts=[4, 4] cut into 2"
        " pieces each give [4, 4]",
    ),
    "other dim": (
        lambda k: (4, 2 + k),
        lambda part: sharded(part, "weight", over="model", dim=0),
        "part.weight is sharded over model and of shape (4, 3) on rank 1 (model 1), which does not fit",
    ),
    "no such dim": (
        lambda k: (4,),
        lambda part: sharded(part, "weight", over="model", dim=1),
        "part.weight of shape (4,) is marked sharded(over='model', dim=1), but has no dim 1",
    ),
    "shared, other shape": (
        lambda k: (4 + k,),
        lambda part: shared(part, over="model"),
        "part.weight is shared over model and of shape (5,) on rank 1 (model 1)",
    ),
    "missing": (
        lambda k: () if k else (4,),
        lambda part: sharded(part, "weight", over="model", dim=0),
        "part.weight is sharded over model and there on rank 0 (model 0), but missing on rank 1 (model 1)",
    ),
}


def test_marks_that_contradict_the_tensors_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    def all_cases(collective: Collective) -> dict[str, str]:
        said = {}
        for name, (shape, mark, _) in CASES.items():
            try:
                save(collective, f"{tmp_path}/{name}", Marked(shape(collective["model"].rank), mark))
            except CheckpointError as error:
                said[name] = str(error)
        return said

    for outcome in run_ranks(4, all_cases, mesh=MESH, timeout=30):
        said = outcome.result()
        for name, (_, _, expected) in CASES.items():
            assert expected in said[name], name
    assert os.listdir(tmp_path) == []


def test_what_is_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "mine").write_text("mine")
    for name, kind in (("file.ckpt", "There is a file at"), ("directory", "no checkpoint of this package")):
        with pytest.raises(CheckpointError, match=re.escape(kind)):
            save_one(str(tmp_path / name), 1.0)
    assert (tmp_path / "file.ckpt").read_text() == (tmp_path / "directory" / "mine").read_text() == "mine"
    save_one(str(tmp_path / "last.ckpt"), 1.0)
    with pytest.raises(CheckpointError, match="There is a directory at"):
        write_file({}, str(tmp_path / "last.ckpt"))
    assert value_of(str(tmp_path / "last.ckpt")) == 1.0


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    save_one(str(tmp_path / "best.ckpt"), 1.0)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    assert value_of(str(tmp_path / "last.ckpt")) == 1.0
    save_one(str(tmp_path / "last.ckpt"), 2.0)
    assert value_of(str(tmp_path / "best.ckpt")) == 1.0
    assert value_of(str(tmp_path / "last.ckpt")) == 2.0
    (tmp_path / "link.ckpt").symlink_to("best.ckpt")
    remove_checkpoint(tmp_path / "link.ckpt")
    assert value_of(str(tmp_path / "best.ckpt")) == 1.0


# -- damage -----------------------------------------------------------------------------------------------------------


def test_what_is_damaged_is_said(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert "There is no complete checkpoint at" in said(path)
    save_one(str(path), 1.0)
    save_directory = next(path.glob("save-*"))
    weights = save_directory / "rank-0.weights.pt"
    data = weights.read_bytes()
    weights.write_bytes(data[:-7])
    assert f"rank-0.weights.pt has {len(data) - 7} bytes instead of {len(data)}" in said(path)
    weights.unlink()
    assert "rank-0.weights.pt is missing" in said(path)
    weights.write_bytes(data)
    assert value_of(str(path)) == 1.0
    manifest = save_directory / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"pieces"', '"places"'))
    assert "manifest.json cannot be read (KeyError" in said(path)
    manifest.write_text(text.replace("[3]", "[4]"))
    assert "a piece of weight of shape (3,) where the manifest says (4,)" in said(path)
    manifest.write_text(text)
    pointer = path / "checkpoint.json"
    pointer.write_text(pointer.read_text().replace('"version": 1', '"version": 2'))
    assert "has version 2; this release reads version 1" in said(path)
    pointer.write_text("{}")
    assert "is not that of a checkpoint of this package" in said(path)


def said(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        consolidate(path)
    return str(caught.value)


def test_an_ordinary_tool_says_that_it_is_a_directory_and_the_directory_says_the_rest(tmp_path: Path) -> None:
    save_one(str(tmp_path / "last.ckpt"), 1.0)
    with pytest.raises(IsADirectoryError, match=re.escape("last.ckpt")):
        torch.load(tmp_path / "last.ckpt")
    assert (
        "python -m collective_strategy.checkpoints consolidate" in (tmp_path / "last.ckpt" / "README.txt").read_text()
    )
