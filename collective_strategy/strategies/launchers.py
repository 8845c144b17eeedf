"""Launchers: the script again per device, or spawned and forked processes whose results come back."""

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from collective_strategy.collectives.environment import JOB_VARIABLE
from collective_strategy.strategies.environments import ScriptEnvironmentBehaviour
from collective_strategy.strategies.names import LightningNames

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
else:
    _SubprocessScriptLauncher = _MultiProcessingLauncher = object

log = logging.getLogger("collective_strategy")
_GRACE_SECONDS = 5.0
_LAUNCHER_PID = "COLLECTIVE_STRATEGY_LAUNCHER_PID"


class ScriptLauncherBehaviour(_SubprocessScriptLauncher):
    """Runs the script once more for every further device of this node.

    The process that launched is rank 0 of its node. When it ends, it waits for the others; a failure of one of them
    becomes its own exit status, and when it failed itself the others are ended after a grace of 5 s, so that no
    process is left behind.
    """

    names: ClassVar[LightningNames]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failed = False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any | None = None, **kwargs: Any) -> Any:
        launcher = int(os.environ.get(_LAUNCHER_PID, "0"))
        if launcher == os.getppid():
            threading.Thread(target=_end_with_parent, args=(launcher,), daemon=True).start()
        elif launcher and not _is_alive(launcher):  # it was killed while this process was importing
            _end_as_orphan()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        """Starts the other processes with all of the standard variables; Lightning leaves out RANK."""
        if self.num_processes * self.num_nodes == 1:
            # nobody to meet; variables left behind would tell the next Trainer of this process that it was launched
            return
        self._check_can_spawn_children()
        cluster = self.cluster_environment
        os.environ["MASTER_ADDR"] = cluster.main_address
        os.environ["MASTER_PORT"] = str(cluster.main_port)
        os.environ["NODE_RANK"] = str(cluster.node_rank())
        os.environ["LOCAL_RANK"] = str(cluster.local_rank())
        os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        first = cluster.node_rank() * self.num_processes
        os.environ["RANK"] = str(first)
        # keeps two jobs apart that happen to choose one port; with several nodes nobody could agree on one
        if self.num_nodes == 1:
            os.environ.setdefault(JOB_VARIABLE, uuid.uuid4().hex)
        for local_rank in range(1, self.num_processes):
            command, directory = self.command(local_rank)
            environment = os.environ | {
                "LOCAL_RANK": str(local_rank),
                "RANK": str(first + local_rank),
                _LAUNCHER_PID: str(os.getpid()),
            }
            self.procs.append(subprocess.Popen(command, env=environment, cwd=directory))
        if self.procs:
            atexit.register(self._end_children)

    def command(self, local_rank: int) -> tuple[Sequence[str], str | None]:
        """The command line of a further process and its working directory."""
        module = sys.modules["__main__"]
        hydra_config = sys.modules.get("hydra.core.hydra_config")
        if hydra_config is not None and hydra_config.HydraConfig.initialized():
            command: tuple[Sequence[str], str] = self.names.hydra_command(local_rank)
            return command
        if module.__spec__ is None:
            return [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]], None
        return [sys.executable, "-m", module.__spec__.name, *sys.argv[1:]], None

    def _end_children(self) -> None:
        failed = self.failed or getattr(sys, "last_type", None) is not None
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if failed else None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        codes = [process.returncode for process in self.procs]
        if any(codes) and not failed:
            print(f"collective_strategy: the launched processes ended with {codes}; see their output.", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(next(code for code in codes if code) & 0xFF or 1)


def _end_with_parent(parent: int) -> None:
    """Ends this launched process when the one that launched it was killed; one that ends by itself waits for us."""
    while os.getppid() == parent:
        time.sleep(1.0)
    _end_as_orphan()


def _end_as_orphan() -> NoReturn:
    print("collective_strategy: the launching process is gone; this rank ends.", file=sys.stderr, flush=True)
    os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class ProcessLauncherBehaviour(_MultiProcessingLauncher):
    """Spawns or forks the ranks; weights, metrics, progress and the best checkpoint's path come back."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any | None = None, **kwargs: Any) -> Any:
        # The results that come back include the progress of the loops, which is what Lightning lacks for a second fit
        # (https://github.com/Lightning-AI/pytorch-lightning/issues/18775).
        self._already_fit = False
        before = {name: os.environ.get(name) for name in ("MASTER_PORT", "LOCAL_RANK")}
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            # the port belongs to this job; the next one chooses its own
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            cluster = self._strategy.cluster_environment
            if isinstance(cluster, ScriptEnvironmentBehaviour):
                cluster._main_port = -1

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        finally:
            # a worker process leaves without running exit handlers
            self._strategy.collective.teardown()  # type: ignore[attr-defined]

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        extra["fit_loop_state"] = trainer.fit_loop.state_dict()
        callback = trainer.checkpoint_callback
        extra["checkpoint_paths"] = {
            name: getattr(callback, name) for name in ("best_model_score", "last_model_path") if hasattr(callback, name)
        }
        score = extra["checkpoint_paths"].get("best_model_score")
        if isinstance(score, torch.Tensor):
            extra["checkpoint_paths"]["best_model_score"] = float(score)
        return extra

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        for name, value in extra["checkpoint_paths"].items():
            setattr(trainer.checkpoint_callback, name, torch.tensor(value) if isinstance(value, float) else value)
        trainer.fit_loop.load_state_dict(extra["fit_loop_state"])
        # load_state_dict means "resume" to the loops, but the run that made this state has ended
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
            loop._restarting = False
        for inner in ("automatic_optimization", "manual_optimization"):
            getattr(trainer.fit_loop.epoch_loop, inner)._restarting = False

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        path = worker_output.weights_path
        if path is not None:
            state = torch.load(path, map_location="cpu", weights_only=True)
            own = trainer.lightning_module.state_dict()
            # Layers made in setup() exist in the workers only, perhaps under the name of an older one. What fits is
            # loaded (by Lightning); what does not is named.
            misfits = [name for name, value in state.items() if name in own and own[name].shape != value.shape]
            unknown = [name for name in state if name not in own]
            if misfits or unknown:
                log.warning(
                    "The trained weights %s have no place in the module of the main process, where setup() has not run."
                    " They are in the checkpoint.",
                    ", ".join(misfits + unknown),
                )
            for name in misfits:
                del state[name]
            if misfits:
                torch.save(state, path)
        super()._recover_results_in_main_process(worker_output, trainer)
