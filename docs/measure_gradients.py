"""Measures the tables of ``which_gradient.md`` on real ranks and writes them: ``python docs/measure_gradients.py``.

Every number is a gradient of the weights, divided by the gradient that one process has on the joined batch: 1.000 is
right. Where the two do not even point in one direction there is no such ratio, and the cosine of their angle is shown.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from collective_strategy.collectives import Collective
from collective_strategy.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import clip_loss
import tensor_parallel_mlp

PAGE = Path(__file__).with_name("which_gradient.md")
RANKS = (2, 3)
BATCH = 12


def own_rows(images: Tensor, texts: Tensor, all_images: Tensor, all_texts: Tensor, c: Collective, mean: bool) -> Tensor:
    own = c.rank * len(images) + torch.arange(len(images))
    reduction = "mean" if mean else "sum"
    return functional.cross_entropy(images @ all_texts.T, own, reduction=reduction) + functional.cross_entropy(
        texts @ all_images.T, own, reduction=reduction
    )


def all_rows(images: Tensor, texts: Tensor, all_images: Tensor, all_texts: Tensor, c: Collective) -> Tensor:
    own = torch.arange(len(all_images))
    similarity = all_images @ all_texts.T
    return functional.cross_entropy(similarity, own) + functional.cross_entropy(similarity.T, own)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "of its own samples against all, averaged": lambda *arguments: own_rows(*arguments, mean=True),
    "of all samples, the same on every rank": all_rows,
    "of its own samples against all, summed": lambda *arguments: own_rows(*arguments, mean=False),
}


def contrastive(collective: Collective, to: str, loss: str) -> dict[str, str]:
    """The gradient of the contrastive loss, averaged and summed over the ranks."""
    torch.manual_seed(0)
    whole = clip_loss.TwoTowers(5, 6, 4).double()
    towers = deepcopy(whole)
    images, texts = torch.randn(BATCH, 5, dtype=torch.float64), torch.randn(BATCH, 6, dtype=torch.float64)

    embedded = whole(images, texts)
    right = all_rows(*embedded, *embedded, collective)
    (right * BATCH if loss.endswith("summed") else right).backward()

    own_images, own_texts = towers(collective.shard(images), collective.shard(texts))
    everyone = [collective.all_gather(each, dim=0, to=to) for each in (own_images, own_texts)]
    LOSSES[loss](own_images, own_texts, *everyone, collective).backward()
    gradient = flat(towers)
    return {op: compared(collective.all_reduce(gradient, op), flat(whole)) for op in ("mean", "sum")}


def tensor_parallel(collective: Collective, enters: str, leaves: str) -> str:
    """The gradient of a norm before the first tensor-parallel layer, which every rank has and nobody synchronizes."""
    torch.manual_seed(0)
    whole = tensor_parallel_mlp.Block().double()
    block = tensor_parallel_mlp.TensorParallelBlock(whole, collective)
    all_reduce = collective.all_reduce
    if enters == "nothing":
        collective.replicate = lambda x: x  # type: ignore[method-assign]
    collective.all_reduce = lambda x, to: all_reduce(x, to=leaves)  # type: ignore[method-assign]
    x = torch.randn(5, tensor_parallel_mlp.FEATURES, dtype=torch.float64)
    # Without the residual, all of the gradient takes the way through the layers.
    (block(x) - x).square().sum().backward()
    (whole(x) - x).square().sum().backward()
    return compared(flat(block.norm), flat(whole.norm))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def compared(ours: Tensor, right: Tensor) -> str:
    """The ratio of two gradients, or the cosine if they are not parallel."""
    cosine = (ours @ right / (ours.norm() * right.norm())).item()
    if cosine < 1 - 1e-9:
        return f"wrong direction (cosine {cosine:.2f})"
    ratio = (ours @ right / (right @ right)).item()
    return "**right** (1.000)" if abs(ratio - 1) < 1e-9 else f"{ratio:.3f}"


def on_ranks(function: Callable[..., object], *arguments: str) -> list[object]:
    """What the first rank found, for each number of ranks."""
    return [run_ranks(ranks, function, *arguments)[0].result() for ranks in RANKS]


def listed(values: list[str]) -> str:
    """One text for all numbers of ranks."""
    first, *others = dict.fromkeys(values)
    return ", ".join([first, *others]).replace("), wrong direction (cosine ", ", ")


def contrastive_table() -> str:
    lines = ["| gather | loss on each rank | gradients averaged | gradients summed |", "|---|---|---|---|"]
    for to in ("replicate", "invariant"):
        for loss in LOSSES:
            found = on_ranks(contrastive, to, loss)
            averaged, summed = (listed([each[op] for each in found]) for op in ("mean", "sum"))  # type: ignore[index]
            lines.append(f'| `to="{to}"` | {loss} | {averaged} | {summed} |')
    return "\n".join(lines)


def tensor_parallel_table() -> str:
    lines = ["| entering | leaving | gradient of what lies before |", "|---|---|---|"]
    for enters in ("`replicate(x)`", "nothing"):
        for leaves in ("invariant", "replicate"):
            found = listed([str(each) for each in on_ranks(tensor_parallel, enters, leaves)])
            lines.append(f'| {enters} | `all_reduce(y, to="{leaves}")` | {found} |')
    return "\n".join(lines)


TABLES = {"contrastive": contrastive_table, "tensor parallel": tensor_parallel_table}


def page(text: str) -> str:
    """The page's text with its tables measured anew."""
    for name, measure in TABLES.items():
        start, end = f"<!-- measured: {name} -->\n", "<!-- end of the measurement -->"
        head, found, rest = text.partition(start)
        assert found, f"the page has no place for the table {name!r}"
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{measure()}\n\n{end}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
