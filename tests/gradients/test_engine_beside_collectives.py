"""A model whose forward and backward communicate too, on ranks that run different layers at different speeds."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
from engine_ranks import MESH_2X2, drawn, per_rank
from torch import nn

from collective_strategy import GradientReducer
from collective_strategy.gradients import BucketSizes
from collective_strategy.sharing import shared

WIDTH, STEPS = 4, 200
NAMES = ("front", "first", "second", "piece", "head", "idle")


def layer(name: str, piece: int = 0) -> nn.Linear:
    return drawn(nn.Linear(WIDTH, WIDTH, bias=name != "piece", dtype=torch.float64), 10 * NAMES.index(name) + piece)


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, 2, 3, WIDTH, dtype=torch.float64, generator=generator, device="cpu")


def part(net, h: torch.Tensor, data: int, model: int) -> torch.Tensor:
    """What a model rank computes of the sum: rank 1 leaves `second` out, rank 2 has the two the other way round."""
    order = {(0, 1): [net.first], (1, 0): [net.second, net.first]}.get((data, model), [net.first, net.second])
    for one in order:
        h = torch.tanh(one(h))
    return net.piece(h)


def contrast(own: torch.Tensor, everybody: torch.Tensor) -> torch.Tensor:
    """The loss of own samples against those of all data ranks."""
    return (own @ everybody.t()).logsumexp(-1).mean() - (own * own).sum(-1).mean()


def in_one_process() -> dict[str, list[torch.Tensor]]:
    layers = {name: layer(name) for name in NAMES} | {"piece1": layer("piece", 1)}
    parameters = [p for one in layers.values() for p in one.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    nets = [SimpleNamespace(**layers), SimpleNamespace(**layers | {"piece": layers["piece1"]})]
    for x in inputs():
        optimizer.zero_grad()
        outputs = []
        for data in range(2):
            h = torch.tanh(layers["front"](x[data]))
            outputs.append(layers["head"](sum(part(nets[model], h, data, model) for model in range(2))))
        everybody = torch.cat(outputs)
        (sum(contrast(own, everybody) for own in outputs) / 2).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return {name: [p.detach() for p in one.parameters()] for name, one in layers.items()}


@pytest.mark.parametrize(
    "sizes", [BucketSizes(moved=1, packed=1, first=1), BucketSizes()], ids=["moved, a bucket each", "packed"]
)
def test_200_steps_equal_one_process(sizes):
    """Gather over the data axis, replicate and all-reduce over the model axis, clipping, and naps up to 2 ms."""

    def train(collective):
        data, model = collective["data"], collective["model"]
        torch.set_num_threads(1)
        net = nn.ModuleDict({name: layer(name, model.rank if name == "piece" else 0) for name in NAMES})
        for name in ("front", "head"):
            shared(net[name], over="model", grad="none")  # inputs are replicated, so each rank has the whole gradient
        for name in ("first", "second", "idle"):
            shared(net[name], over="model", grad="sum")
        reducer = GradientReducer(net, collective, sizes=sizes)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        naps = random.Random(collective.rank)

        def nap(value):
            if naps.random() < 0.3:
                time.sleep(naps.random() * 2e-3)
            return value

        for x in inputs():
            optimizer.zero_grad()
            h = torch.tanh(net["front"](x[data.rank].to(collective.device)))
            own = part(SimpleNamespace(**net), model.replicate(h), data.rank, model.rank)
            own.register_hook(nap)
            own = net["head"](model.all_reduce(nap(own), to="invariant"))
            everybody = data.all_gather(own, dim=0)
            loss = contrast(own, everybody)
            nap(None)
            with reducer.backward():
                loss.backward()
            reducer.clip_grad_norm_(1.0)
            optimizer.step()
        reducer.close()
        used = [p.grad is None for p in net["idle"].parameters()]
        return model.rank, {name: [p.detach() for p in net[name].parameters()] for name in NAMES}, used

    expected = in_one_process()
    for model, held, idle in per_rank(4, train, mesh=MESH_2X2, timeout=60):
        assert all(idle)
        for name in NAMES:
            right = expected["piece1" if name == "piece" and model else name]
            for ours, theirs in zip(held[name], right, strict=True):
                assert (ours - theirs).abs().max() < 1e-10, name
