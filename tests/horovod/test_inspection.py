"""The truth tools say on this backend what they say on torch.distributed."""

import sys
from pathlib import Path

from collective_strategy.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "inspection"))
from on_backends import MESH, check, tools_on_a_rank


def test_the_tools_say_the_same_on_every_backend():
    ranks = run_ranks(4, tools_on_a_rank, backend="horovod", mesh=MESH, timeout=60, fresh=True)
    check([outcome.result() for outcome in ranks])
