"""Cluster environments: where a process stands, as Lightning wants to be told."""

import os
from typing import TYPE_CHECKING, Any

from collective_strategy.collectives.environment import JOB_VARIABLE, LaunchEnvironment, is_slurm_step, read_environment
from collective_strategy.collectives.errors import EnvironmentConfigError
from collective_strategy.collectives.horovod_environment import is_horovod_job, is_mpi_job

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import LightningEnvironment as _LightningEnvironment
    from lightning.fabric.plugins.environments import SLURMEnvironment as _SLURMEnvironment
else:
    _LightningEnvironment = _SLURMEnvironment = object


def launched_by_variables() -> bool:
    """Whether somebody else started all processes and told this one its place.

    ``WORLD_SIZE`` with ``NODE_RANK`` alone is Lightning's way to start one process per node by hand: the script then
    launches the rest of its node itself.
    """
    if is_horovod_job(os.environ) or is_mpi_job(os.environ):
        return True
    per_node = "NODE_RANK" in os.environ and "RANK" not in os.environ and "LOCAL_RANK" not in os.environ
    return ("RANK" in os.environ or "WORLD_SIZE" in os.environ) and not per_node


class LaunchedEnvironmentBehaviour(_LightningEnvironment):
    """All processes exist already; the launcher's variables say which one this is.

    Raises:
        EnvironmentConfigError: at construction, when the variables are half set or contradict each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launch = read_environment()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.launch.master_addr

    @property
    def main_port(self) -> int:
        return self.launch.master_port

    def world_size(self) -> int:
        return self.launch.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher decides."""

    def global_rank(self) -> int:
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher decides."""

    def local_rank(self) -> int:
        return self.launch.local_rank

    def node_rank(self) -> int:
        return self.launch.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_devices(self.launch, num_devices, num_nodes)

    def teardown(self) -> None:
        """Leaves the launcher's variables alone; the next Trainer reads them again."""


class ScriptEnvironmentBehaviour(_LightningEnvironment):
    """Nobody launched us: the script starts the other processes of its node itself."""

    def teardown(self) -> None:
        """Keeps WORLD_SIZE, which Lightning deletes: the next Trainer of the script must find it."""


class SlurmEnvironmentBehaviour(_SLURMEnvironment):
    """Lightning's SLURM environment, which also accepts ``--ntasks`` without ``--ntasks-per-node``."""

    @staticmethod
    def _validate_srun_variables() -> None:
        read_environment()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        launch = read_environment()
        check_devices(launch, num_devices, num_nodes)


def check_devices(launch: LaunchEnvironment, num_devices: int, num_nodes: int) -> None:
    """Refuses a Trainer whose devices do not fit the processes that exist.

    Raises:
        EnvironmentConfigError: it names both numbers and who set them.
    """
    # horovodrun says how many processes each node has, which need not be what the Trainer believes
    fits_node = launch.source != "horovod" or num_devices == launch.local_world_size
    if num_devices * num_nodes == launch.world_size and fits_node:
        return
    size = {"slurm": "SLURM_NTASKS", "mpirun": "mpirun -np"}.get(launch.source, "WORLD_SIZE")
    if launch.source == "horovod":
        num_nodes_here = launch.world_size // launch.local_world_size
        raise EnvironmentConfigError(
            f"The Trainer has devices={num_devices} and num_nodes={num_nodes}, but horovodrun started"
            f" {launch.local_world_size} processes on this node and {launch.world_size} in all"
            f" (HOROVOD_LOCAL_SIZE={launch.local_world_size}, HOROVOD_SIZE={launch.world_size}). Every process needs"
            f" one device: set devices={launch.local_world_size} and num_nodes={num_nodes_here}, or start"
            f" {num_devices * num_nodes} processes."
        )
    fitting = launch.world_size // num_nodes
    raise EnvironmentConfigError(
        f"The Trainer has devices={num_devices} and num_nodes={num_nodes}, which is {num_devices * num_nodes}"
        f" processes, but {launch.source} started {launch.world_size} ({size}={launch.world_size}). Every process"
        f" needs one device: set devices={fitting} (with num_nodes={num_nodes}), or start {num_devices * num_nodes}"
        " processes."
    )


def early_slurm_environment(slurm_class: Any) -> Any | None:
    """The SLURM environment to use before Lightning looks, or None.

    Lightning's own refuses ``--ntasks`` without ``--ntasks-per-node`` at construction, which is before a strategy is
    asked for anything else; only in this case ours has to be there first.
    """
    if launched_by_variables() or not is_slurm_step(os.environ) or "SLURM_NTASKS_PER_NODE" in os.environ:
        return None
    return slurm_class() if int(os.environ["SLURM_NTASKS"]) > 1 else None


def launch_environment(cluster: Any, num_processes: int) -> LaunchEnvironment:
    """What the collective needs to know, from any Lightning cluster environment."""
    launch = getattr(cluster, "launch", None)
    if isinstance(launch, LaunchEnvironment):
        return launch
    if launched_by_variables() or is_slurm_step(os.environ):
        known = read_environment()
        if (known.rank, known.world_size) == (cluster.global_rank(), cluster.world_size()):
            return known
    return LaunchEnvironment(
        rank=cluster.global_rank(),
        world_size=cluster.world_size(),
        local_rank=cluster.local_rank(),
        local_world_size=num_processes,
        node_rank=cluster.node_rank(),
        master_addr=cluster.main_address,
        # one process meets nobody and needs no port
        master_port=cluster.main_port if cluster.world_size() > 1 else 0,
        source="standard",
        job_id=os.environ.get(JOB_VARIABLE, ""),
    )
