"""Small models on real ranks: values that all ranks agree on, and errors that all ranks raise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from collective_strategy.testing import run_ranks

MODEL_2 = {"data": 1, "model": 2}
MESH_2X2 = {"data": 2, "model": 2}


def per_rank(n: int, function: Callable[..., Any], **options: Any) -> list[Any]:
    """Every rank's result."""
    return [outcome.result() for outcome in run_ranks(n, on_its_device(function), **{"timeout": 30, **options})]


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in which tensors are made on the collective's device."""

    def run(collective: Any, *args: Any) -> Any:
        with torch.device(collective.device):
            return function(collective, *args)

    return run


def common(n: int, function: Callable[..., Any], **options: Any) -> Any:
    """The result, which is equal on all ranks."""
    results = per_rank(n, function, **options)
    assert all(result == results[0] for result in results), results
    return results[0]


def errors(n: int, function: Callable[..., Any], **options: Any) -> list[BaseException]:
    """Every rank's error."""
    outcomes = run_ranks(n, on_its_device(function), **{"timeout": 15, "fresh": True, **options})
    assert all(outcome.error is not None for outcome in outcomes), [outcome.value for outcome in outcomes]
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def weights(*values: float, dtype: torch.dtype = torch.float64) -> nn.ParameterList:
    """Scalar parameters."""
    return nn.ParameterList([nn.Parameter(torch.tensor(value, dtype=dtype)) for value in values])


def filled(*layers: nn.Module, value: float = 1.0) -> nn.ModuleList:
    """Layers whose weights are all ``value``."""
    module = nn.ModuleList(layers)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def drawn(module: nn.Module, seed: int) -> Any:
    """With weights that depend on the seed only, whatever the device and whoever else draws random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            numbers = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator, device="cpu")
            parameter.copy_(numbers / 2)
    return module
