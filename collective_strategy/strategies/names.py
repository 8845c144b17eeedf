"""The names that the strategy needs from Lightning, which exists as two packages with separate classes."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class LightningNames:
    """One Lightning package's classes and functions.

    The types are ``Any`` because the two packages' classes are unrelated to each other for a type checker.
    Names with a leading underscore in Lightning are private there; everything we depend on is listed here, so
    that a new Lightning version breaks in one place.
    """

    pytorch: str
    StrategyRegistry: Any
    LightningModule: Any
    LightningDataModule: Any
    Callback: Any
    CPUAccelerator: Any
    LightningEnvironment: Any
    TorchElasticEnvironment: Any
    SLURMEnvironment: Any
    MPIEnvironment: Any
    TrainerFn: Any
    RunningStage: Any
    TrainerStatus: Any
    WrappingCheckpointIO: Any
    DistributedSamplerWrapper: Any
    IndexBatchSamplerWrapper: Any
    MisconfigurationException: Any
    rank_zero_modules: tuple[Any, ...]
    rank_zero_warn: Any
    rank_zero_info: Any
    reset_seed: Any
    optimizers_to_device: Any
    dataloader_arguments: Any
    reinstantiate: Any
    has_iterable_dataset: Any
    auto_add_worker_init_fn: Any
    hydra_command: Any

    @classmethod
    def load(cls, pytorch: str, fabric: str) -> "LightningNames":
        """Imports them, e.g. from ``"lightning.pytorch"`` and ``"lightning.fabric"``."""

        def get(module: str, name: str) -> Any:
            return getattr(import_module(module), name)

        def layer(name: str) -> Any:
            return get(pytorch, name)

        environments = f"{fabric}.plugins.environments"
        states = f"{pytorch}.trainer.states"
        data = f"{pytorch}.utilities.data"
        return cls(
            pytorch=pytorch,
            StrategyRegistry=get(f"{pytorch}.strategies", "StrategyRegistry"),
            LightningModule=layer("LightningModule"),
            LightningDataModule=layer("LightningDataModule"),
            Callback=layer("Callback"),
            CPUAccelerator=get(f"{pytorch}.accelerators", "CPUAccelerator"),
            LightningEnvironment=get(environments, "LightningEnvironment"),
            TorchElasticEnvironment=get(environments, "TorchElasticEnvironment"),
            SLURMEnvironment=get(environments, "SLURMEnvironment"),
            MPIEnvironment=get(environments, "MPIEnvironment"),
            TrainerFn=get(states, "TrainerFn"),
            RunningStage=get(states, "RunningStage"),
            TrainerStatus=get(states, "TrainerStatus"),
            WrappingCheckpointIO=get(f"{pytorch}.plugins.io.wrapper", "_WrappingCheckpointIO"),
            DistributedSamplerWrapper=get(f"{fabric}.utilities.distributed", "DistributedSamplerWrapper"),
            IndexBatchSamplerWrapper=get(f"{pytorch}.overrides.distributed", "_IndexBatchSamplerWrapper"),
            MisconfigurationException=get(f"{pytorch}.utilities.exceptions", "MisconfigurationException"),
            # Lightning reads the rank from its own function and from the one in lightning_utilities
            rank_zero_modules=(
                get(f"{pytorch}.utilities.rank_zero", "rank_zero_only"),
                get("lightning_utilities.core.rank_zero", "rank_zero_only"),
            ),
            rank_zero_warn=get(f"{pytorch}.utilities.rank_zero", "rank_zero_warn"),
            rank_zero_info=get(f"{pytorch}.utilities.rank_zero", "rank_zero_info"),
            reset_seed=get(f"{fabric}.utilities.seed", "reset_seed"),
            optimizers_to_device=get(f"{fabric}.utilities.optimizer", "_optimizers_to_device"),
            dataloader_arguments=get(data, "_get_dataloader_init_args_and_kwargs"),
            reinstantiate=get(data, "_reinstantiate_wrapped_cls"),
            has_iterable_dataset=get(data, "has_iterable_dataset"),
            auto_add_worker_init_fn=get(f"{fabric}.utilities.data", "_auto_add_worker_init_fn"),
            hydra_command=get(f"{fabric}.strategies.launchers.subprocess_script", "_hydra_subprocess_cmd"),
        )
