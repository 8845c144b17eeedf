"""Runs something and puts everything back: weights, buffers, gradients, attributes, random states. Local."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_DEPTH = 4


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """What happens inside leaves no trace on the module and on random numbers.

    Put back are the module's parameters, buffers, gradients, ``requires_grad``, training mode and plain attributes,
    and those of its submodules (tensors, and lists, dicts, sets and deques of anything, some levels deep), and the
    random states of torch (all devices in use), Python and numpy. Hooks that follow the accumulation of gradients are
    set aside, so that a reducer or an optimizer inside backward neither acts nor complains.

    Raises:
        RuntimeError: an optimizer was stepped inside, whose state could not be put back.
    """
    with ExitStack() as undo:
        hook = register_optimizer_step_pre_hook(_refuse_step)
        undo.callback(hook.remove)
        for restore in _kept_random_states():
            undo.callback(restore)
        for part in module.modules():
            for attribute in part.__dict__.values():
                _keep(attribute, undo, _DEPTH)
            undo.callback(_rebinder(part.__dict__))
        for parameter in module.parameters():
            _keep_parameter(parameter, undo)
        yield


def _keep_parameter(parameter: nn.Parameter, undo: ExitStack) -> None:
    """Its values, by what is kept of the module's table of parameters; its gradient, hooks and ``requires_grad``."""
    gradient, hooks, trainable = parameter.grad, parameter._post_accumulate_grad_hooks, parameter.requires_grad

    def restore() -> None:
        parameter.grad = gradient
        parameter._post_accumulate_grad_hooks = OrderedDict() if hooks is None else hooks
        parameter.requires_grad_(trainable)

    undo.callback(restore)
    parameter.grad = None
    parameter._post_accumulate_grad_hooks = OrderedDict()


def _keep(value: Any, undo: ExitStack, depth: int) -> None:
    """Remembers a tensor's values, or a container's entries."""
    if isinstance(value, Tensor):
        if not value.is_meta and value.layout is torch.strided:
            undo.callback(_tensor_writer(value, value.detach().clone()))
    elif depth and isinstance(value, (list, dict, set, deque)) and not isinstance(value, nn.Module):
        undo.callback(_rebinder(value))
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            _keep(item, undo, depth - 1)
    elif depth and isinstance(value, tuple):
        for item in value:
            _keep(item, undo, depth - 1)


def _tensor_writer(tensor: Tensor, before: Tensor) -> Callable[[], None]:
    def restore() -> None:
        # not by its version, which writing to .data does not change; and not always, as a graph may hold the tensor
        if not torch.equal(tensor.detach(), before):
            with torch.no_grad():
                tensor.copy_(before)

    return restore


def _rebinder(container: Any) -> Callable[[], None]:
    before = type(container)(container) if isinstance(container, (list, set)) else container.copy()

    def restore() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)

    return restore


def _kept_random_states() -> list[Callable[[], None]]:
    python, generator = random.getstate(), torch.get_rng_state()
    restorers: list[Callable[[], None]] = [lambda: random.setstate(python), lambda: torch.set_rng_state(generator)]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        restorers.append(lambda: numpy.random.set_state(state))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
        restorers.append(lambda: torch.cuda.set_rng_state_all(cuda))
    return restorers


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{type(optimizer).__name__}.step() was called inside an audit, which looks at gradients and must not change "
        "weights. Let the step function run forward, and return the loss (or run backward), without a step."
    )
