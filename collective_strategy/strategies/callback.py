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
        self._strategy.seed_data_ranks()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._strategy.seed_data_ranks()
        # Lightning calls the strategy after the module's own hook
        self._strategy.sync_buffers("the start of validation")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.seed_data_ranks()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.seed_data_ranks()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._strategy.sync_buffers_each_step()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.announce_epoch(trainer)
