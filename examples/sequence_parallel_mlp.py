"""Transformer MLP blocks whose tokens are split over the ranks outside the MLP, and whose hidden features inside.

Sequence parallelism: norms and residuals work on the rank's own tokens (*varying*). The MLP's hidden features are split
too, so it needs all tokens: `all_gather` brings them, and because each rank goes on to its own features,
``to="replicate"`` sums the gradients. `reduce_scatter` adds the ranks' parts up and hands each rank its own tokens.
Seven tokens do not divide by two or three: ``sizes`` says who has how many, the same list on all ranks.

Norm and bias have one value on all ranks but meet different tokens on each. `replicate` says so where they are used:
their gradients come out summed, and nobody has to remember to do it after backward.

    python examples/sequence_parallel_mlp.py                        # one process
    torchrun --nproc-per-node 2 examples/sequence_parallel_mlp.py   # two
"""

from collections.abc import Sequence

import torch
from comparison import largest_difference, near_even, report
from torch import Tensor, nn
from torch.nn import functional

import collective_strategy
from collective_strategy.collectives import Collective

TOLERANCE = 1e-12  # float64
TOKENS, FEATURES, HIDDEN = 7, 6, 10


class Block(nn.Module):
    """``x + down(gelu(up(norm(x))))`` in one process; x is (tokens, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class SequenceParallelBlock(nn.Module):
    """The same over the ranks of a collective: each gets and returns its own tokens.

    Args:
        whole: The block in one process, from which this rank takes its part of the weights.
        collective: The ranks that share tokens and hidden features.
        sizes: How many tokens each rank has, the same list on all ranks.
    """

    def __init__(self, whole: Block, collective: Collective, sizes: Sequence[int]) -> None:
        super().__init__()
        self.collective, self.sizes = collective, list(sizes)
        hidden = near_even(whole.up.out_features, collective.world_size)
        self.norm_weight = nn.Parameter(whole.norm.weight.detach().clone())
        self.norm_bias = nn.Parameter(whole.norm.bias.detach().clone())
        self.up_weight = nn.Parameter(collective.shard(whole.up.weight.detach(), 0, sizes=hidden))
        self.up_bias = nn.Parameter(collective.shard(whole.up.bias.detach(), 0, sizes=hidden))
        self.down_weight = nn.Parameter(collective.shard(whole.down.weight.detach(), 1, sizes=hidden))
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        norm_weight, norm_bias, down_bias = self.collective.replicate(
            (self.norm_weight, self.norm_bias, self.down_bias)
        )
        normed = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias)
        tokens = self.collective.all_gather(normed, dim=0, sizes=self.sizes, to="replicate")
        hidden = functional.gelu(functional.linear(tokens, self.up_weight, self.up_bias))
        partial = functional.linear(hidden, self.down_weight)
        return x + self.collective.reduce_scatter(partial, dim=0, sizes=self.sizes) + down_bias


def differences(collective: Collective) -> dict[str, float]:
    """What the ranks compute together, compared with one process."""
    torch.manual_seed(0)
    sizes = near_even(TOKENS, collective.world_size)
    blocks = [Block().double(), Block().double()]
    whole = nn.Sequential(*blocks)
    parallel = nn.Sequential(*[SequenceParallelBlock(block, collective, sizes) for block in blocks])
    right_x = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    x = collective.shard(right_x.detach(), 0, sizes=sizes).requires_grad_()

    right = whole(right_x)
    right.square().sum().backward()
    result = parallel(x)
    # Each rank has the loss of its own tokens. Backward of this sum hands every rank its own part's gradient.
    collective.all_reduce(result.square().sum(), to="invariant").backward()

    hidden = near_even(HIDDEN, collective.world_size)
    split_dim = {"up_weight": 0, "up_bias": 0, "down_weight": 1}  # everything else is whole on every rank
    ours, theirs = [], []
    for name, parameter in parallel.named_parameters():
        layer, own_name = name.split(".")
        gradient = whole.get_parameter(f"{layer}.{own_name.replace('_', '.')}").grad
        dim = split_dim.get(own_name)
        ours.append(parameter.grad)
        theirs.append(gradient if dim is None else collective.shard(gradient, dim, sizes=hidden))
    own_gradient = collective.shard(right_x.grad, 0, sizes=sizes)
    return {
        "result": largest_difference(collective, [result], [collective.shard(right.detach(), 0, sizes=sizes)]),
        "gradient of the input": largest_difference(collective, [x.grad], [own_gradient]),
        "gradients of the weights, as they are": largest_difference(collective, ours, theirs),
    }


def main() -> None:
    with collective_strategy.init(mesh={"model": -1}, data_axis=None) as collective:
        report(collective, "Sequence-parallel MLP, 7 tokens", differences(collective["model"]), TOLERANCE)


if __name__ == "__main__":
    main()
