"""Attention over a sequence that is split over the ranks: keys and values travel around a ring.

No rank ever holds the whole sequence. In step k each rank attends to the keys and values of the rank k places before
it, and `shift` passes them on; a running maximum and a running sum put the softmax together (Liu, Zaharia and Abbeel
2023, Milakov and Gimelshein 2018). The backward of `shift` is the shift the other way round, so plain autograd is all
the backward there is.

All ranks make the same calls, also for blocks that a causal mask hides altogether: a rank that left out a shift, or its
backward, would let the others wait.

    python examples/ring_attention.py                       # one process
    torchrun --nproc-per-node 2 examples/ring_attention.py  # two
"""

import math
from copy import deepcopy

import torch
from comparison import largest_difference, report
from torch import Tensor, nn
from torch.nn import functional

import collective_strategy
from collective_strategy.collectives import Collective

TOLERANCE = 1e-12  # float64
TOKENS, HEADS, FEATURES = 12, 2, 8


def ring_attention(queries: Tensor, keys: Tensor, values: Tensor, collective: Collective, causal: bool) -> Tensor:
    """Softmax attention over the sequence of all ranks.

    Args:
        queries, keys, values: This rank's tokens, (heads, tokens, features); the same number on every rank.
        collective: Rank r holds the r-th piece of the sequence.
        causal: Whether a token sees only itself and the tokens before it.

    Returns:
        This rank's tokens, (heads, tokens, features).
    """
    length = queries.shape[1]
    positions = torch.arange(length, device=queries.device)
    maximum = torch.full_like(queries[..., :1], -math.inf)
    total, weighted = torch.zeros_like(maximum), torch.zeros_like(queries)
    travelling = torch.stack([keys, values])
    for step in range(collective.world_size):
        keys, values = travelling.unbind()
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        if causal:
            source = (collective.rank - step) % collective.world_size
            hidden = source * length + positions > collective.rank * length + positions.unsqueeze(1)
            scores = scores.masked_fill(hidden, -math.inf)
        # Step 0 is the own block, where a token sees at least itself, so the maximum is finite from then on.
        # It cancels in the result, so its gradient is left out.
        larger = torch.maximum(maximum, scores.detach().amax(-1, keepdim=True))
        weights, rescale = (scores - larger).exp(), (maximum - larger).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        weighted = weighted * rescale + weights @ values
        maximum = larger
        if step + 1 < collective.world_size:
            travelling = collective.shift(travelling)
    return weighted / total


class SelfAttention(nn.Module):
    """Multi-head self-attention in one process; x is (tokens, features)."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.project = nn.Linear(FEATURES, 3 * FEATURES)
        self.out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).reshape(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        queries, keys, values = heads.unbind()
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        return self.out(attended.transpose(0, 1).reshape(x.shape))


class RingSelfAttention(nn.Module):
    """The same over the ranks of a collective: each gets and returns its own tokens.

    The weights are equal on all ranks and meet other tokens on each, so `replicate` sums their gradients.
    """

    def __init__(self, whole: SelfAttention, collective: Collective) -> None:
        super().__init__()
        self.collective, self.causal = collective, whole.causal
        self.project, self.out = deepcopy(whole.project), deepcopy(whole.out)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, out_weight, out_bias = self.collective.replicate(
            [self.project.weight, self.project.bias, self.out.weight, self.out.bias]
        )
        heads = functional.linear(x, weight, bias).reshape(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        queries, keys, values = heads.unbind()
        attended = ring_attention(queries, keys, values, self.collective, self.causal)
        return functional.linear(attended.transpose(0, 1).reshape(x.shape), out_weight, out_bias)


def differences(collective: Collective, causal: bool) -> dict[str, float]:
    """What the ranks compute together, compared with one process."""
    torch.manual_seed(0)
    whole = SelfAttention(causal).double()
    ring = RingSelfAttention(whole, collective)
    right_x = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    x = collective.shard(right_x.detach(), 0).requires_grad_()

    right = whole(right_x)
    right.square().sum().backward()
    result = ring(x)
    collective.all_reduce(result.square().sum(), to="invariant").backward()  # the loss of all tokens

    pairs = zip(ring.parameters(), whole.parameters(), strict=True)
    ours, theirs = zip(*[(mine.grad, one.grad) for mine, one in pairs], strict=True)
    return {
        "result": largest_difference(collective, [result], [collective.shard(right.detach(), 0)]),
        "gradient of the input": largest_difference(collective, [x.grad], [collective.shard(right_x.grad, 0)]),
        "gradients of the weights, as they are": largest_difference(collective, ours, theirs),
    }


def main() -> None:
    with collective_strategy.init(mesh={"context": -1}, data_axis=None) as collective:
        for name, causal in {"Ring attention": False, "Causal ring attention": True}.items():
            report(collective, name, differences(collective["context"], causal), TOLERANCE)


if __name__ == "__main__":
    main()
