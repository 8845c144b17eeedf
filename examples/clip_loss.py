"""Contrastive loss over the samples of all ranks (CLIP), equal to one process on the joined batch.

Each rank embeds its own images and texts. The loss compares each image with all texts, also those of other ranks, and
the other way round; `all_gather` brings the embeddings and takes their gradients back. Two ways to write it are right
under the same condition, that parameter gradients are averaged over the ranks, as DDP, FSDP and strategies do:

- local rows: each rank takes the loss of its own samples; the loss of the batch is the mean over the ranks;
- global: each rank takes the loss of the whole batch; all ranks then hold the same number.

    python examples/clip_loss.py                                # one process
    torchrun --nproc-per-node 2 examples/clip_loss.py           # two
"""

from copy import deepcopy

import torch
from comparison import largest_difference, report
from torch import Tensor, nn
from torch.nn import functional

import collective_strategy
from collective_strategy.collectives import Collective

TOLERANCE = 1e-12  # float64
BATCH = 12  # over all ranks


class TwoTowers(nn.Module):
    """Embeddings of unit length of images and texts, and how strongly to compare them."""

    def __init__(self, image_features: int, text_features: int, embedding: int) -> None:
        super().__init__()
        self.image = nn.Linear(image_features, embedding)
        self.text = nn.Linear(text_features, embedding)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        scale = (self.log_scale / 2).exp()  # a factor on both sides is the square of it on their product
        return (
            scale * functional.normalize(self.image(images), dim=-1),
            scale * functional.normalize(self.text(texts), dim=-1),
        )


class LocalRowsLoss(nn.Module):
    """The loss of this rank's samples among those of all ranks: ``batch`` rows, ``ranks * batch`` columns."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self.collective = collective

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        all_images = self.collective.all_gather(images, dim=0, to="replicate")
        all_texts = self.collective.all_gather(texts, dim=0, to="replicate")
        own = self.collective.rank * len(images) + torch.arange(len(images), device=images.device)
        return (
            functional.cross_entropy(images @ all_texts.T, own) + functional.cross_entropy(texts @ all_images.T, own)
        ) / 2


class GlobalLoss(nn.Module):
    """The loss of the samples of all ranks, the same number on each: ``ranks * batch`` rows and columns."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self.collective = collective

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        all_images = self.collective.all_gather(images, dim=0, to="replicate")
        all_texts = self.collective.all_gather(texts, dim=0, to="replicate")
        return one_process_loss(all_images, all_texts)


def one_process_loss(images: Tensor, texts: Tensor) -> Tensor:
    """The loss with all samples at hand (Radford et al. 2021, figure 3)."""
    similarity = images @ texts.T
    own = torch.arange(len(images), device=images.device)
    return (functional.cross_entropy(similarity, own) + functional.cross_entropy(similarity.T, own)) / 2


def differences(collective: Collective, loss_kind: type[nn.Module]) -> dict[str, float]:
    """What the ranks compute together, compared with one process."""
    torch.manual_seed(0)
    whole = TwoTowers(5, 6, 4).double()
    towers, loss_of = deepcopy(whole), loss_kind(collective)
    images, texts = torch.randn(BATCH, 5, dtype=torch.float64), torch.randn(BATCH, 6, dtype=torch.float64)
    own_images, own_texts = (collective.shard(each, 0).requires_grad_() for each in (images, texts))

    loss = loss_of(*towers(own_images, own_texts))
    loss.backward()
    # A strategy or DDP does this, and averages the logged loss too:
    weights = [collective.all_reduce(parameter.grad, "mean") for parameter in towers.parameters()]
    loss = collective.all_reduce(loss.detach(), "mean")

    images.requires_grad_()
    texts.requires_grad_()
    right = one_process_loss(*whole(images, texts))
    right.backward()
    # Nobody averages the inputs' gradients, so they are those of the sum of the ranks' losses.
    inputs = [own.grad / collective.world_size for own in (own_images, own_texts) if own.grad is not None]
    return {
        "loss": largest_difference(collective, [loss], [right]),
        "gradients of the weights, averaged": largest_difference(
            collective, weights, [parameter.grad for parameter in whole.parameters()]
        ),
        "gradients of the inputs, / ranks": largest_difference(
            collective, inputs, [collective.shard(each.grad, 0) for each in (images, texts)]
        ),
    }


def main() -> None:
    with collective_strategy.init() as collective:
        report(collective, "Contrastive loss, local rows", differences(collective, LocalRowsLoss), TOLERANCE)
        report(collective, "Contrastive loss, global", differences(collective, GlobalLoss), TOLERANCE)


if __name__ == "__main__":
    main()
