"""What may be missing from the installation, and what is loaded when."""

import os
import subprocess
import sys
import textwrap
from importlib.resources import files

import pytest

ABSENCE = """
import sys

class AllBut:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [AllBut(finder) for finder in sys.meta_path]
"""


def run_without(absent, script):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    text = ABSENCE.format(absent=absent) + textwrap.dedent(script)
    finished = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=110
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


def test_collectives_need_torch_only():
    script = """
    import torch
    import collective_strategy
    with collective_strategy.init() as collective:
        print(collective.all_gather(torch.ones(2)).shape == (1, 2))
    """
    assert run_without(["lightning", "pytorch_lightning", "cloudpickle", "torch_xla", "horovod"], script) == ["True"]


@pytest.mark.parametrize(
    "module", ["collective_strategy", "collective_strategy.collectives", "collective_strategy.testing"]
)
def test_lightning_is_not_loaded_where_it_is_not_used(module):
    script = f"""
    import sys
    import {module}
    print(*[name for name in ("lightning", "pytorch_lightning") if name in sys.modules])
    """
    assert run_without([], script) == []


def test_the_strategy_for_pytorch_lightning_does_not_need_lightning():
    script = """
    from collective_strategy.pytorch_lightning import CollectiveStrategy
    import pytorch_lightning as pl
    trainer = pl.Trainer(devices=1, accelerator="cpu", strategy="collective", logger=False)
    print(type(trainer.strategy) is CollectiveStrategy)
    """
    assert run_without(["lightning"], script) == ["True"]


@pytest.mark.parametrize("first", ["collective_strategy", "lightning"])
def test_the_names_are_registered_whichever_package_is_imported_first(first):
    script = f"""
    import {first}
    import collective_strategy
    import lightning as L
    for name in ("collective", "collective_torch", "collective_single"):
        trainer = L.Trainer(devices=1, accelerator="cpu", strategy=name, logger=False)
        print(type(trainer.strategy) is collective_strategy.CollectiveStrategy)
    """
    assert run_without([], script) == ["True"] * 3


def test_the_package_says_that_it_is_typed():
    assert files("collective_strategy").joinpath("py.typed").is_file()


def test_without_horovod_the_error_has_the_command_that_installs_it():
    script = """
    import collective_strategy
    from collective_strategy.collectives import collective_class
    try:
        collective_class("horovod")
    except ImportError as error:
        print("python -m collective_strategy.install_horovod" in str(error))
    with collective_strategy.init("horovod") as collective:  # one process needs no library
        print(collective.world_size)
    """
    assert run_without(["horovod"], script) == ["True", "1"]
