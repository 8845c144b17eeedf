"""The examples' modules stay equal to one process when they are compiled or recompute their activations."""

import pytest
import torch
from running import load
from torch.utils.checkpoint import checkpoint

from collective_strategy.testing import run_ranks

EXAMPLES = {
    "clip_loss": ("LocalRowsLoss", lambda example, c: example.differences(c, example.LocalRowsLoss)),
    "tensor_parallel_mlp": ("TensorParallelBlock", lambda example, c: example.differences(c)),
    "sequence_parallel_mlp": ("SequenceParallelBlock", lambda example, c: example.differences(c)),
    "ring_attention": ("RingSelfAttention", lambda example, c: example.differences(c, True)),
    "moe_dispatch": ("ExpertParallel", lambda example, c: example.differences(c, 11, True)),
    "domain_parallel_convolution": ("DomainParallelConv2d", lambda example, c: example.differences(c, "circular")),
}
TRANSFORMS = {
    "recomputed": lambda forward: lambda self, *inputs: checkpoint(forward, self, *inputs, use_reentrant=False),
    "recomputed, reentrant": lambda forward: (
        lambda self, *inputs: checkpoint(forward, self, *inputs, use_reentrant=True)
    ),
    "compiled": lambda forward: torch.compile(forward, backend="aot_eager"),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transformed_module_equals_one_process(name, transform):
    def differences(_collective):
        example = load(name)
        kind, compare = EXAMPLES[name]
        module = getattr(example, kind)
        calls = []
        transformed = TRANSFORMS[transform](module.forward)

        def forward(self, *inputs):
            calls.append(1)
            return transformed(self, *inputs)

        module.forward = forward
        return compare(example, _collective), len(calls)

    for outcome in run_ranks(2, differences, fresh=True, timeout=90):
        found, calls = outcome.result()
        assert calls > 0
        assert max(found.values()) < 1e-12, found
