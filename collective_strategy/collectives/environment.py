"""This process' place in the job, read from the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from collective_strategy.collectives.errors import EnvironmentConfigError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
JOB_VARIABLE = "COLLECTIVE_STRATEGY_JOB_ID"


@dataclass(frozen=True)
class LaunchEnvironment:
    """Where this process stands.

    Args:
        rank: Global rank, ``0 .. world_size - 1``.
        world_size: Number of processes of the job.
        local_rank: Rank on this node.
        local_world_size: Number of processes on this node.
        node_rank: Number of this node.
        master_addr: Host of rank 0.
        master_port: Port at which the processes meet there.
        source: Who set the variables: ``"torchrun"``, ``"horovod"``, ``"mpirun"``, ``"slurm"``, ``"standard"`` or
            ``"single"``.
        job_id: Keeps apart two jobs that meet at one port.
        attempt: Count of restarts by the launcher.
        store_is_served: Whether the launcher serves the store at the port (torchrun does).
        key_value: The launcher's key-value server, through which rank 0 says where it listens (horovodrun has one).
        ranks_are_threads: Whether all ranks of this node are threads of one process (XLA's devices may be).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: str = "single"
    job_id: str = ""
    attempt: int = 0
    store_is_served: bool = False
    key_value: str = ""
    ranks_are_threads: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise EnvironmentConfigError(
                f"rank {self.rank} is outside 0..{self.world_size - 1} (world size {self.world_size}, set by "
                f"{self.source}). "
                "RANK counts from 0 and must be below WORLD_SIZE."
            )

    @property
    def is_loopback(self) -> bool:
        """Whether all processes meet on this machine's loopback interface."""
        return self.master_addr in _LOOPBACK


def read_environment(variables: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Reads the variables that torchrun, horovodrun, mpirun, SLURM or another launcher set.

    The inner launcher wins: RANK and WORLD_SIZE (or Horovod's own) over MPI's, and these over SLURM's variables.
    Without any of them this is one process.

    Args:
        variables: Taken instead of ``os.environ``.

    Raises:
        EnvironmentConfigError: variables are missing, no numbers, or contradict each other; all are named at once.
    """
    # their readers are made from this module's parts
    from collective_strategy.collectives import horovod_environment as horovod

    env = os.environ if variables is None else variables
    if horovod.is_horovod_job(env):
        return horovod.horovod_environment(env)
    if "RANK" in env or "WORLD_SIZE" in env:
        return _standard(env)
    if horovod.is_mpi_job(env):
        return horovod.mpi_environment(env)
    if is_slurm_step(env):
        return _slurm(env)
    return LaunchEnvironment()


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process (an interactive shell inside an allocation counts as a local machine)."""
    if "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env:
        return False
    return env.get("SLURM_JOB_NAME", "") not in ("bash", "interactive")


def _standard(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = integer_variable(env, "WORLD_SIZE", 1)
    rank_given = "RANK" in env
    single_node = (
        integer_variable(env, "LOCAL_WORLD_SIZE", world_size) == world_size
        and integer_variable(env, "NODE_RANK", 0) == 0
    )
    required = ["RANK", "WORLD_SIZE"]
    if world_size > 1:
        required.append("MASTER_PORT")
        if not single_node:
            required.append("MASTER_ADDR")
    missing = [name for name in required if name not in env]
    if missing and not (missing == ["RANK"] and world_size == 1):
        seen = {
            name: env[name]
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            if name in env
        }
        if world_size > 1 and "MASTER_ADDR" not in env and "MASTER_ADDR" not in missing:
            missing.insert(missing.index("MASTER_PORT") if "MASTER_PORT" in missing else len(missing), "MASTER_ADDR")
        raise EnvironmentConfigError(
            f"the launcher's environment is half set: {', '.join(missing)} missing, found {seen}. Set all of RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every process (torchrun does it), or none of them."
        )
    rank = integer_variable(env, "RANK", 0) if rank_given else 0
    local_world_size = integer_variable(env, "LOCAL_WORLD_SIZE", world_size if single_node else 1)
    local_rank = integer_variable(env, "LOCAL_RANK", rank % max(local_world_size, 1))
    if not 0 <= local_rank < max(local_world_size, 1):
        raise EnvironmentConfigError(
            f"LOCAL_RANK={local_rank} is outside 0..{local_world_size - 1} (LOCAL_WORLD_SIZE={local_world_size})."
        )
    if local_world_size > world_size:
        raise EnvironmentConfigError(f"LOCAL_WORLD_SIZE={local_world_size} is larger than WORLD_SIZE={world_size}.")
    node_rank = integer_variable(
        env, "GROUP_RANK", integer_variable(env, "NODE_RANK", rank // max(local_world_size, 1))
    )
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=integer_variable(env, "MASTER_PORT", 0),
        source="torchrun" if "TORCHELASTIC_RUN_ID" in env else "standard",
        job_id=env.get(JOB_VARIABLE) or env.get("TORCHELASTIC_RUN_ID", ""),
        attempt=integer_variable(env, "TORCHELASTIC_RESTART_COUNT", 0),
        store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = integer_variable(env, "SLURM_NTASKS", 1)
    nodes = integer_variable(env, "SLURM_NNODES", integer_variable(env, "SLURM_JOB_NUM_NODES", 0))
    per_node = integer_variable(env, "SLURM_NTASKS_PER_NODE", 0)
    if per_node and (per_node > world_size or (nodes and per_node * nodes != world_size)):
        raise EnvironmentConfigError(
            f"SLURM's settings contradict each other: SLURM_NTASKS={world_size}, SLURM_NTASKS_PER_NODE={per_node}"
            + (f", {nodes} nodes" if nodes else "")
            + ". Give sbatch or srun --ntasks-per-node alone, equal to the Trainer's devices."
        )
    rank = integer_variable(env, "SLURM_PROCID", 0)
    local_rank = integer_variable(env, "SLURM_LOCALID", 0)
    node_rank = integer_variable(env, "SLURM_NODEID", 0)
    job = env.get("SLURM_JOB_ID", "")
    local = per_node or (world_size // nodes if nodes and world_size % nodes == 0 else max(1, local_rank + 1))
    digits = "".join(filter(str.isdigit, job))[-4:] or "0"
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local,
        node_rank=node_rank,
        master_addr=env.get("MASTER_ADDR")
        or _first_host(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")),
        master_port=integer_variable(env, "MASTER_PORT", 15000 + int(digits)),
        source="slurm",
        job_id=job,
        attempt=integer_variable(env, "SLURM_RESTART_COUNT", 0),
    )


def _first_host(nodes: str) -> str:
    """``"node[02-05,7]"`` -> ``"node02"``."""
    if not nodes:
        return "127.0.0.1"
    prefix, bracket, rest = nodes.partition("[")
    if not bracket:
        return nodes.split(",")[0]
    if "," in prefix:
        return prefix.split(",")[0]
    first = rest.split("]")[0].split(",")[0].split("-")[0]
    return prefix + first + rest.partition("]")[2].split(",")[0]


def integer_variable(env: Mapping[str, str], name: str, default: int) -> int:
    """A variable as a whole number; raises EnvironmentConfigError where it is none."""
    value = env.get(name)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise EnvironmentConfigError(f"{name}={value!r} is not a whole number.") from None
