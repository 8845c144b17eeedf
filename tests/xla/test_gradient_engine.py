"""The tests of the gradient engine and of shared weights, unchanged, on XLA:CPU devices; what is not here says why."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gradients"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cases"))

import test_different_models
import test_engine
import test_engine_beside_collectives
import test_engine_changes
import test_engine_counts
import test_engine_kinds
import test_equals_one_process
import test_norms
import test_random_sequences
import test_scaling_fit
import test_shared_weights

from collective_strategy.collectives.registry import BACKEND_VARIABLE

MODULES = (
    test_engine,
    test_engine_changes,
    test_engine_kinds,
    test_norms,
    test_engine_counts,
    test_scaling_fit,
    test_shared_weights,
    test_equals_one_process,
    test_different_models,
    test_random_sequences,
    test_engine_beside_collectives,
)
NO_BUCKETS = "gradients are not packed on XLA and leave when backward ends: one operation on a list per group"
NO_SPARSE = "torch_xla has no sparse tensors, see test_limits"
NO_COMPILER = "torch does not compile in ranks that are threads, see docs/xla.md"
NOT_HERE = {
    "test_a_compiled_module": NO_COMPILER,
    "test_compiled_autograd": NO_COMPILER,
    "test_a_bucket_is_sent_with_its_last_gradient_in_whatever_order_they_come": NO_BUCKETS,
    "test_a_bucket_whose_last_weight_is_left_out_goes_with_the_next": NO_BUCKETS,
    "test_a_buffer_is_used_again_but_never_while_a_gradient_in_it_is_alive": NO_BUCKETS,
    "test_a_gradient_is_a_tensor_of_its_own_to_autograd": NO_BUCKETS,
    "test_all_buckets_but_the_last_two_are_sent_before_the_last_hook": NO_BUCKETS,
    "test_an_exception_after_buckets_were_sent_ends_the_reducer": NO_BUCKETS,
    "test_gradients_lie_in_the_buckets_memory_which_is_used_again_when_nobody_holds_them": NO_BUCKETS,
    "test_one_all_reduce_per_bucket_and_none_on_inner_micro_batches": NO_BUCKETS,
    "test_reentrant_checkpoints_are_overlapped_once_they_are_known": NO_BUCKETS,
    "test_sparse_and_complex_gradients_have_a_norm": NO_SPARSE,
    "test_sparse_gradients_stay_sparse_beside_dense_ones": NO_SPARSE,
}
SHORT = (test_engine, test_engine_changes, test_engine_kinds, test_norms, test_engine_counts)
FOUND = set()

for module in MODULES:
    for name, test in list(vars(module).items()):
        if name.startswith("test_") and callable(test):
            FOUND.add(name)
            if name not in NOT_HERE:
                globals()[name] = test if module in SHORT else pytest.mark.extended(test)


@pytest.fixture(autouse=True)
def on_xla_devices(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "xla")


def test_what_is_not_here_exists():
    assert set(NOT_HERE) <= FOUND
