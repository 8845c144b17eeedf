"""A model whose ranks read and compute parts of a field is that of one process, and wrong marks are noticed."""

import re

import pytest
import torch
from running import load, run_script
from torch.nn.parallel import DistributedDataParallel

import collective_strategy
from collective_strategy import GradientReducer
from collective_strategy.testing import run_ranks

STEPS = 3
MESHES = [
    {"data": 1, "reader": 2, "lane": 2},
    {"data": 2, "reader": 2, "lane": 1},
    {"data": 2, "reader": 1, "lane": 2},
    {"data": 1, "reader": 4, "lane": 1},
    {"data": 4, "reader": 1, "lane": 1},
]


def without_mark(module, *names, over, grad="sum", exclude=()):
    return module


def one_mark_for_all(shared):
    def marking(module, *names, over, grad="sum", exclude=()):
        return module if names else shared(module, over=over, grad=grad)

    return marking


def a_mean_of_parts(shared):
    def marking(module, *names, over, grad="sum", exclude=()):
        return shared(module, *names, over=over, grad="mean", exclude=exclude)

    return marking


MISTAKES = {"no mark": lambda shared: without_mark, "one mark for all": one_mark_for_all, "mean": a_mean_of_parts}


def hooks_on_ddp_and_marks(example):
    """The differences of all gradients between a DDP wrapper with hooks and the marks, on a mesh of 2 x 2."""
    mesh, unions = {"data": 2, "reader": 1, "lane": 2}, {"model": ("reader", "lane")}
    with collective_strategy.init("torch", mesh=mesh, unions=unions) as collective:
        fields = torch.stack([example.Waves(8)[4 * collective["data"].rank + number] for number in range(4)])

        class Loss(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.forecaster = example.Forecaster()

            def forward(self):
                return example.error(self.forecaster.network.parallel(fields[:, 0], collective["model"]), fields)

        marked, hooked = Loss(), Loss()
        reducer = GradientReducer(marked, collective)
        with reducer.backward():
            marked().backward()

        for name, weight in hooked.named_parameters():
            if "trainable" not in name:
                weight.register_hook(lambda gradient: gradient * collective["model"].world_size)
        wrapper = DistributedDataParallel(hooked)  # over all ranks
        wrapper().backward()
    pairs = zip(marked.named_parameters(), hooked.parameters(), strict=True)
    return {
        name: ((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item() for (name, ours), theirs in pairs
    }


@pytest.fixture(scope="module")
def results():
    """The differences of each weight, of one Trainer after the other, as starting processes takes long."""

    def on_rank(_):
        example = load("reader_groups")

        def compare(mesh, mistake=None):
            with pytest.MonkeyPatch.context() as patch:
                if mistake is not None:
                    patch.setattr(example, "shared", mistake(example.shared))
                torch.manual_seed(0)
                together, alone = example.Forecaster(), example.Forecaster()
            alone.load_state_dict(together.state_dict())
            example.fit(together, STEPS, mesh)
            example.fit_in_one_process(alone, STEPS)
            return example.differences(together, alone)

        right = [compare(mesh) for mesh in MESHES]
        wrong = {name: compare(MESHES[0], mistake) for name, mistake in MISTAKES.items()}
        return right, wrong, hooks_on_ddp_and_marks(example)

    return [outcome.result() for outcome in run_ranks(4, on_rank, backend=None, fresh=True, timeout=110)]


def test_the_script_compares_itself_with_one_process(tmp_path):
    output = run_script("reader_groups", "--steps", "3", "--reader", "1", directory=tmp_path)
    assert float(re.search(r"to one process (\S+)", output).group(1)) < 1e-10
    assert re.search(r"network.embed.weight .* sum over lane", output)
    assert re.search(r"network.trainable .* mean over lane", output)


@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda number: "x".join(map(str, MESHES[number].values())))
def test_weights_are_those_of_one_process_after_some_steps(results, number):
    for right, *_ in results:
        assert max(right[number].values()) < 1e-11


def test_weights_without_a_mark_are_wrong(results):
    wrong = results[0][1]["no mark"]
    assert min(value for name, value in wrong.items() if name != "network.trainable") > 1e-8


def test_gradients_that_are_whole_must_not_be_summed(results):
    """With Adam a gradient four times too large moves the weight nearly as far, so the difference is small."""
    wrong = results[0][1]["one mark for all"]
    assert wrong["network.trainable"] > 1e-9


def test_gradients_that_are_parts_must_not_be_averaged(results):
    wrong = results[0][1]["mean"]
    assert wrong["network.embed.weight"] > 1e-9


def test_hooks_on_ddp_and_marks_give_the_same_gradients(results):
    for *_, differences in results:
        assert len(differences) == 13
        assert max(differences.values()) < 1e-12


def test_a_rank_reads_its_own_part_of_the_points_only():
    example = load("reader_groups")
    parts = [example.Waves(2, first, last)[1] for first, last in [(0, 106), (106, 211)]]
    assert [part.shape for part in parts] == [(2, 106, 3), (2, 105, 3)]
    assert torch.equal(torch.cat(parts, dim=1), example.Waves(2)[1])
