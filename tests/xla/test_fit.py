"""A Trainer on XLA:CPU devices gives the weights that torch.distributed gives, and compiles a step once."""

import functools

import fitted_nets
import pytest
import torch

from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}
HANGS = 250  # seconds; some of the tests take a minute on two busy cores


def on(backend: str, n: int, *settings, function=fitted_nets.fit_here, **named):
    ranks = "device" if backend == "xla" else "process"
    fresh = backend != "xla"  # Lightning imports torch_xla, which changes the environment
    fit = functools.partial(function, **named)
    outcomes = run_ranks(n, fit, backend, n, *settings, backend=None, ranks=ranks, timeout=HANGS, fresh=fresh)
    return [outcome.result() for outcome in outcomes]


def largest_difference(ours, theirs):
    assert ours["weights"].keys() == theirs["weights"].keys()
    return max((ours["weights"][name] - theirs["weights"][name]).abs().max().item() for name in ours["weights"])


@pytest.mark.parametrize("n", [2, 4])
def test_data_parallel_weights_are_those_of_torch_distributed(n, tmp_path):
    """With accumulation, clipping, momentum, tied weights, validation, early stopping, and on two ranks a resume."""
    resume = n == 2
    ours = on("xla", n, str(tmp_path / "xla"), None, resume)
    theirs = on("torch", n, str(tmp_path / "torch"), None, resume)
    for one, other in zip(ours, theirs, strict=True):
        assert largest_difference(one, other) < 1e-6
        assert largest_difference(one, ours[0]) == 0
        assert (one["rank"], one["steps"], one["tied"]) == (other["rank"], fitted_nets.STEPS, True)
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-4)
    read = torch.load(tmp_path / "xla" / "last.ckpt", weights_only=True)
    assert {value.device.type for value in read["state_dict"].values()} == {"cpu"}


@pytest.mark.parametrize(("first", "then"), [("xla", "torch"), ("torch", "xla")])
def test_a_run_is_resumed_on_the_other_backend(first, then, tmp_path):
    """From a file of the end of an epoch, with momentum; the weights are those of a run that was not interrupted."""
    path = str(tmp_path / "half.ckpt")
    straight = on(then, 2, None, None, function=fitted_nets.fit_epochs, epochs=2)
    half = on(first, 2, None, path, function=fitted_nets.fit_epochs, epochs=1)
    resumed = on(then, 2, path, None, function=fitted_nets.fit_epochs, epochs=2)
    read = torch.load(path, weights_only=True)
    momenta = [state["momentum_buffer"] for state in read["optimizer_states"][0]["state"].values()]
    assert {value.device.type for value in (*read["state_dict"].values(), *momenta)} == {"cpu"}
    assert min(momentum.abs().max().item() for momentum in momenta) > 0
    for rank in range(2):
        assert (half[rank]["steps"], resumed[rank]["steps"], straight[rank]["steps"]) == (4, 8, 8)
        assert largest_difference(resumed[rank], straight[rank]) < 1e-6
        assert largest_difference(half[rank], straight[rank]) > 1e-3


def test_shared_weights_on_a_mesh_are_those_of_torch_distributed():
    ours, theirs = (on(backend, 4, None, MESH) for backend in ("xla", "torch"))
    for rank in range(4):
        assert largest_difference(ours[rank], theirs[rank]) < 1e-6
        assert torch.equal(ours[rank]["weights"]["first.weight"], ours[0]["weights"]["first.weight"])
    assert not torch.equal(ours[0]["weights"]["own.weight"], ours[1]["weights"]["own.weight"])


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.1), ("value", 0.02)])
@pytest.mark.parametrize(("n", "accumulation"), [(2, 2), pytest.param(4, 3, marks=pytest.mark.extended)])
def test_clipped_and_accumulated_it_equals_one_process(n, accumulation, algorithm, limit):
    clip = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    expected, clipped = fitted_nets.fit_in_one_process(n, accumulation, clip)
    assert clipped == fitted_nets.STEPS
    for outcome in run_ranks(
        n, fitted_nets.fit_clipped, n, accumulation, clip, backend=None, ranks="device", timeout=HANGS
    ):
        weights, steps = outcome.result()
        assert steps == fitted_nets.STEPS
        assert max((weights[name] - value).abs().max().item() for name, value in expected.items()) < 1e-6


def test_nothing_is_compiled_after_the_second_step():
    def counts(_):
        compilations = fitted_nets.Compilations()
        run = fitted_nets.trainer("xla", "auto", None, steps=52, callbacks=[compilations])
        run.fit(fitted_nets.Net(0, False), fitted_nets.DataLoader(fitted_nets.data(1, 2 * 4 * 60), 4))
        run.strategy.collective.teardown()
        return compilations.counts

    for outcome in run_ranks(2, counts, backend=None, ranks="device", timeout=HANGS):
        steps = outcome.result()
        assert len(steps) == 52
        assert steps[-1] == steps[1]


def test_batches_of_a_new_size_are_compiled_anew():
    """The counter of the test above counts."""

    def counts(_):
        compilations = fitted_nets.Compilations()
        run = fitted_nets.trainer("xla", "auto", None, steps=4, callbacks=[compilations], use_distributed_sampler=False)
        sizes = [list(range(4 * k, 4 * k + 4)) for k in range(3)] + [[0, 1, 2]]
        dataset = fitted_nets.data(1, 12)
        batches = [
            tuple(torch.stack(column) for column in zip(*(dataset[i] for i in size), strict=True)) for size in sizes
        ]
        run.fit(fitted_nets.Net(0, False), fitted_nets.DataLoader(batches, batch_size=None))
        run.strategy.collective.teardown()
        return compilations.counts

    for outcome in run_ranks(2, counts, backend=None, ranks="device", timeout=HANGS):
        _, second, third, fourth = outcome.result()
        assert second == third
        assert fourth > third
