"""How processes with XLA devices are started, as far as CPU devices can show it: one process, one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = """
import torch
import collective_strategy

with collective_strategy.init("xla") as collective:
    print("rank", collective.rank, "of", collective.world_size)
    print("sum", collective.all_reduce(torch.ones(1).to(collective.device)).item())
"""
FIT = """
import fitted_nets
import lightning as L

if __name__ == "__main__":
    class Telling(L.Callback):
        # a class that pickle cannot find
        def on_train_end(self, trainer, module):
            print(module.last.weight.device.type, "rank", trainer.global_rank, "of", trainer.world_size)

    trainer = fitted_nets.trainer("xla", DEVICES, None, steps=2, callbacks=[Telling()])
    print("launcher", type(trainer.strategy._launcher).__name__)
    module, start = fitted_nets.Net(0, False), fitted_nets.Net(0, False).last.weight
    trainer.fit(module, fitted_nets.DataLoader(fitted_nets.data(1, 32), 4))
    print("steps done:", trainer.global_step, "trained:", bool((module.last.weight != start).all()))
"""
ON_A_TPU_HOST = """
import collective_strategy.collectives.xla_runtime as runtime
import collective_strategy.strategies.xla as strategy

runtime.is_tpu_host = strategy.is_tpu_host = lambda: True
"""


def run(folder, script, torchrun=0):
    """The script's exit code and output; under torchrun with so many processes, or plainly."""
    path = folder / "script.py"
    path.write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    search = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, *launcher, str(path)], cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": search, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"},
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("torchrun", [0, 1])
def test_a_process_with_one_device_works_alone(tmp_path, torchrun):
    code, output = run(tmp_path, PLAIN, torchrun)
    assert code == 0, output
    assert "rank 0 of 1" in output
    assert "sum 1.0" in output


@pytest.mark.parametrize("script", [PLAIN, FIT.replace("DEVICES", "2")], ids=["a collective", "a Trainer"])
def test_several_processes_with_cpu_devices_are_refused(tmp_path, script):
    """Each would be alone without knowing it."""
    code, output = run(tmp_path, script, torchrun=2)
    assert code != 0
    assert "torchrun started 2 processes, of which this is rank 1, but XLA's CPU devices" in output
    assert "steps done" not in output


def test_torchrun_on_a_tpu_host_gives_each_process_its_chip(tmp_path):
    """One process with a CPU device in the place of the chip: it joins torch_xla's runtime and launches nothing."""
    code, output = run(tmp_path, ON_A_TPU_HOST + FIT.replace("DEVICES", "1"), torchrun=1)
    assert code == 0, output
    assert "launcher NoneType" in output
    assert "xla rank 0 of 1" in output
    assert "steps done: 2 trained: True" in output


def test_torch_xla_starts_a_process_per_chip(tmp_path):
    """One, with a CPU device in the place of the chip."""
    code, output = run(tmp_path, ON_A_TPU_HOST + FIT.replace("DEVICES", "1"))
    assert code == 0, output
    assert "launcher ChipLauncher" in output
    assert "xla rank 0 of 1" in output
    assert "steps done: 2 trained: True" in output
