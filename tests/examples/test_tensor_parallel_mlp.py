"""The tensor-parallel MLP is one process' MLP, and f and g are both needed for that."""

import pytest
from running import load, on_ranks, output_of_script, without_gradient_sum

example = load("tensor_parallel_mlp")


@pytest.mark.parametrize("processes", [1, 2])
def test_python_and_torchrun_start_it(processes):
    output = output_of_script("tensor_parallel_mlp", processes)
    assert output.count(f"Tensor-parallel MLP: {processes} ranks and one process") == 1, "only the first rank prints"
    assert "gradient of the input" in output


@pytest.mark.parametrize("ranks", [2, 3])  # ten hidden features: 5 and 5, or 4, 3 and 3
def test_result_and_gradients_are_those_of_one_process(ranks):
    differences = on_ranks(ranks, example.differences)
    assert max(differences.values()) < 1e-12, differences


def test_groups_side_by_side_do_not_disturb_each_other():
    differences = on_ranks(4, lambda collective: example.differences(collective["model"]), mesh={"data": 2, "model": 2})
    assert max(differences.values()) < 1e-12, differences


def test_without_f_the_result_is_right_and_the_gradients_are_not():
    differences = on_ranks(2, lambda collective: example.differences(without_gradient_sum(collective)))
    assert differences["result"] < 1e-12
    assert differences["gradient of the input"] > 1e-2
    assert differences["gradients of the weights, as they are"] > 1e-2


def test_summing_once_more_instead_of_g_multiplies_gradients():
    def summed_twice(collective):
        all_reduce = collective.all_reduce
        collective.all_reduce = lambda x, op="sum", to=None: all_reduce(x, op, to=to and "replicate")
        return example.differences(collective)

    differences = on_ranks(2, summed_twice)
    assert differences["result"] < 1e-12
    assert differences["gradients of the weights, as they are"] > 1e-2
