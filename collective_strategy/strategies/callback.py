"""The strategy's place among the Trainer's callbacks: events that Lightning tells callbacks earlier, or only them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback

    from collective_strategy.strategies.strategy import CollectiveStrategyBehaviour
else:
    _Callback = object


class StrategyCallbackBehaviour(_Callback):
    """First in the list, so that the strategy acts before the callbacks and hooks of the user see the event."""

    def __init__(self, strategy: "CollectiveStrategyBehaviour") -> None:
        self._strategy = strategy

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # before ModelCheckpoint(save_on_exception=True) saves, which ends in a barrier
        self._strategy.on_exception(exception)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.before_train_start()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning calls the strategy after the module's own hook
        self._strategy.sync_buffers("the start of validation")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.announce_epoch(trainer)
