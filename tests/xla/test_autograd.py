"""The tests of gradients through collectives, unchanged, with tensors on XLA:CPU devices."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "collectives"))

import test_gradients

from collective_strategy.collectives.registry import BACKEND_VARIABLE
from collective_strategy.testing.conformance import CollectiveConformance
from collective_strategy.testing.conformance.suite import templates

PAIRS = tuple(template.name for template in templates() if template.module.endswith(".gradients"))
COMPILING = {"timeout": 150}  # seconds; a hundred programs and more
ADJOINTS = ("gradients_are_adjoints", "every_pair_of_the_table_is_tested")

globals().update({name: test for name, test in vars(test_gradients).items() if name.startswith("test_")})


@pytest.fixture(autouse=True)
def on_xla_devices(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "xla")


class TestAdjointsOnTwoDevices(CollectiveConformance):
    """Each pair with several arguments, its gradient and second derivative."""

    backend = "xla"
    settings = COMPILING
    world_sizes = (2,)
    names = ADJOINTS


@pytest.mark.extended
class TestPairsOnTwoDevices(CollectiveConformance):
    """Strides, siblings, other dtypes."""

    backend = "xla"
    settings = COMPILING
    world_sizes = (2,)
    names = tuple(name for name in PAIRS if name not in ADJOINTS)


@pytest.mark.extended
class TestPairsOnFourDevices(CollectiveConformance):
    """In groups and along the axes of a mesh too."""

    backend = "xla"
    settings = COMPILING
    world_sizes = (4,)
    names = PAIRS
