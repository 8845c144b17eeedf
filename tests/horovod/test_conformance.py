"""The suite that every backend must pass, unchanged, on Horovod."""

from collective_strategy.testing.conformance import CollectiveConformance


class TestHorovod(CollectiveConformance):
    backend = "horovod"
