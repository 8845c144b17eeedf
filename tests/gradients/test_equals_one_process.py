"""Weights after 20 steps on ranks equal those of one process on the joined batch, on meshes of every shape."""

import pytest
import torch
from fitted import ONE_OPTIMIZER, fit
from joined import TWO_OPTIMIZERS, Setting, largest_difference, train_in_one_process, train_on_ranks

from collective_strategy.testing import run_ranks

MESHES = {
    "data 4": {"data": 4},
    "model 4": {"model": 4},
    "data 2 x model 2": {"data": 2, "model": 2},
    "data 2 x model 2 x space 1": {"data": 2, "model": 2, "space": 1},
    "data 1 x model 2 x space 2": {"data": 1, "model": 2, "space": 2},
}
WAYS = [(1, "none"), (3, "none"), (1, "plain"), (3, "reentrant"), (1, "reentrant")]


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
def test_a_plain_loop(mesh):
    """Clipping on, a layer unused on one rank, one unused everywhere, layers in opposite order, two optimizers."""
    settings = [Setting(tuple(mesh.items()), accumulation, way) for accumulation, way in WAYS]
    options = {"data_axis": None} if "data" not in mesh else {}

    def train(collective):
        torch.set_num_threads(1)
        return [train_on_ranks(collective, setting) for setting in settings]

    expected = {n: train_in_one_process(Setting(tuple(mesh.items()), n)) for n in (1, 3)}
    ranks = [outcome.result() for outcome in run_ranks(4, train, mesh=mesh, timeout=150, **options)]
    for results in ranks:
        for setting, result in zip(settings, results, strict=True):
            assert largest_difference(result["weights"], expected[setting.accumulation]) < 1e-10
            assert all(result["unused"])
            assert result["statistics"].agreements == 1
    for results in zip(*ranks, strict=True):
        for key in {key for result in results for key in result["weights"]}:
            copies = [result["weights"][key] for result in results if key in result["weights"]]
            assert all(torch.equal(a, b) for copy in copies for a, b in zip(copy, copies[0], strict=True)), key
        assert all(result["norms"] == results[0]["norms"] for result in results)  # one value, bit by bit
        assert max(results[0]["norms"]) > 0.2  # the limit was met


@pytest.mark.parametrize("mesh", [MESHES["data 2 x model 2"], MESHES["model 4"]], ids=["data 2 x model 2", "model 4"])
def test_the_trainer(mesh):
    """Accumulation and clipping by the Trainer, then by hand with two optimizers; reentrant checkpointing."""
    axes = tuple(mesh.items())
    settings = [
        Setting(axes, 3, "none", ONE_OPTIMIZER),
        Setting(axes, 1, "reentrant", ONE_OPTIMIZER),
        Setting(axes, 3, "plain", TWO_OPTIMIZERS),
    ]
    expected = [train_in_one_process(setting) for setting in settings]
    outcomes = run_ranks(4, lambda _: [fit(setting) for setting in settings], backend=None, fresh=True, timeout=90)
    for outcome in outcomes:
        for held, right in zip(outcome.result(), expected, strict=True):
            assert largest_difference(held, right) < 1e-10
