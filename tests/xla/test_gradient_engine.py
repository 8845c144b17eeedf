"""The tests of the gradient engine hold on XLA:CPU devices too.

Not here: reentrant checkpoints (torch.utils.checkpoint does not know the device), sparse gradients and complex128
(torch_xla lacks them), compiled modules, and what is about packed buckets.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gradients"))

from test_engine import (  # noqa: F401
    test_a_backward_inside_backward,
    test_a_gradient_asked_for_inside_leaves_nothing,
    test_a_gradient_penalty,
    test_create_graph_gives_a_reduced_gradient_without_a_graph,
    test_local_increments_leave_the_reduced_part_equal_bit_by_bit,
    test_several_backwards_in_one_context_add_up,
    test_several_backwards_of_one_graph_add_up,
)
from test_engine_changes import (  # noqa: F401
    test_a_backward_on_top_of_reduced_gradients,
    test_a_gan_that_toggles_for_50_steps_agrees_twice,
    test_a_local_gradient_of_a_weight_that_is_frozen_afterwards_is_reduced,
    test_freezing_and_unfreezing,
    test_old_gradients_of_a_frozen_weight_stay,
    test_replaced_and_converted_weights_are_found,
)
from test_engine_kinds import (  # noqa: F401
    test_narrow_gradients_can_travel_wide,
    test_weights_without_elements_and_with_odd_strides,
    test_wide_gradients_can_travel_narrow,
)
from test_norms import (  # noqa: F401
    test_a_value_that_is_not_a_number_reaches_every_norm,
    test_an_infinite_value_reaches_every_norm,
    test_clipping_to_one,
    test_norms_count_replicas_once_and_pieces_all,
    test_pieces_over_two_axes,
)

from collective_strategy.collectives.registry import BACKEND_VARIABLE


@pytest.fixture(autouse=True)
def on_xla_devices(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "xla")
