"""Transformer MLP blocks whose hidden features are split over the ranks (tensor parallelism), equal to one process.

All ranks hold the same tokens (*invariant*). Entering a block, `replicate` says that each rank goes on to something of
its own, its hidden features, so that backward sums the gradients: Megatron's f. Leaving it, `all_reduce` sums what the
ranks computed; with ``to="invariant"`` all of them repeat what follows, and backward hands the gradient on: g.

    python examples/tensor_parallel_mlp.py                      # one process
    torchrun --nproc-per-node 2 examples/tensor_parallel_mlp.py # two
"""

import torch
from comparison import largest_difference, near_even, report
from torch import Tensor, nn
from torch.nn import functional

import collective_strategy
from collective_strategy.collectives import Collective

TOLERANCE = 1e-12  # float64
TOKENS, FEATURES, HIDDEN = 5, 6, 10


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes its own output features. Input invariant, output varying."""

    def __init__(self, whole: nn.Linear, collective: Collective) -> None:
        super().__init__()
        self.collective = collective
        sizes = near_even(whole.out_features, collective.world_size)
        self.weight = nn.Parameter(collective.shard(whole.weight.detach(), 0, sizes=sizes))
        self.bias = nn.Parameter(collective.shard(whole.bias.detach(), 0, sizes=sizes))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.collective.replicate(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has its own input features. Input varying, output invariant."""

    def __init__(self, whole: nn.Linear, collective: Collective) -> None:
        super().__init__()
        self.collective = collective
        sizes = near_even(whole.in_features, collective.world_size)
        self.weight = nn.Parameter(collective.shard(whole.weight.detach(), 1, sizes=sizes))
        self.bias = nn.Parameter(whole.bias.detach().clone())  # the same on all ranks, added once, after the sum

    def forward(self, x: Tensor) -> Tensor:
        return self.collective.all_reduce(functional.linear(x, self.weight), to="invariant") + self.bias


class Block(nn.Module):
    """``x + down(gelu(up(norm(x))))`` in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class TensorParallelBlock(nn.Module):
    """The same over the ranks of a collective; every rank gets x and returns the result."""

    def __init__(self, whole: Block, collective: Collective) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES, dtype=whole.norm.weight.dtype)
        self.norm.load_state_dict(whole.norm.state_dict())
        self.up = ColumnParallelLinear(whole.up, collective)
        self.down = RowParallelLinear(whole.down, collective)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def differences(collective: Collective) -> dict[str, float]:
    """What the ranks compute together, compared with one process."""
    torch.manual_seed(0)
    blocks = [Block().double(), Block().double()]
    whole = nn.Sequential(*blocks)
    parallel = nn.Sequential(*[TensorParallelBlock(block, collective) for block in blocks])
    right_x = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    x = right_x.detach().clone().requires_grad_()

    right = whole(right_x)
    right.square().sum().backward()
    result = parallel(x)
    result.square().sum().backward()

    sizes = near_even(HIDDEN, collective.world_size)
    split_dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # everything else is whole on every rank
    ours, theirs = [], []
    for name, parameter in parallel.named_parameters():
        gradient = whole.get_parameter(name).grad
        dim = split_dim.get(name.split(".", 1)[1])
        ours.append(parameter.grad)
        theirs.append(gradient if dim is None else collective.shard(gradient, dim, sizes=sizes))
    return {
        "result": largest_difference(collective, [result], [right]),
        "gradient of the input": largest_difference(collective, [x.grad], [right_x.grad]),
        "gradients of the weights, as they are": largest_difference(collective, ours, theirs),
    }


def main() -> None:
    with collective_strategy.init(mesh={"model": -1}, data_axis=None) as collective:
        report(collective, "Tensor-parallel MLP", differences(collective["model"]), TOLERANCE)


if __name__ == "__main__":
    main()
