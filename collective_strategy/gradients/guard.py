"""Notices gradients that are not reduced, and refuses to step with them."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.gradients.inventory import Inventory

_WAY_OUT = (
    "In a LightningModule call self.manual_backward(loss) instead of loss.backward(), or strategy.reduce_gradients()"
    " between the backward and the step; in a plain loop run it inside reducer.backward(), or call"
    " reducer.reduce_gradients()."
)


class StepGuard:
    """Watches the parameters whose gradients are reduced. Local; the reducer tells it when a backward is expected.

    Args:
        inventory: the parameters.
        collective: all ranks, for messages.

    Attributes:
        armed: a backward is running in the reducer's context.
        fired: parameters that got a gradient since `arm`, or since `dirty` was asked for, by index, in their order.
        pending: indices of parameters whose gradient is only local, from backwards without synchronisation.
    """

    def __init__(self, inventory: Inventory, collective: Collective) -> None:
        self.armed = False
        self.fired: dict[int, Tensor] = {}
        self.pending: set[int] = set()
        self._dirty: set[int] = set()
        self._inventory, self._collective = inventory, collective
        self._hooks: dict[int, RemovableHandle] = {}
        self._step_hook: RemovableHandle | None = None
        self.hook_parameters()
        weakref.finalize(self, _remove, self._hooks, self.fired).atexit = False
        # a global hook, so that optimizers nobody registered with us are seen as well
        self._step_hook = register_optimizer_step_pre_hook(_weakly(self, "_before_step"))

    @property
    def dirty(self) -> set[int]:
        """Indices of parameters that got a gradient while not armed."""
        if not self.armed and self.fired:
            self._dirty.update(self.fired)
            self.fired.clear()
        return self._dirty

    def arm(self) -> None:
        """A backward begins in the reducer's context."""
        _ = self.dirty  # what fired until now is no part of it
        self.armed = True

    def disarm(self) -> None:
        """It is over."""
        self.fired.clear()
        self.armed = False

    def hook_parameters(self) -> None:
        """Hooks the parameters that became trainable; torch refuses hooks on frozen ones."""
        for i in self._inventory.routed:
            parameter = self._inventory.parameters[i]
            if i not in self._hooks and parameter.requires_grad:
                # without a line of Python, because it runs for every parameter in every backward; not our method, so
                # that it does not keep us alive
                hook = functools.partial(self.fired.__setitem__, i)
                self._hooks[i] = parameter.register_post_accumulate_grad_hook(hook)

    def watch(self, inventory: Inventory) -> None:
        """Follows another inventory; the old one's hooks carry its indices."""
        _ = self.dirty
        _remove(self._hooks, self.fired)
        self._inventory = inventory
        self.hook_parameters()

    def keep(self, indices: Iterable[int]) -> None:
        """The other parameters' gradients were dropped, and with them the reason for a complaint."""
        if self.dirty or self.pending:
            kept = set(indices)
            self._dirty &= kept
            self.pending &= kept

    def clear(self) -> None:
        """Everything is reduced."""
        self.dirty.clear()
        self.pending.clear()

    def close(self) -> None:
        """Removes all hooks. Idempotent."""
        _remove(self._hooks, self.fired)
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def dirty_message(self, ranks: int | None = None) -> str:
        """What to say about a backward outside; ``ranks`` where only others had one."""
        names = [self._inventory.names[i] for i in sorted(self.dirty)]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        where = f"of {shown} on rank {self._collective.global_rank}" if names else f"on {ranks} other rank(s)"
        return (
            f"A backward pass ran outside the strategy, so the gradients {where} were not averaged over the"
            f" {self._collective.world_size} ranks, and their weights would drift apart. {_WAY_OUT}"
        )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        def checked(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = closure()
                self._refuse_step(optimizer)
                return result

            return run

        # With a closure the backward runs inside step(): before it, local gradients of earlier micro-batches are
        # right, so the check comes after it. `args` starts with the optimizer.
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": checked(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], checked(args[1]), *args[2:]), kwargs
        self._refuse_step(optimizer)
        return None

    def _refuse_step(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.refuse_unreduced(f"{type(optimizer).__name__}.step()", parameters)

    def refuse_unreduced(self, what: str, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses to use gradients that are not reduced.

        Raises:
            CollectiveError: naming a parameter and what to do.
        """
        if self.dirty or self.pending:
            for parameter in parameters:
                i = self._inventory.index.get(id(parameter))
                if i is None or parameter.grad is None:
                    continue
                if i in self.dirty:
                    raise CollectiveError(self.dirty_message())
                if i in self.pending and bool(parameter.grad.any()):
                    raise CollectiveError(
                        f"{what} would use gradients of {self._inventory.names[i]} that were"
                        f" never averaged over the {self._collective.world_size} ranks: all backwards since the last"
                        " reduction ran with synchronisation off, so the ranks' weights would drift apart. Run the last"
                        " backward before the step with synchronisation on, or call strategy.reduce_gradients()."
                    )


def _remove(hooks: dict[int, RemovableHandle], fired: dict[int, Tensor]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
    fired.clear()


def _weakly(owner: object, method: str, *bound: Any) -> Callable[..., Any]:
    """A hook that neither keeps its owner alive nor fires after it is gone."""
    reference = weakref.ref(owner)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else getattr(alive, method)(*bound, *args)

    return hook
