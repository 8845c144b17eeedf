"""The strategy's behaviour, written once for both Lightning packages."""

import atexit
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collective_strategy.collectives.checks import CheckMode
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.layout import NO_DEFAULT
from collective_strategy.collectives.registry import automatic_backend, collective_class
from collective_strategy.gradients.inventory import Communicators, Inventory
from collective_strategy.gradients.plan import BucketSizes
from collective_strategy.gradients.reducer import GradientReducer
from collective_strategy.gradients.replicas import agree_on_buffers, broadcast_replicas
from collective_strategy.sharing.marks import record_marks, restore_marks
from collective_strategy.sharing.roles import UnmarkedPolicy
from collective_strategy.strategies.batches import BatchBehaviour, BatchPolicy
from collective_strategy.strategies.checkpoints import CheckpointBehaviour
from collective_strategy.strategies.dataloaders import DataloaderPreparation
from collective_strategy.strategies.environments import launch_environment
from collective_strategy.strategies.inspection import InspectionBehaviour
from collective_strategy.strategies.metrics import MetricConnection
from collective_strategy.strategies.module import warn_if_taken
from collective_strategy.strategies.precision import PrecisionConnection
from collective_strategy.strategies.replication import BufferPolicy, RandomNumbers, ReplicationBehaviour

log = logging.getLogger("collective_strategy")


class CollectiveStrategyBehaviour(InspectionBehaviour, ReplicationBehaviour, BatchBehaviour, CheckpointBehaviour):
    """Data-parallel training over a :class:`Collective`, which modules reach as ``self.collective``.

    Cheap to construct and picklable; nothing is opened before ``setup_environment``. There is no wrapper around the
    module. Weights are those of the first data rank at set-up, gradients are averaged over the data axis after every
    backward; ``buffers`` says what becomes of buffers, ``random_numbers`` which ranks draw the same numbers.

    Args:
        collective: the backend's name (``"torch"``, ``"horovod"``, ``"single"``, or one that was registered),
            ``"auto"`` (the one that the environment variable COLLECTIVE_STRATEGY_BACKEND names, else Horovod under
            Horovod's launchers, else torch), or a :class:`Collective`, which then has all of the following settings.
        mesh, unions, data_axis: the layout of the ranks, see :class:`Collective`.
        timeout: seconds or timedelta for set-up and every operation; 30 minutes if not given.
        check: compare the ranks' calls before data moves; ``"auto"`` means on up to 16 ranks.
        start_method: how ``Trainer(devices=n)`` starts the processes when no launcher did: the script again
            (``"popen"``), or ``"spawn"``, ``"fork"``, ``"forkserver"`` for notebooks.
        unmarked: what a weight without a mark (see `collective_strategy.shared`) is on the model axes: ``"private"``,
            ``"shared"`` or ``"error"``.
        buffers: what copies of a buffer (over the data axis, and the axes it is marked shared over) become at the
            start of evaluation and in checkpoints: ``"first"``, the first rank's; ``"mean"``, the mean of floating
            ones; ``"first_each_step"``, the first rank's, before every training batch too, as with DDP; ``"own"``,
            each rank keeps its own after set-up.
        random_numbers: ``"by_data_rank"``: when training starts, ranks are seeded so that random numbers (dropout,
            augmentation) differ over the data axis and are equal over the model axes, see `seed_ranks`;
            ``"as_they_are"``: ranks that were seeded alike draw alike, as with DDP; ``"auto"``: the former with a mesh,
            the latter without.
        batches: ranks that hold one model together must get the same batches. ``"check"``: the first ones are compared,
            and a difference is an error that names it; ``"broadcast"``: the first model rank sends its batches to the
            others; ``"different"``: each model rank reads its own part on purpose.
        bucket_sizes, reduce_dtype, compression, static_graph: how gradients are reduced, see :class:`GradientReducer`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in any strategy.
        **backend_options: for the backend's constructor, e.g. ``backend="gloo"``.

    Example::

        Trainer(devices=2, strategy=CollectiveStrategy(timeout=60))
        Trainer(devices=2, strategy="collective")
    """

    callback_class: ClassVar[Any]
    by_backend: ClassVar[dict[str, Any]] = {}  # the class for a backend that needs more

    def __new__(cls, collective: str | Collective = "auto", **settings: Any) -> Any:
        name = collective if isinstance(collective, str) else getattr(collective, "backend_name", "")
        known = cls.__dict__.get("by_backend", {})
        return super().__new__(known.get(automatic_backend() if name == "auto" else name, cls))

    def __init__(
        self,
        collective: str | Collective = "auto",
        *,
        mesh: Mapping[str, int] | None = None,
        unions: Mapping[str, Sequence[str]] | None = None,
        data_axis: str | None = NO_DEFAULT,
        timeout: timedelta | float | None = None,
        check: CheckMode = "auto",
        start_method: str = "popen",
        unmarked: UnmarkedPolicy = "private",
        buffers: BufferPolicy = "first",
        random_numbers: RandomNumbers = "auto",
        batches: BatchPolicy = "check",
        bucket_sizes: BucketSizes | None = None,
        reduce_dtype: torch.dtype | None = None,
        compression: torch.dtype | None = None,
        static_graph: bool = False,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        **backend_options: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "mesh": mesh,
            "unions": unions,
            "data_axis": data_axis,
            "timeout": timeout,
            "check": check,
        }
        self.collective = _make_collective(collective, settings, backend_options)
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method={start_method!r} is none of 'popen', 'spawn', 'fork', 'forkserver'.")
        self._start_method = start_method
        self._num_nodes = 1
        self._unmarked: UnmarkedPolicy = unmarked
        self._choose_replication(buffers, random_numbers)
        self._choose_batches(batches)
        self._reducer_settings: dict[str, Any] = {
            "sizes": bucket_sizes,
            "reduce_dtype": reduce_dtype,
            "compression": compression,
            "static_graph": static_graph,
        }
        self._communicators: Communicators | None = None
        self._precision_connection: PrecisionConnection | None = None
        self._reducer: GradientReducer | None = None
        self._metrics: MetricConnection | None = None
        self._preparation: DataloaderPreparation | None = None
        self._opened_here = False
        self._cluster_environment: Any | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def __repr__(self) -> str:
        """Lightning shows it when it refuses a strategy, which it does when it is the other Lightning package."""
        place = "" if self.names.pytorch == "lightning.pytorch" else ".pytorch_lightning"
        package = self.names.pytorch.partition(".")[0]
        return (
            f"<collective_strategy{place}.CollectiveStrategy ({self.collective.backend_name}), for Trainers of the"
            f" package '{package}'>"
        )

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Opens the collective, so that the module's ``setup`` and ``configure_model`` can use it."""
        self._stopped, self._told = None, False
        super().setup_environment()
        # as DDP does: every rank starts from the same random numbers
        self.names.reset_seed()
        self.set_world_ranks()
        if not self.collective.is_set_up:
            place = launch_environment(self.cluster_environment, self.num_processes)
            self.collective.setup(place, device=self.root_device)
            self._communicators = None
            self._opened_here = True
            atexit.register(self.collective.teardown)
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        if trainer is not None:
            self._attach(trainer)

    def _attach(self, trainer: Any) -> None:
        trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, self.callback_class)]
        trainer.callbacks.insert(0, self.callback_class(self))
        self._preparation = DataloaderPreparation(self.names, trainer, self.collective, self.before_training_data)
        trainer._data_connector._prepare_dataloader = self._preparation
        self._start_comparing()
        for user in (trainer.lightning_module, trainer.datamodule):
            if user is not None:
                warn_if_taken(user)

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == self.names.TrainerFn.FITTING
        marks = record_marks(self.model)
        if fitting:
            self.model = self._synchronise_layers(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        restore_marks(self.model, marks)
        self._communicators = communicators = self._communicators or Communicators(self.collective)
        # the ranks compare their models before anything of them is sent
        if fitting:
            self._reducer = GradientReducer(
                self.model,
                self.collective,
                unmarked=self._unmarked,
                communicators=communicators,
                **self._reducer_settings,
            )
            self._precision_connection = PrecisionConnection(self.precision_plugin, self._reducer)
        else:
            Inventory(self.model, communicators, self._unmarked).agree(communicators)
        agree_on_buffers(self.model, communicators)
        if not fitting:
            self.sync_buffers("set-up")  # those that training left
        broadcast_replicas(self.model, communicators, self._unmarked)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self.names.optimizers_to_device(self.optimizers, self.root_device)
        self._metrics = MetricConnection(self.model, self.collective.data)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _synchronise_layers(self, model: nn.Module) -> nn.Module:
        """Applies ``Trainer(sync_batchnorm=True)``, or says why it cannot be."""
        synchronised = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        wanted = bool(synchronised) or (self._layer_sync is not None and bool(norms))
        if not wanted:
            return model
        refusal = None
        if self.root_device.type == "cpu":
            refusal = "torch.nn.SyncBatchNorm does not run on CPU"
        elif self.collective.backend_name != "torch":
            refusal = f"torch.nn.SyncBatchNorm does not work with the backend {self.collective.backend_name!r}"
        elif self.collective.data.world_size != self.collective.world_size:
            refusal = "torch.nn.SyncBatchNorm would average over the model axis too"
        if refusal is not None:
            raise self.names.MisconfigurationException(
                f"Synchronised batch norm is not possible here: {refusal} (device {self.root_device}). Set"
                " sync_batchnorm=False and use plain BatchNorm, or a norm without batch statistics such as GroupNorm."
            )
        return model if self._layer_sync is None else self._layer_sync.apply(model)

    # -- training --------------------------------------------------------------------------------------------------

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, then the reduction, then the precision plugin's end, so that hooks see reduced gradients."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._reducer.backward() if self._reducer is not None else nullcontext():
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients local until the next backward outside."""
        with self._reducer.no_sync() if self._reducer is not None else nullcontext():
            yield

    def reduce_gradients(self) -> None:
        """Averages now what is not averaged yet: the way out for a module that calls ``loss.backward()`` itself.

        Called by every rank, between the backward and the optimizer's step.
        """
        if self._reducer is None:
            raise RuntimeError("reduce_gradients() works during trainer.fit only; no gradients are looked after now.")
        self._reducer.reduce_gradients()

    def announce_epoch(self, trainer: Any) -> None:
        loader = trainer.fit_loop._combined_loader
        if self._preparation is not None and loader is not None:
            for dataloader in loader.flattened:
                self._preparation.announce_epoch(dataloader, trainer.fit_loop.epoch_progress.current.processed)

    # -- the end ---------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Leaves the collective; the other ranks are told, or notice when this process lets go of its connections."""
        if self._stopped is not None and self._stopped.startswith("rank"):
            return
        reason = f"rank {self.global_rank} raised {type(exception).__name__}: {exception}".rstrip(": ")
        if self.world_size > 1:
            # before the others hear of it and fail in turn, so that the cause is the first thing to read
            print(f"collective_strategy: {reason}", file=sys.stderr, flush=True)
        self.stop_communicating(reason)
        self._stopped = reason
        launcher: Any = self._launcher
        if hasattr(launcher, "failed"):
            launcher.failed = True

    def teardown(self) -> None:
        """Takes everything back; communicates nothing, works half set up.

        With several ranks the connection stays open for the next run of this process, and for what a script does
        after fit; it is closed after an error and when the process ends.
        """
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        if self._precision_connection is not None:
            self._precision_connection.close()
            self._precision_connection = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        module = self.lightning_module
        trainer = module.__dict__.get("_trainer") if module is not None else None
        if trainer is not None:
            trainer._data_connector.__dict__.pop("_prepare_dataloader", None)
            if trainer.state.fn == self.names.TrainerFn.FITTING and self._layer_sync and self.model is not None:
                self.model = self._layer_sync.revert(self.model)
        self._preparation = self._batches = self._resumed = self._whole = None
        interrupted = self._stopped is not None or self.collective.broken is not None
        if self._opened_here and (interrupted or self.collective.world_size == 1):
            self.collective.teardown()
            atexit.unregister(self.collective.teardown)
            self._opened_here, self._communicators = False, None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        live = (
            "_reducer",
            "_metrics",
            "_preparation",
            "_batches",
            "_resumed",
            "_whole",
            "_communicators",
            "_precision_connection",
        )
        return state | dict.fromkeys(live) | {"_opened_here": False}


def _make_collective(
    collective: str | Collective, settings: dict[str, Any], backend_options: dict[str, Any]
) -> Collective:
    if isinstance(collective, Collective):
        defaults = {"mesh": None, "unions": None, "data_axis": NO_DEFAULT, "timeout": None, "check": "auto"}
        given = [name for name, value in settings.items() if value != defaults[name]] + list(backend_options)
        if given:
            raise ValueError(
                f"CollectiveStrategy got a {type(collective).__name__} and also {', '.join(given)}. Give these to the"
                " collective's constructor."
            )
        return collective
    if not isinstance(collective, str):
        raise TypeError(f"collective must be a backend's name or a Collective, got {collective!r}.")
    make: Callable[..., Collective] = collective_class(automatic_backend() if collective == "auto" else collective)
    return make(**settings, **backend_options)
