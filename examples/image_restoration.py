"""A network learns to take the noise out of photographs, each of which is split over two processes.

Four processes are a mesh of two axes. Along the data axis they train on different photographs; along the model axis
they share each of them: a process holds half of the rows (domain parallelism). Before every convolution
``self.collective["model"].halo_exchange`` fetches the neighbour's border rows, and in backward takes their gradients
back. The weights are the same on all processes, so they are marked ``shared``: their gradients are summed over the
model axis and averaged over the data axis.

    python examples/image_restoration.py

The Trainer starts the other processes by running this script again, so everything is under ``main()``.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import lightning as L
import torch
from comparison import near_even
from photographs import HELD_OUT, HeldOut, NoisyCrops, draw, non_local_means, psnr
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from collective_strategy import CollectiveModule, CollectiveStrategy, ExplainSharing, VerifyReplicas, shared

LEARNING_RATE = 4e-3  # the highest of the schedule
LARGEST_NORM = 0.05  # of all gradients together; longer ones are clipped
TOLERANCE = 1e-10  # for the weights, in float64, after the steps that one process repeats
Convolve = Callable[[nn.Conv2d, Tensor], Tensor]


class Denoiser(CollectiveModule, L.LightningModule):
    """Noisy photographs to clean ones. Every process passes rows of its own, an even number."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.network = shared(Network(width), over="model")

    def forward(self, rows: Tensor) -> Tensor:
        neighbours = self.collective["model"]

        def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
            return layer(neighbours.halo_exchange(x, dim=-2, width=1))  # zeros above the first and below the last row

        return self.network(rows, convolve)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        noisy, clean = self.own_rows(batch)
        part = (self(noisy) - clean).square().sum() / batch[1].numel()  # this process' part of the mean over all rows
        self.log("loss", self.collective["model"].all_reduce(part.detach()), prog_bar=True)
        return part

    def on_test_epoch_start(self) -> None:
        self.restored: dict[int, Tensor] = {}

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        noisy, clean = self.own_rows(batch[:2])
        rows = self(noisy).clamp(0, 1)
        error = self.collective["model"].all_reduce((rows - clean).square().sum()) / batch[1].numel()
        self.log("PSNR", -10 * torch.log10(error), sync_dist=True)  # the mean over all photographs
        self.restored[int(batch[2])] = self.collective["model"].all_gather(rows, dim=-2, ragged=True)[0]

    def on_test_epoch_end(self) -> None:
        for others in self.collective["data"].all_gather_object(self.restored):
            self.restored |= others

    def own_rows(self, batch: Any) -> Any:
        """The rows of whole photographs that this process works on. They go by pairs, so that no piece is odd."""
        model = self.collective["model"]
        pairs = near_even(batch[0].shape[-2] // 2, model.world_size)
        return model.shard(batch, dim=-2, sizes=[2 * length for length in pairs])

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_and_schedule(self.parameters(), self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Network(nn.Module):
    """Residual blocks at half the resolution that find the noise, after EDSR (Lim 2017) and FFDNet (Zhang 2018).

    Its convolutions pad the columns only. ``convolve`` applies one of them and cares for the rows.
    """

    def __init__(self, width: int, blocks: int = 3) -> None:
        super().__init__()
        self.first = convolution(3 * 4, width)  # squares of 2 x 2 pixels with three colours each
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = convolution(width, 3 * 4)
        nn.init.zeros_(self.last.weight)

    def forward(self, noisy: Tensor, convolve: Convolve) -> Tensor:
        x = convolve(self.first, functional.pixel_unshuffle(noisy, 2))
        for block in self.blocks:
            x = block(x, convolve)
        return noisy + functional.pixel_shuffle(convolve(self.last, x), 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = convolution(width, width), convolution(width, width)

    def forward(self, x: Tensor, convolve: Convolve) -> Tensor:
        return x + 0.3 * convolve(self.two, convolve(self.one, x).relu())


def convolution(into: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, 3, padding=(0, 1))


def optimizer_and_schedule(weights: Iterable[nn.Parameter], steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(weights)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.15)


def fit(module: Denoiser, data: NoisyCrops, arguments: argparse.Namespace, *callbacks: L.Callback) -> L.Trainer:
    """Goes through the data once, on all processes."""
    trainer = L.Trainer(
        devices=arguments.data * arguments.model,
        accelerator="cpu",
        strategy=CollectiveStrategy("torch", mesh={"data": arguments.data, "model": arguments.model}),
        callbacks=list(callbacks),
        max_epochs=1,
        gradient_clip_val=LARGEST_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=arguments.batch_size // arguments.data))
    return trainer


def fit_in_one_process(module: Denoiser, data: NoisyCrops, batch_size: int) -> None:
    """The same training without any collective: whole photographs, the joined batches, an ordinary PyTorch loop."""

    def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
        return functional.conv2d(x, layer.weight, layer.bias, padding=1)

    optimizer, schedule = optimizer_and_schedule(module.parameters(), module.steps)
    # The order in which the Trainer deals the samples out to the processes, here dealt to one.
    sampler: DistributedSampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    for noisy, clean in DataLoader(data, batch_size=batch_size, sampler=sampler):
        optimizer.zero_grad()
        (module.network(noisy, convolve) - clean).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), LARGEST_NORM)
        optimizer.step()
        schedule.step()


def compare_with_one_process(module: Denoiser, arguments: argparse.Namespace) -> tuple[float, float]:
    """Trains copies of the module in float64 for some steps, one on all processes and one on the first alone.

    Returns:
        The largest difference of any weight between the two, and the largest change of any weight in those steps. On
        all processes but the first, nan.
    """
    together = deepcopy(module).double()
    together.steps = arguments.compared_steps
    alone = deepcopy(together)
    samples = arguments.compared_steps * arguments.batch_size
    crops = NoisyCrops(samples, arguments.crop, arguments.noise / 255, torch.float64)
    if not fit(together, crops, arguments).is_global_zero:
        return math.nan, math.nan
    fit_in_one_process(alone, crops, arguments.batch_size)
    return largest_difference(together, alone), largest_difference(module, alone)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def main() -> None:
    """Compares with one process, then trains; the first process looks at the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=2, help="processes along the data axis")
    parser.add_argument("--model", type=int, default=2, help="processes that share a photograph")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--compared-steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of photographs per step, over all processes")
    parser.add_argument("--crop", type=int, default=64, help="rows and columns of a piece")
    parser.add_argument("--width", type=int, default=48, help="channels of the convolutions")
    parser.add_argument("--noise", type=float, default=50, help="standard deviation, where white is 255")
    parser.add_argument("--picture", default="image_restoration.png")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    module = Denoiser(arguments.width, arguments.steps)
    difference, change = compare_with_one_process(module, arguments)

    noise = arguments.noise / 255
    crops = NoisyCrops(arguments.steps * arguments.batch_size, arguments.crop, noise, torch.float32)
    trainer = fit(module, crops, arguments, ExplainSharing(), VerifyReplicas())
    held_out = HeldOut(noise)
    trainer.test(module, DataLoader(held_out), verbose=False)
    if not trainer.is_global_zero:
        return

    noisy, clean, numbers = zip(*[held_out[number] for number in range(len(held_out))], strict=True)
    pictures = {
        "noisy": noisy,
        "non-local means": [non_local_means(photograph, noise) for photograph in noisy],
        "restored": [module.restored[number] for number in numbers],
    }
    draw(pictures, clean, arguments.picture)

    print(f"\n{len(clean)} held-out photographs ({', '.join(HELD_OUT)}), PSNR")
    for title, kind in pictures.items():
        values = [psnr(picture, original) for picture, original in zip(kind, clean, strict=True)]
        print(f"  {title:<20}", *[f"{value:6.2f} dB" for value in values])
    print("Largest difference of any weight to one process with whole photographs and joined batches")
    print(f"  float64, {arguments.compared_steps} steps {difference:13.1e}   (allowed {TOLERANCE:.0e})")
    print(f"  meanwhile the weights changed by up to {change:.1e}")
    print(f"Picture: {arguments.picture}")
    if not difference <= TOLERANCE:
        raise SystemExit("The processes together did not do what one process does.")


if __name__ == "__main__":
    main()
