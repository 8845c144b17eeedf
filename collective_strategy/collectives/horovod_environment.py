"""The place of a process that horovodrun, ``horovod.run`` or mpirun started, read from their variables."""

from __future__ import annotations

from collections.abc import Mapping

from collective_strategy.collectives.environment import LaunchEnvironment, integer_variable
from collective_strategy.collectives.errors import EnvironmentConfigError

_OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_HYDRA = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}


def is_horovod_job(env: Mapping[str, str]) -> bool:
    """Whether horovodrun or ``horovod.run`` started this process."""
    return "HOROVOD_RANK" in env or "HOROVOD_SIZE" in env


def is_mpi_job(env: Mapping[str, str]) -> bool:
    """Whether mpirun started this process."""
    return _mpi_names(env) is not None


def horovod_environment(env: Mapping[str, str]) -> LaunchEnvironment:
    """The place that Horovod's launcher says.

    The processes meet through the launcher's key-value server: rank 0 writes there where it listens.

    Raises:
        EnvironmentConfigError: variables are missing, or contradict RANK and WORLD_SIZE.
    """
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    size = integer_variable(env, "HOROVOD_SIZE", 1)
    missing = [name for name in names[: 4 if size > 1 else 2] if name not in env]
    if missing:
        seen = {name: env[name] for name in names if name in env}
        raise EnvironmentConfigError(
            f"the environment of a Horovod job is half set: {', '.join(missing)} missing, found {seen}. Start the "
            "script with horovodrun --gloo or horovod.run(..., use_gloo=True), which set all of them, or set none."
        )
    rank = integer_variable(env, "HOROVOD_RANK", 0)
    for ours, own, theirs in (("HOROVOD_RANK", rank, "RANK"), ("HOROVOD_SIZE", size, "WORLD_SIZE")):
        if theirs in env and integer_variable(env, theirs, own) != own:
            raise EnvironmentConfigError(
                f"two launchers contradict each other: {ours}={own}, but {theirs}={env[theirs]}. Each process has one "
                f"place; start the script with one launcher, or unset {theirs}."
            )
    local_size = integer_variable(env, "HOROVOD_LOCAL_SIZE", size)
    address = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    port = integer_variable(env, "HOROVOD_GLOO_RENDEZVOUS_PORT", 0)
    return LaunchEnvironment(
        rank=rank,
        world_size=size,
        local_rank=integer_variable(env, "HOROVOD_LOCAL_RANK", rank % max(local_size, 1)),
        local_world_size=local_size,
        node_rank=integer_variable(env, "HOROVOD_CROSS_RANK", rank // max(local_size, 1)),
        master_addr=address,
        master_port=port,
        source="horovod",
        key_value=f"http://{address}:{port}" if port else "",
    )


def mpi_environment(env: Mapping[str, str]) -> LaunchEnvironment:
    """The place that mpirun says. It tells no address; MASTER_ADDR and MASTER_PORT do, or MPI itself carries one."""
    names = _mpi_names(env) or _OPEN_MPI
    rank, size = (integer_variable(env, names[key], default) for key, default in (("rank", 0), ("size", 1)))
    local_size = integer_variable(env, names["local_size"], size)
    return LaunchEnvironment(
        rank=rank,
        world_size=size,
        local_rank=integer_variable(env, names["local_rank"], rank % max(local_size, 1)),
        local_world_size=local_size,
        node_rank=rank // max(local_size, 1),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=integer_variable(env, "MASTER_PORT", 0),
        source="mpirun",
        job_id=env.get("PMIX_NAMESPACE", ""),
    )


def _mpi_names(env: Mapping[str, str]) -> Mapping[str, str] | None:
    for names in (_OPEN_MPI, _HYDRA):
        if names["rank"] in env and names["size"] in env:
            return names
    return None
