"""The states of a process' random number generators, as plain tensors and numbers."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

RandomStates = dict[str, Any]


def random_states(device: torch.device) -> RandomStates:
    """Those of Python, NumPy (if it is loaded), torch's CPU generator and that of ``device``. Local.

    Only types that `torch.load` reads with ``weights_only=True``.
    """
    states: RandomStates = {"python": _listed(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = [str(name), [int(key) for key in keys], *(float(number) for number in rest)]
    module = _device_module(device)
    if module is not None:
        states[device.type] = module.get_rng_state(device)
    return states


def set_random_states(states: RandomStates, device: torch.device) -> None:
    """Puts them back. Local; what is not there stays as it is."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        import numpy as np

        name, values, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.array(values, dtype=np.uint32), int(position), int(has_gauss), cached))
    module = _device_module(device)
    if module is not None and device.type in states:
        module.set_rng_state(states[device.type], device)


def _listed(state: tuple[Any, ...]) -> list[Any]:
    version, keys, gauss = state
    return [version, list(keys), gauss]


def _device_module(device: torch.device) -> Any | None:
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state") else None
