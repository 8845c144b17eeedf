"""A small network with every kind of weight, trained on ranks and by one process on the joined batch.

The objective is the mean over data ranks of the sum over model ranks of each rank's part, plus a term that all model
ranks compute alike. Weights are float64 and start from numbers that depend on their name and their piece.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collective_strategy import Collective, GradientReducer
from collective_strategy.sharing import sharded, shared

WIDTH, STEPS, MAX_NORM = 4, 20, 0.2
NAMES = ("a", "b", "c", "p", "e", "n", "unused")
TWO_OPTIMIZERS = (NAMES[:3], NAMES[3:])
Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """The axes and sizes of the mesh, micro-batches, how activations are kept, which optimizer steps which weights."""

    axes: tuple[tuple[str, int], ...]
    accumulation: int = 1
    checkpointing: str = "none"
    optimizers: tuple[tuple[str, ...], ...] = TWO_OPTIMIZERS

    @property
    def model_axes(self) -> list[str]:
        return [axis for axis, _ in self.axes if axis != "data"]

    @property
    def data_size(self) -> int:
        return dict(self.axes).get("data", 1)

    def model_coordinates(self) -> list[Coordinates]:
        sizes = dict(self.axes)
        return list(itertools.product(*(range(sizes[axis]) for axis in self.model_axes)))

    def piece(self, name: str, model: Coordinates) -> Coordinates:
        """Which piece of a weight a model rank holds: p differs on all, c on all axes but the first."""
        if name == "p":
            return model
        return model[1:] if name == "c" else ()


def layer(name: str, piece: Coordinates) -> nn.Linear:
    """The start of a weight's piece."""
    result = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(hash((sum(map(ord, name)), *piece)) % 2**31)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return result


class Network(nn.Module):
    """a, b: shared by all; c: shared over the first model axis; p: pieces; e, n: computed alike; unused: by nobody."""

    def __init__(self, setting: Setting, model: Coordinates) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, layer(name, setting.piece(name, model)))
        axes = setting.model_axes
        if axes:
            for part in (self.a, self.b, self.unused):
                shared(part, over=axes)
            shared(self.c, over=axes[0])
            sharded(self.p, "*", over=axes[0], dim=0)
            shared(self.e, over=axes, grad="mean")
            shared(self.n, over=axes, grad="none")


def objective(net: Any, x: Tensor, data: int, model: Coordinates, checkpointing: str) -> Tensor:
    """One rank's part: odd ranks use a and b the other way round, the last rank of the first data row leaves b out."""

    def call(part: nn.Linear, value: Tensor) -> Tensor:
        if checkpointing == "none":
            return torch.tanh(part(value))
        reentrant = checkpointing == "reentrant"
        return checkpoint(lambda v: torch.tanh(part(v)), value, use_reentrant=reentrant)

    order = [net.a, net.b] if (data + sum(model)) % 2 == 0 else [net.b, net.a]
    if leaves_out(data, model):
        order.remove(net.b)
    h = x.clone().requires_grad_()
    for part in [*order, net.a]:
        h = call(part, h)
    h = net.c(torch.tanh(net.p(h)))
    return h.square().sum()


def leaves_out(data: int, model: Coordinates) -> bool:
    """Whether this rank does not use b: rank 1 of a data axis alone, else the second model rank of the first row."""
    return (data, sum(model)) == ((0, 1) if model else (1, 0))


def alike(net: Any, whole: Tensor) -> Tensor:
    """What every model rank of a data rank computes alike."""
    return (torch.tanh(net.e(whole)) * net.n(whole)).sum()


def batches(setting: Setting) -> tuple[Tensor, Tensor]:
    """(step, micro-batch, data, model, sample, feature) and the same without model."""
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, setting.accumulation, setting.data_size)
    count = len(setting.model_coordinates())
    x = torch.randn(*shape, count, 2, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(*shape, 2, WIDTH, generator=generator, dtype=torch.float64)


def optimizers(groups: list[list[nn.Parameter]]) -> list[torch.optim.Optimizer]:
    adam = [torch.optim.Adam(group, lr=0.01) for group in groups[1:]]
    return [torch.optim.SGD(groups[0], lr=0.02, momentum=0.9), *adam]


def train_in_one_process(setting: Setting) -> dict[tuple[str, Coordinates], list[Tensor]]:
    """The weights of every piece after training on the joined batch."""
    everyone = setting.model_coordinates()
    layers = {(name, p): layer(name, p) for name in NAMES for p in {setting.piece(name, m) for m in everyone}}
    groups = [[p for k, part in layers.items() if k[0] in g for p in part.parameters()] for g in setting.optimizers]
    x, whole = batches(setting)
    steppers = optimizers(groups)
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro, data in itertools.product(range(setting.accumulation), range(setting.data_size)):
            for k, model in enumerate(everyone):
                net = SimpleNamespace(**{name: layers[name, setting.piece(name, model)] for name in NAMES})
                total = total + objective(net, x[step, micro, data, k], data, model, "none")
            total = total + alike(net, whole[step, micro, data])
        for stepper in steppers:
            stepper.zero_grad()
        (total / (setting.data_size * setting.accumulation)).backward()
        for group, stepper in zip(groups, steppers, strict=True):
            torch.nn.utils.clip_grad_norm_(group, MAX_NORM)
            stepper.step()
    return {key: [p.detach() for p in part.parameters()] for key, part in layers.items()}


def place(collective: Collective, setting: Setting) -> tuple[int, Coordinates, int]:
    """Data rank, coordinates on the model axes, and their number."""
    data = collective.data.rank if collective.mesh is None or setting.data_size > 1 else 0
    model = tuple(collective[axis].rank for axis in setting.model_axes)
    return data, model, setting.model_coordinates().index(model)


def train_on_ranks(collective: Collective, setting: Setting) -> dict[str, Any]:
    """A plain loop; what this rank holds at the end."""
    data, model, k = place(collective, setting)
    net = Network(setting, model).to(collective.device)
    reducer = GradientReducer(net, collective)
    groups = [[p for name in group for p in getattr(net, name).parameters()] for group in setting.optimizers]
    x, whole = batches(setting)
    steppers = optimizers(groups)
    norms = []
    for step in range(STEPS):
        for stepper in steppers:
            stepper.zero_grad()
        for micro in range(setting.accumulation):
            own, common = (batch.to(collective.device) for batch in (x[step, micro, data, k], whole[step, micro, data]))
            loss = objective(net, own, data, model, setting.checkpointing)
            loss = (loss + alike(net, common)) / setting.accumulation
            with reducer.backward(sync=micro == setting.accumulation - 1):
                loss.backward()
        for group, stepper in zip(groups, steppers, strict=True):
            norms.append(reducer.clip_grad_norm_(MAX_NORM, group).item())
            stepper.step()
    reducer.close()
    unused = [p.grad is None for p in net.unused.parameters()]
    return {
        "weights": weights(net, setting, model),
        "norms": norms,
        "unused": unused,
        "statistics": reducer.statistics,
    }


def weights(net: Network, setting: Setting, model: Coordinates) -> dict[tuple[str, Coordinates], list[Tensor]]:
    """What this rank holds, by name and piece."""
    return {(name, setting.piece(name, model)): [p.detach() for p in getattr(net, name).parameters()] for name in NAMES}


def largest_difference(held: Mapping[Any, list[Tensor]], expected: Mapping[Any, list[Tensor]]) -> float:
    return max((a - b).abs().max().item() for key in held for a, b in zip(held[key], expected[key], strict=True))
