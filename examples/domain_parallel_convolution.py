"""Convolutions over an image whose rows are split over the ranks (domain parallelism), equal to one process.

A convolution needs the rows next to its own: `halo_exchange` fetches them from the neighbours, and in backward adds
their gradients to those of their owners. The pieces may be uneven; at the ends of the domain come zeros, or with
``wrap=True`` the rows of the other end, which are the padding modes "zeros" and "circular" of `torch.nn.Conv2d`.

    python examples/domain_parallel_convolution.py                          # one process
    torchrun --nproc-per-node 2 examples/domain_parallel_convolution.py     # two
"""

from typing import Literal

import torch
from comparison import largest_difference, report
from torch import Tensor, nn
from torch.nn import functional

import collective_strategy
from collective_strategy.collectives import Collective

TOLERANCE = 1e-12  # float64
ROWS, COLUMNS = 13, 6
PaddingMode = Literal["zeros", "circular"]


class DomainParallelConv2d(nn.Module):
    """A convolution that keeps the image's size, over images whose rows are split over the ranks.

    Args:
        whole: The convolution in one process: stride 1, padding "same", padding mode "zeros" or "circular".
        collective: Rank r holds the r-th piece of the rows, (batch, channels, own rows, columns).

    The weights are equal on all ranks and meet other rows on each, so `replicate` sums their gradients.
    """

    def __init__(self, whole: nn.Conv2d, collective: Collective) -> None:
        super().__init__()
        if whole.padding != "same" or whole.padding_mode not in ("zeros", "circular"):
            raise ValueError(f"the padding must be 'same', with zeros or circular, got {whole}.")
        assert whole.bias is not None
        self.collective = collective
        self.periodic = whole.padding_mode == "circular"
        self.rows, self.columns = (size // 2 for size in whole.kernel_size)
        self.weight = nn.Parameter(whole.weight.detach().clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.collective.replicate([self.weight, self.bias])
        x = self.collective.halo_exchange(x, dim=-2, width=self.rows, wrap=self.periodic)
        x = functional.pad(x, (self.columns, self.columns, 0, 0), mode="circular" if self.periodic else "constant")
        return functional.conv2d(x, weight, bias)


def network(padding_mode: PaddingMode) -> nn.Sequential:
    """Three layers whose kernels need one, two and one rows of each neighbour."""
    layers = [(3, 4, 3), (4, 4, 5), (4, 2, 3)]
    return nn.Sequential(
        *[
            nn.Sequential(nn.Conv2d(into, out, kernel, padding="same", padding_mode=padding_mode), nn.Tanh())
            for into, out, kernel in layers
        ]
    )


def parallelize(whole: nn.Sequential, collective: Collective) -> nn.Sequential:
    """The network with its convolutions over the ranks of a collective."""
    return nn.Sequential(
        *[nn.Sequential(DomainParallelConv2d(layer[0], collective), layer[1]) for layer in whole]  # type: ignore[index]
    )


def differences(collective: Collective, padding_mode: PaddingMode) -> dict[str, float]:
    """What the ranks compute together, compared with one process."""
    torch.manual_seed(0)
    ranks = collective.world_size
    sizes = [*[4, 2, 3][: ranks - 1], ROWS - sum([4, 2, 3][: ranks - 1])]  # uneven: [13], [4, 9], [4, 2, 7], ...
    whole = network(padding_mode).double()
    parallel = parallelize(whole, collective)
    right_x = torch.randn(2, 3, ROWS, COLUMNS, dtype=torch.float64, requires_grad=True)
    x = collective.shard(right_x.detach(), -2, sizes=sizes).requires_grad_()

    right = whole(right_x)
    right.square().sum().backward()
    result = parallel(x)
    collective.all_reduce(result.square().sum(), to="invariant").backward()  # the loss of the whole image

    pairs = zip(parallel.parameters(), whole.parameters(), strict=True)
    ours, theirs = zip(*[(mine.grad, one.grad) for mine, one in pairs], strict=True)
    own_right = collective.shard(right.detach(), -2, sizes=sizes)
    own_gradient = collective.shard(right_x.grad, -2, sizes=sizes)
    return {
        "result": largest_difference(collective, [result], [own_right]),
        "gradient of the input": largest_difference(collective, [x.grad], [own_gradient]),
        "gradients of the weights, as they are": largest_difference(collective, ours, theirs),
    }


def main() -> None:
    with collective_strategy.init(mesh={"rows": -1}, data_axis=None) as collective:
        modes: tuple[PaddingMode, ...] = ("zeros", "circular")
        for padding_mode in modes:
            title = f"Convolutions, {padding_mode} at the borders"
            report(collective, title, differences(collective["rows"], padding_mode), TOLERANCE)


if __name__ == "__main__":
    main()
