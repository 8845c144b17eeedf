"""The states of a process' random number generators, as plain tensors and numbers."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.random_numbers import CPUGenerator

RandomStates = dict[str, Any]


def random_states(collective: Collective) -> RandomStates:
    """Those of Python, NumPy (if it is loaded), torch's CPU generator and that of the collective's device. Local.

    Only types that `torch.load` reads with ``weights_only=True``.
    """
    version, keys, gauss = random.getstate()
    states: RandomStates = {"python": [version, list(keys), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = [str(name), [int(word) for word in words], *(float(number) for number in rest)]
    states["device"] = [_on_cpu(generator.state()) for generator in _of_device(collective)]
    return states


def set_random_states(states: RandomStates, collective: Collective) -> None:
    """Puts them back. Local; what is not there stays as it is."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        import numpy as np

        name, words, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.array(words, dtype=np.uint32), int(position), int(has_gauss), cached))
    for generator, state in zip(_of_device(collective), states["device"], strict=False):
        generator.restore(state)


def _of_device(collective: Collective) -> list[Any]:
    return [generator for generator in collective._generators() if not isinstance(generator, CPUGenerator)]


def _on_cpu(state: Any) -> Any:
    return state.cpu() if isinstance(state, Tensor) else state
