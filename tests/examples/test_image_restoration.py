"""Photographs that are split over processes are restored as by one process, and the comparison can fail."""

import argparse
import math
import re

import pytest
import torch
from running import load, run_script
from torch.nn import functional
from torch.utils.data import DataLoader

from collective_strategy.collectives import CollectiveMismatchError
from collective_strategy.testing import run_ranks

SMALL = {"steps": 3, "compared_steps": 3, "batch_size": 4, "crop": 14, "width": 4, "noise": 50.0}


def without_mark(example, patch):
    patch.setattr(example, "shared", lambda module, over: module)


def with_mean(example, patch):
    shared = example.shared
    patch.setattr(example, "shared", lambda module, over: shared(module, over=over, grad="mean"))


def without_neighbours(example, patch):
    def forward(self, rows):
        return self.network(rows, lambda layer, x: layer(functional.pad(x, (0, 0, 1, 1))))

    patch.setattr(example.Denoiser, "forward", forward)


def without_neighbours_gradients(example, patch):
    def forward(self, rows):
        def convolve(layer, x):
            borders = self.collective["model"].halo_exchange(x.detach(), dim=-2, width=1)
            return layer(torch.cat([borders[..., :1, :], x, borders[..., -1:, :]], dim=-2))

        return self.network(rows, convolve)

    patch.setattr(example.Denoiser, "forward", forward)


MISTAKES = [without_mark, with_mean, without_neighbours, without_neighbours_gradients]
MESHES = [(2, 2), (1, 4), (4, 1)]  # of 14 rows a process holds 8 or 6; 4, 4, 4 or 2; all


@pytest.fixture(scope="module")
def results():
    """Per process, what the cases found; Trainers of one process after the other, as starting processes takes long."""

    def on_rank(_):
        example = load("image_restoration")

        def fresh(data, model, **settings):
            torch.manual_seed(0)
            arguments = argparse.Namespace(**SMALL | settings, data=data, model=model)
            return example.Denoiser(arguments.width, arguments.steps), arguments

        found = {mesh: example.compare_with_one_process(*fresh(*mesh)) for mesh in MESHES}
        for mistake in MISTAKES:
            with pytest.MonkeyPatch.context() as patch:
                mistake(example, patch)
                found[mistake.__name__] = example.compare_with_one_process(*fresh(2, 2))
        found["whole photographs"] = whole_photographs(example, *fresh(1, 4))
        with pytest.raises((ValueError, CollectiveMismatchError)) as refused:
            example.compare_with_one_process(*fresh(2, 2, crop=2))
        return found | {"two rows": str(refused.value)}

    return [outcome.result() for outcome in run_ranks(4, on_rank, backend=None, fresh=True, timeout=110)]


def whole_photographs(example, module, arguments):
    """How far restored photographs and their PSNR are from those of one process."""
    torch.nn.init.normal_(module.network.last.weight, std=0.1)
    photographs = example.HeldOut(50 / 255)
    trainer = example.fit(module, example.NoisyCrops(4, 14, 50 / 255, torch.float32), arguments)
    trainer.test(module, DataLoader(photographs), verbose=False)

    def convolve(layer, x):
        return functional.conv2d(x, layer.weight, layer.bias, padding=1)

    with torch.no_grad():
        alone = [module.network(noisy.unsqueeze(0), convolve)[0].clamp(0, 1) for noisy, _, _ in photographs]
    differences = [(module.restored[number] - right).abs().max().item() for number, right in enumerate(alone)]
    values = [example.psnr(picture, clean) for picture, (_, clean, _) in zip(alone, photographs, strict=True)]
    return max(differences), abs(trainer.callback_metrics["PSNR"].item() - sum(values) / len(values))


def test_the_script_restores_photographs_and_compares_itself_with_one_process(tmp_path):
    small = "--steps 12 --compared-steps 2 --crop 14 --batch-size 4 --width 8 --picture photographs.png"
    output = run_script("image_restoration", *small.split(), directory=tmp_path)
    assert output.count("held-out photographs") == 1, "only the first process may print"
    assert float(re.search(r"float64, 2 steps +(\S+)", output).group(1)) < 1e-12
    assert re.search(
        r"network.first.weight +8 x 12 x 3 x 3 +float32 +shared, sum +sum over model, mean over data", output
    )
    restored, noisy = (
        [float(x) for x in re.findall(rf"^  {kind} .*", output, re.M)[0].split()[1::2]]
        for kind in ("restored", "noisy")
    )
    assert all(ours > theirs for ours, theirs in zip(restored, noisy, strict=True)), output
    assert (tmp_path / "photographs.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_those_of_one_process_after_some_steps(results, mesh):
    first, *others = [result[mesh] for result in results]
    difference, change = first
    assert difference < 1e-12
    assert change > 1e-3
    assert all(math.isnan(number) for other in others for number in other)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(results, mistake):
    difference, _ = results[0][mistake.__name__]
    assert difference > 1e-6


def test_whole_photographs_in_uneven_pieces_are_restored_as_in_one_process(results):
    """300 rows in pieces of 76, 76, 74 and 74, and 512 rows in pieces of 128."""
    for result in results:
        difference, difference_of_psnr = result["whole photographs"]
        assert difference < 1e-5
        assert difference_of_psnr < 1e-4


def test_pieces_without_rows_are_refused_on_all_processes(results):
    for result in results:
        assert "Split the domain over fewer ranks" in result["two rows"]
