"""The examples of the pages on truth tools and random numbers run, on two ranks of one model."""

import contextlib
import io
import re
from pathlib import Path

from collective_strategy.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def surroundings(collective):
    """The names that the pages take for granted."""
    import lightning as L
    import torch
    from torch import nn
    from torch.nn.functional import dropout

    from collective_strategy import private, sharded, shared

    torch.manual_seed(0)
    first = shared(nn.Linear(4, 3), over="model")
    with collective["model"].varying_rng():
        second = private(nn.Linear(3, 1))
    model = nn.Sequential(first, nn.Tanh(), second)
    generator = torch.Generator().manual_seed(collective.rank)
    return {
        "L": L,
        "nn": nn,
        "torch": torch,
        "dropout": dropout,
        "sharded": sharded,
        "collective": collective,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "inputs": torch.randn(2, 5, 4, generator=generator),
        "targets": torch.randn(2, 5, 1, generator=generator),
        "loss": nn.functional.mse_loss,
    }


def test_the_page_on_truth_tools():
    """From top to bottom, as a reader may run it; the last block is a Trainer's."""

    def run(collective):
        names = surroundings(collective)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for block in blocks("truth_tools.md"):
                exec(block, names)
        return printed.getvalue(), names["report"].ok, len(names["trainer"].callbacks) > 2

    for printed, ok, has_callbacks in [
        o.result() for o in run_ranks(2, run, mesh={"data": 1, "model": 2}, timeout=30, fresh=True)
    ]:
        assert printed.startswith("Weights of rank")
        assert "marks and gradients agree" in printed
        assert ok
        assert has_callbacks


def test_the_layer_of_the_page_on_random_numbers():
    """Pieces and their masks differ between model ranks, the mask of the input does not."""

    def run(collective):
        names = surroundings(collective)
        (block,) = [block for block in blocks("random_numbers.md") if "class ParallelMLP" in block]
        exec(block, names)
        torch = names["torch"]
        layer = names["ParallelMLP"](collective)
        hidden = layer(torch.ones(2, 64))
        after = torch.rand(3).tolist()
        return layer.up.weight.sum().item(), (hidden == 0).tolist(), after

    one, other = [o.result() for o in run_ranks(2, run, mesh={"data": 1, "model": 2}, timeout=30, fresh=True)]
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert one[2] == other[2]


def test_the_plain_loop_of_the_page_on_random_numbers():
    (block,) = [block for block in blocks("random_numbers.md") if "seed_ranks" in block]

    def run(_):
        import torch

        drawn = []
        exec(block, {"make_model": lambda collective: drawn.append((collective.data.rank, torch.rand(1).item()))})
        return drawn

    one, other = [o.result() for o in run_ranks(2, run, backend=None, timeout=30)]
    assert one == other
    assert len(one) == 1
