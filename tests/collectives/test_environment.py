"""A process' place, read from the launcher's variables."""

import pytest

from collective_strategy.collectives import EnvironmentConfigError, LaunchEnvironment, read_environment

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}


def test_without_a_launcher_this_is_one_process() -> None:
    place = read_environment({})
    assert (place.rank, place.world_size, place.source) == (0, 1, "single")


def test_torchrun_says_everything() -> None:
    assert read_environment(TORCHRUN) == LaunchEnvironment(
        3, 4, 1, 2, 1, "10.0.0.1", 29500, "torchrun", job_id="job7", attempt=2, store_is_served=True
    )


def test_on_one_machine_rank_size_and_port_are_enough() -> None:
    place = read_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"})
    assert (place.local_rank, place.local_world_size, place.node_rank) == (1, 2, 0)
    assert place.is_loopback


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_PORT"]),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ["RANK"]),
        ({"WORLD_SIZE": "2"}, ["RANK", "MASTER_PORT"]),
        ({"RANK": "1", "MASTER_PORT": "29500"}, ["WORLD_SIZE"]),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
    ],
)
def test_a_half_set_environment_names_all_that_is_missing(variables: dict[str, str], named: list[str]) -> None:
    with pytest.raises(EnvironmentConfigError) as error:
        read_environment(variables)
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "4"}, ["4", "0..3"]),
        ({"RANK": "-1"}, ["-1"]),
        ({"RANK": "one"}, ["RANK", "'one'"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4"]),
    ],
)
def test_nonsense_is_named_with_its_value(change: dict[str, str], named: list[str]) -> None:
    with pytest.raises(EnvironmentConfigError) as error:
        read_environment({**TORCHRUN, **change})
    assert all(word in str(error.value) for word in named)


def test_slurm_says_the_place_of_a_batch_step() -> None:
    place = read_environment({**SLURM, "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[02-05,7]"})
    assert (place.rank, place.world_size, place.local_rank, place.node_rank) == (3, 4, 1, 1)
    assert (place.local_world_size, place.master_addr, place.master_port) == (2, "node02", 15000 + 3456)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("a[3,5]", "a3"), ("a[3-5]-x", "a3-x"), ("b,a[1-2]", "b"), ("", "127.0.0.1")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert read_environment({**SLURM, "SLURM_JOB_NODELIST": nodes}).master_addr == first


def test_slurm_with_contradicting_numbers_names_both() -> None:
    with pytest.raises(EnvironmentConfigError, match=r"SLURM_NTASKS=1, SLURM_NTASKS_PER_NODE=2"):
        read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"})


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_an_interactive_shell_is_a_local_machine(name: str) -> None:
    assert read_environment({**SLURM, "SLURM_JOB_NAME": name}).source == "single"


def test_the_inner_launcher_wins() -> None:
    assert read_environment({**SLURM, **TORCHRUN}).source == "torchrun"


def test_errors_of_the_environment_are_value_errors() -> None:
    assert issubclass(EnvironmentConfigError, ValueError)
