"""What differs under XLA: devices that exist in the launched rank only, graphs that end with a step, ties, the host."""

import copy
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.errors import EnvironmentConfigError, RankLeftError
from collective_strategy.collectives.host import host_copy
from collective_strategy.collectives.xla_runtime import (
    Replica,
    import_xla,
    is_replica,
    is_tpu_host,
    join_launcher,
    refuse_processes_on_cpus,
    replica_environment,
)
from collective_strategy.collectives.xla_threads import run_on_cpu_devices
from collective_strategy.strategies.launchers import ProcessLauncherBehaviour
from collective_strategy.strategies.strategy import CollectiveStrategyBehaviour

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import LightningEnvironment as _LightningEnvironment
    from lightning.pytorch.accelerators import CPUAccelerator as _CPUAccelerator
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
else:
    _LightningEnvironment = _CPUAccelerator = _Launcher = object


class XLAEnvironmentBehaviour(_LightningEnvironment):
    """The place that torch_xla's runtime gives; before the ranks are launched, that of the launching process."""

    @property
    def launch(self) -> LaunchEnvironment:
        return replica_environment() if is_replica() else LaunchEnvironment()

    @property
    def creates_processes_externally(self) -> bool:
        return is_replica()

    def world_size(self) -> int:
        return self.launch.world_size if is_replica() else super().world_size()

    def global_rank(self) -> int:
        return self.launch.rank

    def local_rank(self) -> int:
        return self.launch.local_rank

    def node_rank(self) -> int:
        return self.launch.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if is_replica() and num_devices * num_nodes != self.launch.world_size:
            raise EnvironmentConfigError(
                f"The Trainer has devices={num_devices} and num_nodes={num_nodes}, but torch_xla's runtime has"
                f" {self.launch.world_size} replicas, and every rank needs one: set devices='auto'."
            )

    def teardown(self) -> None:
        """Nothing was set."""


class XLADevicesAccelerator(_CPUAccelerator):
    """XLA:CPU devices. Lightning takes it for its XLAAccelerator, and so leaves inference mode off, which XLA lacks."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing is needed."""


class DeviceThreadsLauncher(_Launcher):
    """Runs the Trainer once per XLA:CPU device, in threads of this process; the first rank's is the Trainer itself."""

    def __init__(self, devices: int) -> None:
        self._devices = devices

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any | None = None, **kwargs: Any) -> Any:
        work = [(trainer, function, args, kwargs)]
        work += [copy.deepcopy(work[0]) for _ in range(1, self._devices)]
        errors: dict[int, BaseException] = {}

        def run(rank: int) -> Any:
            own, call, arguments, named = work[rank]
            try:
                return call(*arguments, **named)
            except BaseException as error:
                errors[rank] = error
            finally:
                if own is not None:
                    own.strategy.collective.teardown()

        results = run_on_cpu_devices(self._devices, run)
        if errors:
            causes = [error for error in errors.values() if not isinstance(error, RankLeftError)]
            raise (causes or list(errors.values()))[0]
        return results[0]

    def kill(self, signum: Any) -> None:
        """Threads end with their process."""


class ChipLauncherBehaviour(ProcessLauncherBehaviour):
    """Starts one process per chip of this host by torch_xla; what the first one has at the end comes back."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any | None = None, **kwargs: Any) -> Any:
        torch_xla, _, _ = import_xla()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results")
            work = (self, trainer, function, args, kwargs, path)
            if self._start_method == "fork":
                # torch_xla pickles what it is given, and a script's modules cannot always be pickled
                _inherited.append(work)
                try:
                    torch_xla.launch(_on_chip, start_method="fork")
                finally:
                    _inherited.pop()
            else:
                torch_xla.launch(_on_chip, work, start_method=self._start_method)
            with open(path, "rb") as file:
                output = pickle.load(file)
        if trainer is None:
            return output
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def run_on_chip(
        self, trainer: Any | None, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], path: str
    ) -> None:
        """In a started process; the first one writes its results to a file."""
        try:
            results = function(*args, **kwargs)
            if trainer is not None:
                results = self._collect_rank_zero_results(trainer, results)
            if self._strategy.local_rank == 0:
                with open(path, "wb") as file:
                    pickle.dump(_on_host(results), file)
        finally:
            self._strategy.collective.teardown()  # type: ignore[attr-defined]

    def kill(self, signum: Any) -> None:
        """torch_xla ends its processes."""


# What a forked process finds here; one launch at a time.
_inherited: list[tuple[Any, ...]] = []


def _on_chip(index: int, *work: Any) -> None:
    launcher, *rest = work or _inherited[-1]
    launcher.run_on_chip(*rest)


class ThreadRank:
    """The rank of the calling thread, for a variable that all ranks of a process share."""

    def __index__(self) -> int:
        return import_xla()[2].global_ordinal() if is_replica() else 0

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        return int(self) > other

    def __hash__(self) -> int:
        return hash(int(self))

    def __str__(self) -> str:
        return str(int(self))


class XLAStrategyBehaviour(CollectiveStrategyBehaviour):
    """The strategy on torch_xla's replicas: one process per chip, or one thread per XLA:CPU device.

    A step is cut out of the graph: before its batch arrives and after the optimizer's step, so that what the ranks do
    in between, such as logging on one of them, does not change the others' programs.
    """

    xla_environment_class: ClassVar[Any]
    devices_accelerator_class: ClassVar[Any]
    chip_launcher_class: ClassVar[Any]
    _replica: Replica | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        import_xla()  # says what is missing
        super().__init__(*args, **settings)

    # -- what Lightning asks while a Trainer is constructed --------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        return torch.device("xla", 0) if self._replica is None else self._replica.device

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        plain = accelerator is not None and type(accelerator) is self.names.CPUAccelerator
        self._accelerator = self.devices_accelerator_class() if plain else accelerator

    @property
    def parallel_devices(self) -> Any:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        """In a launched rank the devices are those that exist; before, as many as the Trainer asks for."""
        count = 0 if devices is None else len(devices)
        if count == 1 and is_replica():
            count = replica_environment().local_world_size
        self._parallel_devices = [torch.device("xla", index) for index in range(count)] or None

    @property
    def cluster_environment(self) -> Any:
        if self._cluster_environment is None:
            self._cluster_environment = self.xla_environment_class()
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        own = isinstance(environment, self.xla_environment_class)
        self._cluster_environment = environment if own else None

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        """Lightning's plugin reduces the gradients once more before the step, over all ranks alike."""
        if plugin is not None and hasattr(plugin, "_xla_wrap_closure"):
            plugin._xla_wrap_closure = _closure_as_it_is
        self._precision_plugin = plugin

    def set_world_ranks(self) -> None:
        cluster = self.cluster_environment
        cluster.set_world_size(self.num_nodes * self.num_processes)
        for module in self.names.rank_zero_modules:
            module.rank = ThreadRank()

    def _configure_launcher(self) -> None:
        join_launcher()
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if is_replica():
            self._launcher = None
        elif is_tpu_host():
            method = "fork" if self._start_method == "popen" else self._start_method
            self._launcher = self.chip_launcher_class(self, start_method=method)
        else:
            refuse_processes_on_cpus()
            self._launcher = DeviceThreadsLauncher(self.num_processes)

    # -- the run ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self._replica = Replica.current()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Tied parameters are tied again: XLA replaces parameters when it moves them."""
        assert self.model is not None
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.model.to(self.root_device)
        for first, *others in names.values():
            tied = self.model.get_parameter(first)
            for other in others:
                owner, _, attribute = other.rpartition(".")
                setattr(self.model.get_submodule(owner), attribute, tied)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._cut()
        return super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._cut()
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Tensors are brought to the host on every rank, so that any process can read the file."""
        self._cut()
        super().save_checkpoint(_on_host(checkpoint), filepath, storage_options)

    def teardown(self) -> None:
        self._cut()
        super().teardown()
        self._replica = None

    def _cut(self) -> None:
        if self._replica is not None:
            self._replica.cut()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_replica": None}


def _closure_as_it_is(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    return closure()


def _on_host(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, host_copy, value)
