"""Attention around the ring is one process' attention, whichever way the mask cuts it."""

import pytest
import torch
from running import load, on_ranks, output_of_main, without_gradient_sum

example = load("ring_attention")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_compares_itself_with_one_process(processes):
    output = output_of_main(example, processes)
    assert f"\nCausal ring attention: {processes} ranks and one process" in output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_result_and_gradients_are_those_of_one_process(ranks, causal):
    differences = on_ranks(ranks, example.differences, causal)
    assert max(differences.values()) < 1e-12, differences


def test_scores_too_large_for_exp_do_not_overflow():
    def with_large_scores(collective):
        heads = torch.ones(1, 2, 4, dtype=torch.float64) * 40 * (collective.rank + 1)
        return example.ring_attention(heads, heads, heads, collective, causal=False).tolist()

    # The largest keys are rank 1's, 80; e^(-scores' difference) of the others vanishes.
    assert on_ranks(2, with_large_scores) == [[[80.0] * 4] * 2]


def test_keys_and_values_that_travel_without_gradient_are_noticed():
    def one_way(collective):
        shift = collective.shift
        collective.shift = lambda x: shift(x.detach())
        return example.differences(collective, False)

    differences = on_ranks(2, one_way)
    assert differences["result"] < 1e-12
    assert differences["gradient of the input"] > 1e-3


def test_weights_need_the_sum_of_all_tokens_gradients():
    differences = on_ranks(2, lambda collective: example.differences(without_gradient_sum(collective), False))
    assert differences["gradient of the input"] < 1e-12
    assert differences["gradients of the weights, as they are"] > 1e-2
