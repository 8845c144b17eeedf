"""Saved on a mesh of 2 x 2 and resumed: exactly as if nothing had happened, and on other meshes as one process."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention import STEPS, Attention, Counting, Meshed, held, one_process, trainer

from collective_strategy.checkpoints import consolidate
from collective_strategy.testing import run_ranks

# the first test of a module waits for the runs that all of them look at
pytestmark = pytest.mark.timeout(240)

MESH = {"data": 2, "model": 2}


def noisy(path: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Two epochs without and with a stop after the first."""
    torch.set_num_threads(1)
    straight, half, resumed = Meshed(noise=True), Meshed(noise=True), Meshed(noise=True)
    results = {}
    for name, module, epochs, source in (
        ("straight", straight, 2, None),
        ("half", half, 1, None),
        ("resumed", resumed, 2, path),
    ):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 if source is None else 7)  # a new process stands elsewhere
        fitted = trainer(mesh, epochs, callbacks=[Counting()], use_distributed_sampler=True)
        fitted.fit(module, ckpt_path=source)
        if name == "half":
            fitted.save_checkpoint(path)
        results[name] = held(module, fitted)
        fitted.strategy.collective.teardown()
    return results


def go_on(mesh: dict[str, int], source: str, target: str) -> dict[str, Any]:
    """Resumes after one epoch, trains a second one and saves."""
    torch.set_num_threads(1)
    module = Meshed()
    fitted = trainer(mesh, 2, callbacks=[Counting()])
    fitted.fit(module, ckpt_path=source)
    fitted.save_checkpoint(target)
    result = held(module, fitted)
    fitted.strategy.collective.teardown()
    return result


def on_four(_: Any, path: Path) -> dict[str, Any]:
    results: dict[str, Any] = {
        "directory": noisy(f"{path}/noisy.ckpt", MESH),
        "file": noisy(f"{path}/noisy.file.ckpt", {"data": 4, "model": 1}),
    }
    first = trainer(MESH, 1, callbacks=[Counting()])
    first.fit(Meshed())
    first.save_checkpoint(path / "half.ckpt")
    first.strategy.collective.teardown()
    for mesh in (MESH, {"data": 1, "model": 4}, {"data": 4, "model": 1}):
        name = f"{mesh['data']}x{mesh['model']}"
        results[name] = go_on(mesh, f"{path}/half.ckpt", f"{path}/{name}.ckpt")
    return results


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(path: Path) -> list[dict[str, Any]]:
    outcomes = run_ranks(4, on_four, path, backend=None, fresh=True, timeout=150)
    return [outcome.result() for outcome in outcomes]


@pytest.fixture(scope="module")
def two(path: Path, ranks: Any) -> list[dict[str, Any]]:
    """Two ranks, from the directory and from the one file that it was made into."""
    consolidate(path / "half.ckpt", path / "half.file.ckpt")

    def both(_: Any) -> dict[str, Any]:
        mesh = {"data": 1, "model": 2}
        return {
            "1x2": go_on(mesh, f"{path}/half.ckpt", f"{path}/1x2.ckpt"),
            "file": go_on(mesh, f"{path}/half.file.ckpt", f"{path}/file.ckpt"),
        }

    return [outcome.result() for outcome in run_ranks(2, both, backend=None, fresh=True, timeout=90)]


def assert_equal(one: Any, other: Any, place: str = "") -> None:
    """Bit by bit."""
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    else:
        assert one == other, place


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_resumed_run_goes_on_exactly_as_the_uninterrupted_one(ranks: list[dict[str, Any]], kind: str) -> None:
    """Weights, Adam's moments, learning rate, counters, a callback's state, every generator's next number.

    With a model axis of two (a directory), and with data ranks only (a file).
    """
    for rank in ranks:
        straight, half, resumed = (rank[kind][name] for name in ("straight", "half", "resumed"))
        assert_equal(resumed, straight)
        assert resumed["counted"] == 2 * STEPS
        assert not torch.equal(half["torch"], straight["torch"])  # numbers were drawn
    assert not torch.equal(ranks[0][kind]["half"]["torch"], ranks[3][kind]["half"]["torch"])  # others by data rank


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "4x1", "1x2", "file"])
def test_resumed_on_another_mesh_it_goes_on_as_one_process(
    path: Path, ranks: list[dict[str, Any]], two: list[dict[str, Any]], mesh: str
) -> None:
    """20 steps of one process on the global batch: weights, both moments of Adam, step counts, learning rate."""
    net, adam, _ = one_process(2 * STEPS)
    if mesh == "4x1":  # no model axis: an ordinary file
        found = torch.load(path / "4x1.ckpt", weights_only=True)
    else:
        consolidate(path / f"{mesh}.ckpt", path / f"{mesh}.whole.ckpt")
        found = torch.load(path / f"{mesh}.whole.ckpt", weights_only=True)
    state = {name.removeprefix("net."): tensor for name, tensor in found["state_dict"].items()}
    assert state.keys() == net.state_dict().keys()
    for name, expected in net.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-10)
    moments, expected_moments = found["optimizer_states"][0], adam.state_dict()
    assert moments["state"].keys() == expected_moments["state"].keys()
    for index, expected in expected_moments["state"].items():
        for key, value in expected.items():
            torch.testing.assert_close(moments["state"][index][key], value, rtol=0, atol=1e-10)
    assert moments["param_groups"][0]["lr"] == expected_moments["param_groups"][0]["lr"]
    assert found["global_step"] == 2 * STEPS
    results = [rank[mesh] for rank in (two if mesh in ("1x2", "file") else ranks)]
    assert {(r["steps"], r["epoch"], r["counted"], r["schedule"], r["tied"]) for r in results} == {
        (2 * STEPS, 2, 2 * STEPS, 2 * STEPS, True)
    }


def test_the_first_epoch_did_train(path: Path, ranks: Any) -> None:
    """The comparison could not tell a run that starts anew from one that goes on, if training did nothing."""
    net, _, losses = one_process(STEPS)
    whole = {name.removeprefix("net."): tensor for name, tensor in consolidate(path / "half.ckpt").items()}
    for name, expected in net.state_dict().items():
        torch.testing.assert_close(whole[name], expected, rtol=0, atol=1e-10)
    further, _, _ = one_process(2 * STEPS)
    assert (further.qkv.weight - net.qkv.weight).abs().max() > 0.01
    assert losses[-1] < losses[0]
    again = Attention()
    again.load_state_dict(whole)  # strictly: the one-process model's own names
    assert again.output.weight is again.embedding.weight
