"""The sequence-parallel MLP on seven tokens is one process' MLP."""

import pytest
from running import load, on_ranks, output_of_main, without_gradient_sum

example = load("sequence_parallel_mlp")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_compares_itself_with_one_process(processes):
    assert f"7 tokens: {processes} ranks and one process" in output_of_main(example, processes)


@pytest.mark.parametrize("ranks", [2, 3])  # 4 and 3 tokens, or 3, 2 and 2
def test_result_and_gradients_are_those_of_one_process(ranks):
    differences = on_ranks(ranks, example.differences)
    assert max(differences.values()) < 1e-12, differences


def test_a_rank_without_tokens_takes_part():
    def one_token_for_two_ranks(collective):
        example.TOKENS = 1
        return example.differences(collective)

    differences = on_ranks(2, one_token_for_two_ranks)
    assert max(differences.values()) < 1e-12, differences


def test_norms_and_biases_need_the_sum_of_all_tokens_gradients():
    differences = on_ranks(2, lambda collective: example.differences(without_gradient_sum(collective)))
    assert differences["gradient of the input"] < 1e-12
    assert differences["gradients of the weights, as they are"] > 1e-2


def test_gathering_tokens_as_if_all_ranks_went_on_alike_loses_gradients():
    def own_slice(collective):
        all_gather = collective.all_gather
        collective.all_gather = lambda x, dim, sizes, to: all_gather(x, dim, sizes=sizes, to="invariant")
        return example.differences(collective)

    differences = on_ranks(2, own_slice)
    assert differences["result"] < 1e-12
    assert differences["gradient of the input"] > 1e-2
