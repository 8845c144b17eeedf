"""Contrastive learning on two processes that gives the same weights as one process on the joined batch.

A small network learns to lay handwritten digits out in the plane, digits of one kind together. The loss compares each
image with all others of the batch, also with those that another process holds: ``self.collective.all_gather`` brings
their embeddings, and takes the gradients back to where they came from.

    python examples/quickstart.py

The Trainer starts the second process by running this script again, so everything is under ``main()``.
"""

import argparse
from copy import deepcopy

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from collective_strategy import CollectiveModule

TRAINING_SAMPLES = 1280  # of 1797; the others are held out
BATCH_SIZE = 256  # over all processes
TOLERANCE = 1e-8  # for the weights, in float64, after all steps


class DigitMap(CollectiveModule, L.LightningModule):
    """Images of 8x8 pixels to points in the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2, bias=False)
        )
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        points = self(images)
        everyone = self.collective.all_gather(points, dim=0)  # differentiable: (processes * batch, 2)
        all_labels = self.collective.all_gather(labels, dim=0)
        loss = contrastive_loss(points, labels, everyone, all_labels, first=self.collective.rank * len(points))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def contrastive_loss(points: Tensor, labels: Tensor, everyone: Tensor, all_labels: Tensor, first: int) -> Tensor:
    """How improbable it is to meet the own kind among the neighbours (supervised contrastive loss, Khosla 2020).

    ``points`` are the rows of ``everyone`` from ``first`` on; a point is not its own neighbour.
    """
    rows = torch.arange(len(everyone), device=points.device)
    itself = rows[first : first + len(points)].unsqueeze(1) == rows
    closeness = -(points.unsqueeze(1) - everyone).square().sum(dim=2)
    log_probability = closeness.masked_fill(itself, -torch.inf).log_softmax(dim=1)
    same_kind = (labels.unsqueeze(1) == all_labels) & ~itself
    per_point = log_probability.masked_fill(~same_kind, 0).sum(dim=1) / same_kind.sum(dim=1).clamp(min=1)
    return -per_point.mean()


def train_in_one_process(module: DigitMap, data: TensorDataset, epochs: int) -> None:
    """The same training without any collective: the joined batches in an ordinary PyTorch loop."""
    optimizer = module.configure_optimizers()
    # The order in which the Trainer deals the samples out to the processes, here dealt to one.
    sampler: DistributedSampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler):
            points = module(images)
            optimizer.zero_grad()
            contrastive_loss(points, labels, points, labels, first=0).backward()
            optimizer.step()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out digits, in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.data / 16)[order], torch.tensor(digits.target)[order]
    return (
        TensorDataset(images[:TRAINING_SAMPLES], labels[:TRAINING_SAMPLES]),
        TensorDataset(images[TRAINING_SAMPLES:], labels[TRAINING_SAMPLES:]),
    )


@torch.no_grad()
def accuracy(module: DigitMap, training: TensorDataset, held_out: TensorDataset) -> float:
    """How often a held-out digit lies among training digits of its kind."""
    (images, labels), (new_images, new_labels) = training.tensors, held_out.tensors
    classifier = KNeighborsClassifier(n_neighbors=5).fit(module(images).numpy(), labels)
    return float(classifier.score(module(new_images).numpy(), new_labels))


@torch.no_grad()
def draw(modules: dict[str, DigitMap], data: TensorDataset, path: str) -> None:
    """One map of the digits per module, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images, labels = data.tensors
    figure, axes = pyplot.subplots(1, len(modules), figsize=(10, 4.4), layout="constrained")
    for axis, (title, module) in zip(axes, modules.items(), strict=True):
        points = module(images)
        for digit in range(10):
            axis.scatter(*points[labels == digit].T, s=32, color=f"C{digit}", marker=f"${digit}$", linewidths=0.3)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=100)


def main() -> None:
    """Trains on all processes; the first one then looks at the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--picture", default="quickstart.png")
    arguments = parser.parse_args()

    training, held_out = load_data()
    torch.manual_seed(1)
    module = DigitMap()
    untrained, alone = deepcopy(module), deepcopy(module)

    trainer = L.Trainer(
        devices=arguments.devices,
        accelerator="cpu",
        strategy="collective",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(training, batch_size=BATCH_SIZE // arguments.devices))
    if not trainer.is_global_zero:
        return

    train_in_one_process(alone, training, arguments.epochs)
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    before, after = (accuracy(each, training, held_out) for each in (untrained, module))
    draw({f"before training: {before:.1%}": untrained, f"after: {after:.1%}": module}, held_out, arguments.picture)

    print(f"\n{len(held_out)} held-out digits, nearest-neighbour accuracy")
    print(f"  before training                  {before:7.1%}")
    print(f"  after {trainer.global_step:3d} steps on {trainer.world_size} processes   {after:7.1%}")
    print("Largest difference of any weight to one process on the joined batches")
    print(f"  float64, {trainer.global_step:3d} steps               {difference:9.1e}   (allowed {TOLERANCE:.0e})")
    print(f"Picture: {arguments.picture}")
    if not difference <= TOLERANCE:
        raise SystemExit("The processes together did not do what one process does.")


if __name__ == "__main__":
    main()
