"""The strategy for the package ``pytorch_lightning`` (``import pytorch_lightning``)."""

from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.accelerators import CPUAccelerator, XLAAccelerator
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import ParallelStrategy, XLAStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from collective_strategy.strategies.callback import StrategyCallbackBehaviour
from collective_strategy.strategies.checkpoints import AtomicCheckpointBehaviour
from collective_strategy.strategies.environments import (
    LaunchedEnvironmentBehaviour,
    ScriptEnvironmentBehaviour,
    SlurmEnvironmentBehaviour,
)
from collective_strategy.strategies.inspection_callbacks import (
    AuditSharingBehaviour,
    ExplainSharingBehaviour,
    VerifyReplicasBehaviour,
)
from collective_strategy.strategies.launchers import ProcessLauncherBehaviour, ScriptLauncherBehaviour
from collective_strategy.strategies.module import CollectiveModule, install
from collective_strategy.strategies.names import LightningNames
from collective_strategy.strategies.registration import register
from collective_strategy.strategies.strategy import CollectiveStrategyBehaviour
from collective_strategy.strategies.xla import (
    ChipLauncherBehaviour,
    XLADevicesAccelerator,
    XLAEnvironmentBehaviour,
    XLAStrategyBehaviour,
)

NAMES = LightningNames.load("pytorch_lightning", "lightning_fabric")


class LaunchedEnvironment(LaunchedEnvironmentBehaviour, LightningEnvironment):
    __doc__ = LaunchedEnvironmentBehaviour.__doc__


class ScriptEnvironment(ScriptEnvironmentBehaviour, LightningEnvironment):
    __doc__ = ScriptEnvironmentBehaviour.__doc__


class SlurmEnvironment(SlurmEnvironmentBehaviour, SLURMEnvironment):
    __doc__ = SlurmEnvironmentBehaviour.__doc__


class ScriptLauncher(ScriptLauncherBehaviour, _SubprocessScriptLauncher):
    __doc__ = ScriptLauncherBehaviour.__doc__
    names = NAMES


class ProcessLauncher(ProcessLauncherBehaviour, _MultiProcessingLauncher):
    __doc__ = ProcessLauncherBehaviour.__doc__


class AtomicCheckpointIO(AtomicCheckpointBehaviour, TorchCheckpointIO):
    __doc__ = AtomicCheckpointBehaviour.__doc__


class StrategyCallback(StrategyCallbackBehaviour, Callback):
    __doc__ = StrategyCallbackBehaviour.__doc__


class AuditSharing(AuditSharingBehaviour, Callback):
    __doc__ = AuditSharingBehaviour.__doc__


class ExplainSharing(ExplainSharingBehaviour, Callback):
    __doc__ = ExplainSharingBehaviour.__doc__


class VerifyReplicas(VerifyReplicasBehaviour, Callback):
    __doc__ = VerifyReplicasBehaviour.__doc__


class CollectiveStrategy(CollectiveStrategyBehaviour, ParallelStrategy):
    __doc__ = CollectiveStrategyBehaviour.__doc__
    names = NAMES
    launcher_classes = (ScriptLauncher, ProcessLauncher)
    environment_classes = (LaunchedEnvironment, ScriptEnvironment, SlurmEnvironment)
    checkpoint_io_class = AtomicCheckpointIO
    callback_class = StrategyCallback


class XLAEnvironment(XLAEnvironmentBehaviour, LightningEnvironment):
    __doc__ = XLAEnvironmentBehaviour.__doc__


class XLADevices(XLADevicesAccelerator, CPUAccelerator):
    __doc__ = XLADevicesAccelerator.__doc__


class ChipLauncher(ChipLauncherBehaviour, ProcessLauncher):
    __doc__ = ChipLauncherBehaviour.__doc__


class XLACollectiveStrategy(XLAStrategyBehaviour, CollectiveStrategy):
    __doc__ = XLAStrategyBehaviour.__doc__
    xla_environment_class = XLAEnvironment
    devices_accelerator_class = XLADevices
    chip_launcher_class = ChipLauncher


CollectiveStrategy.by_backend = {"xla": XLACollectiveStrategy}
# On a TPU host Lightning picks its own accelerator first, and accepts strategies only that derive from its XLAStrategy.
XLAStrategy.register(XLACollectiveStrategy)
XLAAccelerator.register(XLADevices)
register(NAMES.StrategyRegistry, CollectiveStrategy)
install(LightningModule, LightningDataModule)

__all__ = ["AuditSharing", "CollectiveModule", "CollectiveStrategy", "ExplainSharing", "VerifyReplicas"]
