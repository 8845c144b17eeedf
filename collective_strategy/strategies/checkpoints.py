"""Checkpoints that are either complete or not there: files without a model axis, directories with one."""

import logging
from typing import TYPE_CHECKING, Any

from collective_strategy.checkpoints import (
    CheckpointError,
    is_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from collective_strategy.checkpoints.folders import is_remote
from collective_strategy.checkpoints.layout import ModelAxes
from collective_strategy.checkpoints.loading import saved_random_states
from collective_strategy.checkpoints.optimizers import names_by_id, parameter_names, plain, refuse_other_parameters
from collective_strategy.checkpoints.random_state import RandomStates, random_states, set_random_states
from collective_strategy.checkpoints.saving import PARAMETERS
from collective_strategy.checkpoints.storage import replacing
from collective_strategy.checkpoints.whole_files import WholeCheckpoint
from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.roles import UnmarkedPolicy
from collective_strategy.strategies.construction import ConstructionBehaviour

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO as _TorchCheckpointIO
else:
    _TorchCheckpointIO = object

log = logging.getLogger("collective_strategy")
RANDOM_STATES = "collective_strategy.random_states"


class AtomicCheckpointBehaviour(_TorchCheckpointIO):
    """Lightning's own checkpoint file, written beside its place and then renamed.

    A process that dies while writing leaves the previous file whole. Remote paths (``s3://...``) are left to
    Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(str(path)) as temporary:
            super().save_checkpoint(checkpoint, temporary, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if is_checkpoint(path):
            raise CheckpointError(
                f"{path} is a checkpoint directory of several model ranks, which no single process reads like a file."
                " Give it to trainer.fit(ckpt_path=...) with CollectiveStrategy, or make one file of it: python -m"
                f" collective_strategy.checkpoints consolidate {path} OUT."
            )
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        if is_checkpoint(path):
            remove_checkpoint(path)
        else:
            super().remove_checkpoint(path)


class CheckpointBehaviour(ConstructionBehaviour):
    """What the Trainer's ``save_checkpoint``, ``ckpt_path=`` and ModelCheckpoint do over a mesh."""

    _unmarked: UnmarkedPolicy
    _resumed: "ResumedRandomness | None" = None
    _whole: WholeCheckpoint | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """One ordinary file by rank 0, or with a model axis of more than one rank a directory by all."""
        if not self._model_axes.sizes:
            if self.collective.mesh is not None:  # without one the file has Lightning's own keys only
                checkpoint = {**checkpoint, RANDOM_STATES: self._all_random_states()}
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "save_checkpoint(storage_options=...) is not possible with model-parallel ranks, whose checkpoints do"
                " not go through the CheckpointIO. Leave it out; fsspec reads its settings from its own files."
            )
        self._refuse_other_io()
        # after an error on some rank nobody can have all pieces
        if self._can_communicate(f"the checkpoint {filepath}"):
            module = self.lightning_module
            assert module is not None
            save_checkpoint(
                str(filepath),
                checkpoint,
                module,
                self.collective,
                optimizers=self.optimizers,
                unmarked=self._unmarked,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What this rank holds of the checkpoint; the mesh may be another one than when it was saved."""
        directory = is_checkpoint(checkpoint_path)
        if self._model_axes.sizes:
            directory = self.collective.broadcast_object(directory)
        module = self.lightning_module
        assert module is not None
        if not directory:
            whole = super().load_checkpoint(checkpoint_path, weights_only)
            self._go_on_from(whole.pop(RANDOM_STATES, None), module.trainer)
            if self._model_axes.sizes:
                self._whole = WholeCheckpoint(
                    str(checkpoint_path), module, self.collective, self._unmarked, module.strict_loading
                )
                whole["state_dict"] = self._whole.state_dict(whole["state_dict"])
            return whole
        self._whole = None
        fitting = module.trainer.state.fn == self.names.TrainerFn.FITTING
        checkpoint = load_checkpoint(
            str(checkpoint_path),
            module,
            self.collective,
            unmarked=self._unmarked,
            optimizers=fitting,
            strict=module.strict_loading,
            weights_only=weights_only,
        )
        if fitting:
            states = saved_random_states(str(checkpoint_path), self.collective)
            if states is None:
                self.names.rank_zero_info(
                    f"{checkpoint_path} was saved on another mesh, so the states of the random number generators are"
                    " not restored: what is drawn from now on differs from a run that was not interrupted."
                )
            else:
                self._resumed = ResumedRandomness(states, self.collective)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        module = self.lightning_module
        assert module is not None
        for k, (names, optimizer) in enumerate(zip(checkpoint.get(PARAMETERS, ()), self.optimizers, strict=False)):
            refuse_other_parameters(names, optimizer, module, k)
        if self._whole is not None:
            names = names_by_id(module)
            states = zip(checkpoint["optimizer_states"], self.optimizers, strict=False)
            cut = [self._whole.optimizer_state(s, parameter_names(plain(o), names)) for s, o in states]
            checkpoint = {**checkpoint, "optimizer_states": cut}
        super().load_optimizer_state_dict(checkpoint)

    # -- random numbers ------------------------------------------------------------------------------------------------

    def _all_random_states(self) -> dict[str, Any]:
        """Those of all ranks on rank 0. After an error on some rank, or before set-up, none."""
        mesh = self._mesh_as_saved()
        if self.collective.world_size == 1:
            return {"mesh": mesh, "ranks": [random_states(self.collective)]}
        if not self._can_communicate("gathering random states for a checkpoint"):
            return {"mesh": mesh, "ranks": []}
        # a rank that is missing here is told what the others are at
        self.collective.barrier("save_checkpoint")
        return {"mesh": mesh, "ranks": self.collective.gather_object(random_states(self.collective))}

    def _mesh_as_saved(self) -> list[list[Any]]:
        mesh = self.collective.mesh
        return [] if mesh is None else [[axis, size] for axis, size in mesh.axes.items()]

    def _go_on_from(self, states: dict[str, Any] | None, trainer: Any) -> None:
        mesh = self._mesh_as_saved()
        fitting = trainer.state.fn == self.names.TrainerFn.FITTING
        if fitting and states is not None and states["mesh"] == mesh and states["ranks"]:
            self._resumed = ResumedRandomness(states["ranks"][self.collective.rank], self.collective)

    def before_training_data(self) -> None:
        """The moment before the training data's iterator is made, which draws the workers' seed."""
        if self._resumed is not None:
            self._resumed.restore()

    def before_train_start(self) -> None:
        """The moment before the user's ``on_train_start`` hooks, which the uninterrupted run did not come by again."""
        if self._resumed is not None:
            self._resumed.note()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._resumed is not None:
            module = self.lightning_module
            assert module is not None
            progress = module.trainer.fit_loop.epoch_loop.batch_progress
            amid_epoch = progress.current.ready > 0 and not progress.is_last_batch
            self._resumed.go_on(amid_epoch)
            self._resumed = None

    # -- which kind of checkpoint --------------------------------------------------------------------------------------

    @property
    def _model_axes(self) -> ModelAxes:
        if not self.collective.is_set_up:
            return ModelAxes.one()
        return ModelAxes.of(self.collective, Communicators(self.collective))

    def _refuse_other_io(self) -> None:
        io = self.checkpoint_io
        while isinstance(io, self.names.WrappingCheckpointIO):
            io = io.checkpoint_io
        if io is not None and not isinstance(io, self.checkpoint_io_class):
            ranks = len(self._model_axes.writers)
            raise self.names.MisconfigurationException(
                f"The CheckpointIO {type(io).__name__} writes one file from one process, but the {ranks} model"
                " ranks hold different pieces, which this strategy writes itself. Leave checkpoint_io out, or make"
                " one file of a checkpoint afterwards with collective_strategy.consolidate()."
            )


class ResumedRandomness:
    """Puts the random number generators where they were when the checkpoint was saved.

    Between loading and the first batch Lightning and the user's hooks draw numbers that the uninterrupted run did not
    draw there, or drew earlier. So the states are set more than once: before the training data's iterator is made,
    which draws the seed of its workers as at the start of every epoch, and again before the first batch. Amid an epoch
    the uninterrupted run had its iterator already.
    """

    def __init__(self, states: RandomStates, collective: Collective) -> None:
        self._saved = self._after_iterator = states
        self._collective = collective

    def restore(self) -> None:
        set_random_states(self._saved, self._collective)

    def note(self) -> None:
        self._after_iterator = random_states(self._collective)

    def go_on(self, amid_epoch: bool) -> None:
        set_random_states(self._saved if amid_epoch else self._after_iterator, self._collective)
