"""A mixture of experts with one expert per rank: every token travels to its expert and back.

Each rank routes its own tokens. How many go where is known only then, so the ranks tell each other first
(`exchange_sizes`), and `all_to_all` with ``sizes`` moves exactly these tokens. Its backward is the exchange back, with
the sizes swapped. An expert that nobody chose works on zero tokens: its rank takes part in forward and backward like
the others, or they would wait for it.

    python examples/moe_dispatch.py                         # one process
    torchrun --nproc-per-node 2 examples/moe_dispatch.py    # two
"""

from copy import deepcopy

import torch
from comparison import largest_difference, report
from torch import Tensor, nn
from torch.nn import functional

import collective_strategy
from collective_strategy.collectives import Collective

TOLERANCE = 1e-12  # float64
FEATURES, HIDDEN = 4, 6


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES))


class MixtureOfExperts(nn.Module):
    """Each token goes to the expert of its largest gate, whose result is scaled by the gate (Fedus et al. 2021)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, experts)
        self.experts = nn.ModuleList(expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        results = torch.stack([each(x) for each in self.experts])
        return gate.unsqueeze(-1) * results[chosen, torch.arange(len(x))]


class ExpertParallel(nn.Module):
    """The same with rank r holding expert r. Each rank gets and returns its own tokens, any number of them."""

    def __init__(self, whole: MixtureOfExperts, collective: Collective) -> None:
        super().__init__()
        self.collective = collective
        self.router = deepcopy(whole.router)  # equal on all ranks
        self.expert = deepcopy(whole.experts[collective.rank])  # another one on each rank

    def forward(self, x: Tensor) -> Tensor:
        # Every rank routes other tokens with the same router: its gradients are summed.
        weight, bias = self.collective.replicate([self.router.weight, self.router.bias])
        gate, chosen = functional.linear(x, weight, bias).softmax(-1).max(-1)

        order = chosen.argsort(stable=True)  # tokens of expert 0 first, then of expert 1, ...
        sent = chosen.bincount(minlength=self.collective.world_size).tolist()
        received = self.collective.exchange_sizes(sent)
        arrived = self.collective.all_to_all(x[order], sizes=(sent, received))
        returned = self.collective.all_to_all(self.expert(arrived), sizes=(received, sent))
        return gate.unsqueeze(-1) * returned[order.argsort()]


def differences(collective: Collective, tokens: int, lonely_expert: bool) -> dict[str, float]:
    """What the ranks compute together, compared with one process.

    Args:
        collective: Rank r holds expert r.
        tokens: How many in all; the first rank holds one, the last ones all others.
        lonely_expert: Whether the last expert is made so unattractive that it gets no token at all.
    """
    torch.manual_seed(0)
    ranks = collective.world_size
    whole = MixtureOfExperts(ranks).double()
    if lonely_expert:
        nn.init.constant_(whole.router.bias[-1:], -100.0)
    parallel = ExpertParallel(whole, collective)
    sizes = [tokens] if ranks == 1 else [1, *[0] * (ranks - 2), tokens - 1]
    right_x = torch.randn(tokens, FEATURES, dtype=torch.float64, requires_grad=True)
    x = collective.shard(right_x.detach(), 0, sizes=sizes).requires_grad_()

    right = whole(right_x)
    right.square().sum().backward()
    result = parallel(x)
    collective.all_reduce(result.square().sum(), to="invariant").backward()  # the loss of all tokens

    own_expert = whole.experts[collective.rank]
    return {
        "result": largest_difference(collective, [result], [collective.shard(right.detach(), 0, sizes=sizes)]),
        "gradient of the input": largest_difference(
            collective, [x.grad], [collective.shard(right_x.grad, 0, sizes=sizes)]
        ),
        "gradients of the router, as they are": largest_difference(
            collective,
            [parameter.grad for parameter in parallel.router.parameters()],
            [parameter.grad for parameter in whole.router.parameters()],
        ),
        "gradients of each rank's expert": largest_difference(
            collective,
            [parameter.grad for parameter in parallel.expert.parameters()],
            [parameter.grad for parameter in own_expert.parameters()],
        ),
    }


def main() -> None:
    with collective_strategy.init(mesh={"expert": -1}, data_axis=None) as collective:
        experts = collective["expert"]
        report(collective, "Mixture of experts", differences(experts, 11, lonely_expert=False), TOLERANCE)
        if experts.world_size > 1:
            name = "Mixture of experts, one without tokens"
            report(collective, name, differences(experts, 11, lonely_expert=True), TOLERANCE)


if __name__ == "__main__":
    main()
