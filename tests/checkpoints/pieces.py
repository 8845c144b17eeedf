"""A module with every kind of tensor, and optimizers with every kind of state, in a plain loop."""

from typing import Any

import torch
from torch import Tensor, nn

from collective_strategy import Collective, private, sharded, shared
from collective_strategy.sharing.pieces import even_cut


class Pieces(nn.Module):
    """Common, tied, cut by rows (7), cut by columns, part by part, private; buffers of each kind.

    The values of the wholes are numbers counted up, so that every piece can be checked by hand. A rank's own values
    differ from those of the others.
    """

    def __init__(self, collective: Collective | None = None, own: bool = True) -> None:
        super().__init__()
        model = None if collective is None or collective.mesh is None else collective["model"]
        n, k = (model.world_size, model.rank) if model is not None else (1, 0)
        self.common = shared(nn.Linear(3, 2), over="model")
        self.again = shared(nn.Module(), over="model")
        self.again.weight = self.common.weight
        self.rows = sharded(piece(whole(7, 2), 0, n, k), "*", over="model", dim=0)
        self.columns = sharded(piece(whole(2, 6), 1, n, k), "*", over="model", dim=-1)
        parts = torch.cat([part.split(even_cut(4, n), 0)[k] for part in whole(12, 2).split(4)])
        self.fused = sharded(piece(parts, 0, 1, 0), "*", over="model", dim=0, parts=[4, 4, 4])
        self.scale = shared(nn.BatchNorm1d(2), over="model")
        self.norm = sharded(nn.BatchNorm1d(n), "*", over="model", dim=0)
        if own:
            self.head = private(nn.Linear(2, 1))
            self.head.register_buffer("offset", torch.tensor([float(k)]))
        with torch.no_grad():
            self.common.weight.copy_(whole(2, 3))
            self.common.bias.copy_(whole(2))
            self.norm.running_mean.copy_(whole(n * n).split(n)[k])
            if own:
                self.head.weight.fill_(10.0 + k)

    def forward(self) -> Tensor:
        """Anything that gives every weight a gradient."""
        return sum((parameter.square().sum() for parameter in self.parameters()), torch.zeros(()))


def whole(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def piece(values: Tensor, dim: int, n: int, k: int) -> nn.Module:
    result = nn.Module()
    result.weight = nn.Parameter(values.split(even_cut(values.shape[dim], n), dim)[k].clone())
    return result


class Odd(torch.optim.SGD):
    """Keeps a text, a list and a table of the weight's first dim beside the momentum."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["name"], state["list"] = "odd", [1, torch.tensor([2.0])]
                state["table"] = torch.full((len(parameter), 9), 3.0)


def stepped(optimizer: torch.optim.Optimizer, module: Pieces, steps: int = 2) -> torch.optim.Optimizer:
    """After some steps."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module()
        loss.backward()
        return loss

    for _ in range(steps):
        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
    return optimizer


def state_of(module: nn.Module, *optimizers: torch.optim.Optimizer, **rest: Any) -> dict[str, Any]:
    """The dict to save."""
    return {"state_dict": module.state_dict(), "optimizer_states": [o.state_dict() for o in optimizers], **rest}


def same(one: Any, other: Any) -> bool:
    """Equal bit by bit, through containers."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
