"""Model ranks that hold different layers beside the shared ones, as the stages and experts of a model do."""

import random
import time

import pytest
import torch
from engine_ranks import MESH_2X2, common, drawn, per_rank
from torch import nn

from collective_strategy import GradientReducer
from collective_strategy.gradients import BucketSizes
from collective_strategy.sharing import shared

WIDTH, STEPS = 3, 30
LAYERS = {0: ("in", "mid", "out"), 1: ("own",)}
ALL = ["first", "last", *LAYERS[0], *LAYERS[1]]


def layer(name: str) -> nn.Linear:
    return drawn(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), ALL.index(name))


def build(model: int) -> nn.ModuleDict:
    """The shared layers in one order, the others between them or after them."""
    names = ["first", *LAYERS[0], "last"] if model == 0 else ["first", "last", *LAYERS[1]]
    return nn.ModuleDict({name: layer(name) for name in names})


def loss(net, x: torch.Tensor, model: int) -> torch.Tensor:
    for name in ["first", *LAYERS[model], "last"]:
        x = torch.tanh(net[name](x))
    return x.square().sum()


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, 2, 2, 4, WIDTH, dtype=torch.float64, generator=generator, device="cpu")


@pytest.mark.parametrize(
    "sizes", [BucketSizes(moved=1, packed=1, first=1), BucketSizes()], ids=["moved, a bucket each", "packed"]
)
def test_model_ranks_with_different_layers_equal_one_process(sizes):
    def train(collective):
        data, model = collective["data"].rank, collective["model"].rank
        net = build(model)
        for name in ("first", "last"):
            shared(net[name], over="model")
        reducer = GradientReducer(net, collective, sizes=sizes)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        naps = random.Random(collective.rank)
        for x in inputs():
            time.sleep(naps.random() * 2e-3)
            optimizer.zero_grad()
            with reducer.backward():
                loss(net, x[data, model].to(collective.device), model).backward()
            norm = reducer.clip_grad_norm_(0.5)
            optimizer.step()
        return {name: p.detach() for name, p in net.named_parameters()}, norm.item()

    whole = nn.ModuleDict({name: layer(name) for name in ALL})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for x in inputs():
        optimizer.zero_grad()
        (sum(loss(whole, x[data, model], model) for data in range(2) for model in range(2)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
        optimizer.step()
    right = dict(whole.named_parameters())
    for held, found in per_rank(4, train, mesh=MESH_2X2, timeout=60):
        assert found == pytest.approx(norm, rel=1e-10)
        assert max((value - right[name]).abs().max().item() for name, value in held.items()) < 1e-10


def test_a_model_rank_may_change_its_layers_alone():
    """Model rank 1 freezes its own layer and replaces its weight; the shared layer goes on as before."""

    def train(collective):
        model = collective["model"].rank
        both, own = module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        shared(both, over="model")
        reducer = GradientReducer(module, collective)
        seen = []
        for step in range(5):
            if model == 1:
                own.requires_grad_(step % 2 == 0)
                if step == 3:
                    own.weight = nn.Parameter(torch.zeros(1, 1))
            module.zero_grad()
            x = torch.full((1, 1), 1.0 + collective.rank)
            with reducer.backward():
                (both(x) + own(x) * 0).sum().backward()
            seen.append(both.weight.grad.item())
        return seen

    assert common(4, train, mesh=MESH_2X2) == [5.0] * 5
