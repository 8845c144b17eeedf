"""The tools on torch.distributed; tests/horovod and tests/xla do the same there."""

from on_backends import MESH, check, tools_on_a_rank

from collective_strategy.testing import run_ranks


def test_the_tools_say_the_same_on_every_backend():
    check([outcome.result() for outcome in run_ranks(4, tools_on_a_rank, mesh=MESH, timeout=30)])
