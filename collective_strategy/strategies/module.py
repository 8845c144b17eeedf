"""``self.collective`` in LightningModules and LightningDataModules."""

import logging
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.environment import LaunchEnvironment, read_environment
from collective_strategy.collectives.errors import CollectiveStateError

log = logging.getLogger("collective_strategy")


class CollectiveAttribute:
    """Finds the collective of the Trainer that the object is attached to; nothing is stored on the object.

    So modules stay deep-copyable and picklable. A class or instance that already uses the name keeps it, with one
    warning.
    """

    name = "collective"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        kept = _own_value(instance, self.name)
        return kept[0] if kept else self.find(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        _warn_taken(type(instance))
        instance.__dict__[self.name] = value

    def __delete__(self, instance: Any) -> None:
        instance.__dict__.pop(self.name, None)

    def find(self, instance: Any) -> Collective:
        """The strategy's collective.

        Raises:
            CollectiveStateError: no Trainer yet, or a Trainer with another strategy.
        """
        trainer = _trainer(instance)
        if trainer is None:
            raise CollectiveStateError(
                f"{type(instance).__name__}.collective is not available yet: no Trainer is attached. It exists once"
                " trainer.fit (validate, test, predict) has started and can be used from the hooks setup() and"
                " configure_model() on; move the call there from __init__ or from code before fit."
            )
        found = getattr(trainer.strategy, "collective", None)
        if isinstance(found, Collective):
            return found
        return self.elsewhere(instance, trainer)

    def elsewhere(self, instance: Any, trainer: Any) -> Collective:
        raise CollectiveStateError(
            f"{type(instance).__name__}.collective: the Trainer's strategy is {type(trainer.strategy).__name__}, which"
            " has no collective. Pass strategy='collective' (or CollectiveStrategy(...)), or derive the class from"
            " collective_strategy.CollectiveModule, which works under any strategy."
        )


class PortableCollectiveAttribute(CollectiveAttribute):
    """Also works without our strategy: one process, or the process group that torch.distributed has."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, Collective] = weakref.WeakKeyDictionary()

    def find(self, instance: Any) -> Collective:
        if _trainer(instance) is None:
            return self._without_strategy(instance, None)
        return super().find(instance)

    def elsewhere(self, instance: Any, trainer: Any) -> Collective:
        return self._without_strategy(trainer.strategy, trainer)

    def _without_strategy(self, holder: Any, trainer: Any) -> Collective:
        found = self._found.get(holder)
        if found is None or not found.is_set_up:
            found = self._found[holder] = _adopted(trainer)
        return found


def _adopted(trainer: Any) -> Collective:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        from collective_strategy.collectives.torch_distributed import TorchDistributedCollective

        place = LaunchEnvironment(rank=dist.get_rank(), world_size=dist.get_world_size(), source="torch.distributed")
        device = None if trainer is None else trainer.strategy.root_device
        return TorchDistributedCollective().setup(place, device=device)
    processes = read_environment().world_size if trainer is None else trainer.world_size
    if processes > 1:
        raise CollectiveStateError(
            f"collective: there are {processes} processes, but torch.distributed is not initialised, so nothing"
            " connects them. It can be used from the hook setup() on; for backends other than torch.distributed, use"
            " CollectiveStrategy."
        )
    from collective_strategy.collectives.single import SingleProcessCollective

    return SingleProcessCollective().setup(LaunchEnvironment())


class CollectiveModule:
    """Mixin that declares ``self.collective`` for editors and type checkers, under any strategy.

    With our strategy it is the strategy's collective. Without it: the one-process collective in one process, else
    the process group that torch.distributed has; then the first access makes the connection and must happen on all
    ranks. It never answers for one rank alone when there are several.

    Example::

        class Net(CollectiveModule, L.LightningModule):
            def training_step(self, batch, batch_idx):
                z = self.collective.data.all_gather(self(batch))
    """

    if TYPE_CHECKING:

        @property
        def collective(self) -> Collective: ...

    else:
        collective = PortableCollectiveAttribute()


def install(*classes: Any) -> None:
    """Gives Lightning's classes the attribute. A subclass that defines the name keeps its own."""
    for base in classes:
        if not isinstance(base.__dict__.get(CollectiveAttribute.name), CollectiveAttribute):
            setattr(base, CollectiveAttribute.name, CollectiveAttribute())


def warn_if_taken(instance: Any) -> None:
    """One warning when a class defines ``collective`` itself, so that nobody looks for ours there."""
    found = getattr(type(instance), CollectiveAttribute.name, None)
    if not isinstance(found, CollectiveAttribute) or _own_value(instance, CollectiveAttribute.name):
        _warn_taken(type(instance))


_WARNED = "_collective_name_warned"


def _warn_taken(owner: type) -> None:
    if _WARNED in owner.__dict__:
        return
    setattr(owner, _WARNED, True)
    log.warning(
        "%s uses the attribute name 'collective' for something of its own, which it keeps. The strategy's collective is"
        " self.trainer.strategy.collective.",
        owner.__name__,
    )


def _own_value(instance: Any, name: str) -> tuple[Any] | None:
    """What the instance itself stores under the name; torch keeps modules, parameters and buffers in dicts."""
    for place in ("__dict__", "_modules", "_parameters", "_buffers"):
        values = instance.__dict__ if place == "__dict__" else instance.__dict__.get(place, {})
        if name in values:
            if isinstance(instance, nn.Module) and place != "__dict__":
                _warn_taken(type(instance))
            return (values[name],)
    return None


def _trainer(instance: Any) -> Any:
    # LightningModule.trainer raises when there is none
    return instance.__dict__.get("_trainer") or instance.__dict__.get("trainer")
