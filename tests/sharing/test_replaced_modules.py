"""Marks over conversions that put other modules in the place of marked ones."""

import pytest
from torch import nn

from collective_strategy.sharing import record_marks, resolve_roles, restore_marks, shared


def shared_names(module, **options):
    return [name for name, role in resolve_roles(module, ("model",), **options).items() if role.replicated_over]


def test_synchronised_batch_norm_keeps_the_mark():
    module = nn.Sequential(nn.Conv2d(1, 2, 1), shared(nn.BatchNorm2d(2), over="model"))
    recorded = record_marks(module)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    assert shared_names(converted) == []  # what would happen
    restore_marks(converted, recorded)
    restore_marks(converted, recorded)
    assert shared_names(converted) == ["1.weight", "1.bias"]
    assert shared_names(converted, buffers=True) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_the_root_itself_may_be_replaced():
    norm = shared(nn.BatchNorm2d(2), over="model")
    recorded = record_marks(norm)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    restore_marks(converted, recorded)
    assert shared_names(converted) == ["weight", "bias"]


def test_a_marked_module_that_is_gone_is_refused():
    module = nn.Sequential(nn.Linear(1, 1), shared(nn.Linear(1, 1), over="model"))
    recorded = record_marks(module)
    with pytest.raises(
        ValueError, match=r"the module '1' was marked shared\(over='model', grad='sum'\), but no module"
    ):
        restore_marks(nn.Sequential(nn.Linear(1, 1)), recorded)
