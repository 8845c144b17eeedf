"""The suite that every backend must pass, unchanged, on XLA:CPU devices."""

from collective_strategy.testing.conformance import CollectiveConformance


class TestXLA(CollectiveConformance):
    backend = "xla"
    world_sizes = (2, 4)
