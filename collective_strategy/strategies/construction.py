"""What Lightning asks a strategy while a Trainer is constructed: devices, environment, launcher, checkpoint files."""

from typing import Any, ClassVar

import torch

from collective_strategy.strategies.communication import CommunicationBehaviour
from collective_strategy.strategies.environments import early_slurm_environment, launched_by_variables


class ConstructionBehaviour(CommunicationBehaviour):
    """The answers that need no connection; they exist before any process does."""

    strategy_name: ClassVar[str] = "collective"
    launcher_classes: ClassVar[tuple[Any, Any]]
    environment_classes: ClassVar[tuple[Any, Any, Any]]
    checkpoint_io_class: ClassVar[Any]

    _start_method: str
    _num_nodes: int
    _cluster_environment: Any | None

    @property
    def is_distributed(self) -> bool:
        """Without it Lightning silently drops sync_dist and the distributed sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Place on the data axis: ranks of one model group get the same batches."""
        if not self.collective.is_set_up:
            return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}
        data = self.collective.data
        return {"num_replicas": data.world_size, "rank": data.rank}

    @property
    def cluster_environment(self) -> Any | None:
        if self._cluster_environment is None:
            self._cluster_environment = early_slurm_environment(self.environment_classes[2])
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any | None) -> None:
        """Replaces Lightning's guess by the standard variables where a launcher set them; a user's own class stays."""
        launched, script, slurm = self.environment_classes
        names = self.names
        guessed = (
            names.LightningEnvironment,
            names.TorchElasticEnvironment,
            names.SLURMEnvironment,
            names.MPIEnvironment,
        )
        if environment is not None and type(environment) in guessed:
            if launched_by_variables():
                environment = launched()
            elif type(environment) is names.SLURMEnvironment:
                environment = slurm(environment.auto_requeue, environment.requeue_signal)
            elif type(environment) is names.LightningEnvironment:
                environment = script()
        self._cluster_environment = environment

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = self.checkpoint_io_class()
        elif isinstance(self._checkpoint_io, self.names.WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = self.checkpoint_io_class()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def set_world_ranks(self) -> None:
        cluster = self.cluster_environment
        if cluster is not None:
            cluster.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            cluster.set_world_size(self.num_nodes * self.num_processes)
        for module in self.names.rank_zero_modules:
            module.rank = self.global_rank

    def _configure_launcher(self) -> None:
        cluster = self.cluster_environment
        assert cluster is not None
        cluster.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if self.collective.backend_name == "single" and self.num_processes * self.num_nodes > 1:
            raise ValueError(
                "CollectiveStrategy('single') is the one-process collective, but the Trainer has"
                f" devices={self.num_processes} and num_nodes={self.num_nodes}. Each process would train alone: set"
                " devices=1, or use 'torch'."
            )
        script_launcher, process_launcher = self.launcher_classes
        if self._start_method == "popen" or cluster.creates_processes_externally:
            self._launcher = script_launcher(cluster, self.num_processes, self.num_nodes)
        else:
            self._launcher = process_launcher(self, start_method=self._start_method)
