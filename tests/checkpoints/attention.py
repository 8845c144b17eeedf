"""A small attention network over the model axis, under the Trainer, and the same in one process.

It has a fused QKV weight cut part by part, 7 hidden rows that no 2 or 4 ranks share evenly, a tied embedding, a shared
norm and a buffer. Weights are float64 and start from numbers that depend on their name only.
"""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from collective_strategy import Collective, CollectiveStrategy, sharded, shared
from collective_strategy.sharing.pieces import even_cut

VOCABULARY, WIDTH, HEADS, HIDDEN, TOKENS = 5, 8, 4, 7, 3
SAMPLES, GLOBAL_BATCH = 40, 4
STEPS = SAMPLES // GLOBAL_BATCH


def start(name: str, *shape: int) -> Tensor:
    """A whole weight at the start."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2


def share(whole: Tensor, dim: int, ranks: int, rank: int, parts: int = 1) -> nn.Parameter:
    """A rank's rows, or its rows of every part."""
    return nn.Parameter(
        torch.cat([part.split(even_cut(part.shape[dim], ranks), dim)[rank] for part in whole.chunk(parts, dim)], dim)
    )


class Attention(nn.Module):
    """One rank's share of the network; the whole of it with one rank."""

    def __init__(self, model: Collective | None = None) -> None:
        super().__init__()
        self.model = model
        ranks, rank = (model.world_size, model.rank) if model is not None else (1, 0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.embedding.weight = nn.Parameter(start("embedding", VOCABULARY, WIDTH))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.qkv = nn.Module()
        self.qkv.weight = share(start("qkv", 3 * WIDTH, WIDTH), 0, ranks, rank, parts=3)
        self.proj = nn.Module()
        self.proj.weight = share(start("proj", WIDTH, WIDTH), 1, ranks, rank)
        self.proj.bias = nn.Parameter(start("bias", WIDTH))
        self.up = nn.Module()
        self.up.weight = share(start("up", HIDDEN, WIDTH), 0, ranks, rank)
        self.down = nn.Module()
        self.down.weight = share(start("down", WIDTH, HIDDEN), 1, ranks, rank)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(0))
        self.mark()

    def mark(self) -> None:
        shared(self, over="model", grad="none")  # what all model ranks compute alike, and the buffer
        sharded(self.qkv, "weight", over="model", dim=0, parts=[WIDTH] * 3)
        sharded(self.proj, "weight", over="model", dim=1)
        sharded(self.up, "weight", over="model", dim=0)
        sharded(self.down, "weight", over="model", dim=-1)

    def enter(self, x: Tensor) -> Tensor:
        return x if self.model is None else self.model.replicate(x)

    def leave(self, x: Tensor) -> Tensor:
        return x if self.model is None else self.model.all_reduce(x, to="invariant")

    def forward(self, tokens: Tensor, dropout: float = 0.0) -> Tensor:
        """Logits (batch, token, vocabulary)."""
        x = functional.dropout(self.embedding(tokens), dropout)
        h = functional.linear(self.enter(self.norm(x)), self.qkv.weight)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in h.chunk(3, -1))
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.leave(functional.linear(h, self.proj.weight)) + self.proj.bias
        h = torch.tanh(functional.linear(self.enter(x), self.up.weight))
        return self.output(x + self.leave(functional.linear(h, self.down.weight)))

    def loss(self, batch: Tensor, dropout: float = 0.0) -> Tensor:
        """Of samples given by number."""
        tokens = torch.stack([torch.arange(TOKENS + 1) * (int(i) % 3 + 1) + int(i) for i in batch]) % VOCABULARY
        return functional.cross_entropy(self(tokens[:, :-1], dropout).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_and_schedule(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    adam = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)


def one_process(steps: int) -> tuple[Attention, torch.optim.Optimizer, list[Tensor]]:
    """A plain loop over the global batches."""
    net = Attention()
    adam, schedule = optimizer_and_schedule(net.parameters())
    losses = []
    for step in range(steps):
        first = step % STEPS * GLOBAL_BATCH
        loss = net.loss(torch.arange(first, first + GLOBAL_BATCH))
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        net.steps += 1
        losses.append(loss.detach())
    return net, adam, losses


class Counting(L.Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Meshed(L.LightningModule):
    """With ``noise`` every step draws random numbers from all generators."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.noise = noise
        self.net: Attention | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Attention(self.collective["model"])

    def train_dataloader(self) -> DataLoader:
        """Step k is on samples ``k * GLOBAL_BATCH`` onwards, whatever the number of data ranks; with noise shuffled."""
        data = self.collective.data
        share = torch.arange(SAMPLES) if self.noise else torch.arange(SAMPLES)[data.rank :: data.world_size]
        return DataLoader(share, batch_size=GLOBAL_BATCH // data.world_size, shuffle=self.noise)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.net.steps += 1
        loss = self.net.loss(batch, dropout=0.2 if self.noise else 0.0)
        if self.noise:
            loss = loss * (1 + random.random() / 10 + np.random.rand() / 10 + torch.rand((), dtype=torch.float64))
        return loss

    def configure_optimizers(self) -> Any:
        adam, schedule = optimizer_and_schedule(self.parameters())
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(mesh: dict[str, int], epochs: int, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": mesh["data"] * mesh["model"],
        "strategy": CollectiveStrategy(mesh=mesh, timeout=60),
        "max_epochs": epochs,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**settings | options)


def held(module: Meshed, fitted: L.Trainer) -> dict[str, Any]:
    """Everything that training goes on from, on this rank."""
    adam = fitted.optimizers[0]
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": adam.state_dict()["state"],
        "lr": adam.param_groups[0]["lr"],
        "schedule": fitted.lr_scheduler_configs[0].scheduler.last_epoch,
        "steps": fitted.global_step,
        "epoch": fitted.current_epoch,
        "torch": torch.get_rng_state(),
        "python": random.random(),
        "numpy": np.random.rand(),
        "counted": next((c.count for c in fitted.callbacks if isinstance(c, Counting)), None),
        "tied": module.net.output.weight is module.net.embedding.weight,
    }
