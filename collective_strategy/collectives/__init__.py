"""Collectives on plain tensors. Needs torch only."""

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.environment import LaunchEnvironment, read_environment
from collective_strategy.collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveStateError,
    CollectiveTimeoutError,
    EnvironmentConfigError,
    RankLeftError,
    RendezvousError,
)
from collective_strategy.collectives.functions import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    redistribute,
    reduce_from_parallel_region,
    scale_grad,
    scatter_to_parallel_region,
)
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.collectives.horovod import HorovodCollective
from collective_strategy.collectives.layout import MeshLayout, Partition
from collective_strategy.collectives.operations import OPERATIONS, Operation, Pair, ReduceOp
from collective_strategy.collectives.random_numbers import seed_ranks
from collective_strategy.collectives.registry import (
    available_collectives,
    collective_class,
    create_collective,
    register_collective,
)
from collective_strategy.collectives.side_channel import SideChannel
from collective_strategy.collectives.single import SingleProcessCollective
from collective_strategy.collectives.torch_distributed import TorchDistributedCollective

__all__ = [
    "OPERATIONS",
    "Capabilities",
    "Collective",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveStateError",
    "CollectiveTimeoutError",
    "CompletedHandle",
    "EnvironmentConfigError",
    "Handle",
    "HorovodCollective",
    "LaunchEnvironment",
    "MeshLayout",
    "Operation",
    "Pair",
    "Partition",
    "RankLeftError",
    "ReduceOp",
    "RendezvousError",
    "SideChannel",
    "SingleProcessCollective",
    "TorchDistributedCollective",
    "available_collectives",
    "collective_class",
    "copy_to_parallel_region",
    "create_collective",
    "gather_from_parallel_region",
    "read_environment",
    "redistribute",
    "reduce_from_parallel_region",
    "register_collective",
    "scale_grad",
    "scatter_to_parallel_region",
    "seed_ranks",
]
