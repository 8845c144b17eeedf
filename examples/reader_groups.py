"""A small weather model whose ranks read and compute parts of one field, in groups inside groups; equal to one process.

The mesh is data x reader x lane. The ranks along ``lane`` are a reader group: each reads a part of the field and gets
the other parts from the others, so that a field is read once per reader group. ``model``, the union of reader and lane,
shares the computation: an encoder from the points of the globe to a few nodes, attention between the nodes, a decoder
back to the points. Nearly all weights meet the rank's own points, nodes or heads, so their gradients are parts and are
summed. The trainable features of the points meet the whole field, before it is cut; their gradients are whole.

    python examples/reader_groups.py --data 1 --reader 2 --lane 2

The Trainer starts the other processes by running this script again, so everything is under ``main()``.
"""

import argparse
import math
from copy import deepcopy
from typing import Any

import lightning as L
import torch
from comparison import near_even
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from collective_strategy import CollectiveModule, CollectiveStrategy, ExplainSharing, shared
from collective_strategy.collectives import Collective

POINTS, NODES = 211, 27  # no number of ranks gets equal parts of them
VARIABLES, TRAINABLE, WIDTH, HEADS = 3, 4, 32, 4
BATCH_SIZE = 8  # over all ranks
TOLERANCE = 1e-10  # for the weights, in float64, after all steps


class Forecaster(CollectiveModule, L.LightningModule):
    """Learns the change of fields from one time to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network().double()
        shared(self.network, over="model", exclude=["trainable"])  # gradients are parts: their sum
        shared(self.network, "trainable", over="model", grad="mean")  # whole on every rank

    def training_step(self, read: Tensor, batch_idx: int) -> Tensor:
        # (batch, 2 times, the points that this rank read, variables) to all points; the data needs no gradient
        fields = self.collective["lane"].all_gather(read, dim=2, ragged=True)
        loss = error(self.network.parallel(fields[:, 0], self.collective["model"]), fields)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class Network(nn.Module):
    """From points to nodes, between nodes, and back to points."""

    nodes_points: Tensor
    points_nodes: Tensor

    def __init__(self) -> None:
        super().__init__()
        points, nodes = sphere(POINTS), sphere(NODES)
        self.register_buffer("nodes_points", (nodes @ points.T).topk(12).indices)  # (nodes, 12): the nearest points
        self.register_buffer("points_nodes", (points @ nodes.T).topk(3).indices)  # (points, 3): the nearest nodes
        self.trainable = nn.Parameter(0.1 * torch.randn(POINTS, TRAINABLE))
        self.embed = nn.Linear(VARIABLES + TRAINABLE, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VARIABLES))

    def with_features(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.trainable.expand(len(x), -1, -1)], dim=2)

    def heads(self, nodes: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of some nodes, each (batch, nodes, heads, features)."""
        return tuple(part.unflatten(2, (HEADS, -1)) for part in self.queries_keys_values(self.norm(nodes)).chunk(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """The change of fields (batch, points, variables) in one process."""
        points = functional.gelu(self.embed(self.with_features(x)))
        nodes = points[:, self.nodes_points].mean(2)
        nodes = nodes + self.project(attention(*self.heads(nodes)).flatten(2))
        return self.decode(torch.cat([points, nodes[:, self.points_nodes].mean(2)], dim=2))

    def parallel(self, x: Tensor, model: Collective) -> Tensor:
        """The same on every rank of a model group, where each computes its points, its nodes and its heads."""
        sizes, node_sizes, head_sizes = (near_even(number, model.world_size) for number in (POINTS, NODES, HEADS))
        x = model.shard(self.with_features(x), dim=1, sizes=sizes, of="invariant")  # backward gathers: whole gradients
        points = functional.gelu(self.embed(x))
        all_points = model.all_gather(points, dim=1, sizes=sizes, to="replicate")
        nodes = all_points[:, model.shard(self.nodes_points, dim=0, sizes=node_sizes)].mean(2)

        # all heads of own nodes become own heads of all nodes, and back
        split, joined = (head_sizes, node_sizes), (node_sizes, head_sizes)
        own_heads = (model.all_to_all(part, 2, 1, sizes=split) for part in self.heads(nodes))
        nodes = nodes + self.project(model.all_to_all(attention(*own_heads), 1, 2, sizes=joined).flatten(2))

        all_nodes = model.all_gather(nodes, dim=1, sizes=node_sizes, to="replicate")
        around = all_nodes[:, model.shard(self.points_nodes, dim=0, sizes=sizes)].mean(2)
        change = self.decode(torch.cat([points, around], dim=2))
        return model.all_gather(change, dim=1, sizes=sizes, to="invariant")  # all go on to the same loss


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Between all nodes, (batch, nodes, heads, features)."""
    queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)


def error(change: Tensor, fields: Tensor) -> Tensor:
    """The mean squared error of a forecast for the second time, from the first."""
    return (fields[:, 0] + change - fields[:, 1]).square().mean()


def sphere(number: int) -> Tensor:
    """(number, 3), evenly spread over the unit sphere (Fibonacci lattice)."""
    k = torch.arange(number, dtype=torch.float64)
    z = 1 - (2 * k + 1) / number
    radius, angle = (1 - z.square()).sqrt(), k * math.pi * (1 + math.sqrt(5))
    return torch.stack([radius * angle.cos(), radius * angle.sin(), z], dim=1)


class Waves(Dataset[Tensor]):
    """Waves around the globe that fade into a climate. It reads the points from ``first`` to ``last`` only."""

    def __init__(self, samples: int, first: int = 0, last: int = POINTS) -> None:
        self.samples, self.points = samples, sphere(POINTS)[first:last]
        self.climate = (4 * self.points).sin()  # of three variables

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        """(2 times, own points, variables)."""
        generator = torch.Generator().manual_seed(index)
        direction, phase = torch.randn(2, VARIABLES, 3, dtype=torch.float64, generator=generator)
        waves = (2 * self.points @ direction.T + phase[:, 0]).sin()
        return torch.stack([waves, 0.4 * waves + 0.6 * self.climate])


class Reader(CollectiveModule, L.LightningDataModule):
    """Each rank of a reader group reads its part of the points; the sampler deals out samples by data rank."""

    def __init__(self, samples: int, ranks: int) -> None:
        super().__init__()
        self.samples, self.ranks = samples, ranks

    def setup(self, stage: str) -> None:
        lane = self.collective["lane"]
        sizes = near_even(POINTS, lane.world_size)
        first = sum(sizes[: lane.rank])
        self.fields = Waves(self.samples, first, first + sizes[lane.rank])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.fields, batch_size=BATCH_SIZE // self.ranks, shuffle=True)


def fit(module: Forecaster, steps: int, mesh: dict[str, int]) -> L.Trainer:
    """Trains on all ranks."""
    trainer = L.Trainer(
        devices=math.prod(mesh.values()),
        accelerator="cpu",
        # the ranks of a model group get parts of a field, that is different batches
        strategy=CollectiveStrategy("torch", mesh=mesh, unions={"model": ("reader", "lane")}, batches="different"),
        callbacks=[ExplainSharing()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, datamodule=Reader(steps * BATCH_SIZE, mesh["data"]))
    return trainer


def fit_in_one_process(module: Forecaster, steps: int) -> list[float]:
    """The same training without any collective: whole fields, the joined batches. Returns the loss of each step."""
    fields, losses = Waves(steps * BATCH_SIZE), []
    optimizer = module.configure_optimizers()
    # The order in which the Trainer deals the samples out to the data ranks, here dealt to one.
    sampler: DistributedSampler = DistributedSampler(fields, num_replicas=1, rank=0, seed=0)
    for batch in DataLoader(fields, batch_size=BATCH_SIZE, sampler=sampler):
        loss = error(module.network(batch[:, 0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def differences(module: nn.Module, alone: nn.Module) -> dict[str, float]:
    """The largest difference of each weight."""
    pairs = zip(module.named_parameters(), alone.parameters(), strict=True)
    return {name: (ours - theirs).abs().max().item() for (name, ours), theirs in pairs}


def main() -> None:
    """Trains on all ranks; the first one then trains alone and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, size in {"data": 1, "reader": 2, "lane": 2}.items():
        parser.add_argument(f"--{axis}", type=int, default=size)
    parser.add_argument("--steps", type=int, default=100)
    arguments: Any = parser.parse_args()
    mesh = {axis: getattr(arguments, axis) for axis in ("data", "reader", "lane")}

    torch.manual_seed(0)
    module = Forecaster()
    alone = deepcopy(module)
    trainer = fit(module, arguments.steps, mesh)
    if not trainer.is_global_zero:
        return
    losses = fit_in_one_process(alone, arguments.steps)
    difference = max(differences(module, alone).values())
    print(f"\nMean squared error of a forecast: {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    print(f"Largest difference of any weight to one process {difference:.1e}   (float64, allowed {TOLERANCE:.0e})")
    if not difference <= TOLERANCE:
        raise SystemExit("The ranks together did not do what one process does.")


if __name__ == "__main__":
    main()
