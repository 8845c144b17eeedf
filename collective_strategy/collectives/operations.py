"""The table of operations: the one place that says which collectives exist and what each means.

The documentation page, the conformance suite's parameters and the check that no method was forgotten are made from
`OPERATIONS`. The types of the differentiable pairs are those of local SPMD types: *replicate* (equal values whose
gradients are contributions), *invariant* (equal values, one computation repeated), *varying* (another value on each
rank), *partial* (the meaning is the sum over the ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

SpmdType = Literal["replicate", "invariant", "varying", "partial"]


class ReduceOp(str, Enum):
    """Reduction of the values of all ranks, element by element. ``"avg"`` is another spelling of ``"mean"``."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    ALL = "all"
    ANY = "any"

    @classmethod
    def parse(cls, op: object) -> ReduceOp:
        """Reads a name in any case.

        Raises:
            TypeError: ``op`` is not a string.
            ValueError: the name is unknown; the message lists the valid ones.
        """
        if not isinstance(op, str):
            raise TypeError(f"the reduction must be given by name, got {op!r}. Valid names: {cls.names()}.")
        name = op.value if isinstance(op, cls) else op.lower()
        name = "mean" if name == "avg" else name
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"unknown reduction {op!r}. Valid names: {cls.names()}.") from None

    @classmethod
    def names(cls) -> str:
        """The valid names, for messages."""
        return ", ".join(op.value for op in cls)


@dataclass(frozen=True)
class Pair:
    """A forward and its gradient: with which types, in which words.

    ``source`` and ``destination`` are the types of input and output; ``forward`` and ``backward`` say what rank r
    computes; ``known_as`` names the same pair in other libraries.
    """

    source: SpmdType
    destination: SpmdType
    forward: str
    backward: str
    known_as: str = ""


@dataclass(frozen=True)
class Operation:
    """One row: a public method of `Collective`.

    Args:
        name: The method.
        signature: Its parameters, as `inspect.signature` prints them without annotations and ``self``.
        result: What every rank gets.
        kind: ``"data"`` (tensors and trees of them), ``"object"``, ``"in_place"``, ``"decision"`` or ``"group"``.
        pairs: The differentiable pairs by the value of ``to`` / ``of`` (empty key where there is no choice). An
            operation without pairs refuses a tensor that requires grad.
    """

    name: str
    signature: str
    result: str
    kind: Literal["data", "object", "in_place", "decision", "group", "point_to_point"] = "data"
    pairs: tuple[tuple[str, Pair], ...] = ()


OPERATIONS: tuple[Operation, ...] = (
    Operation("barrier", "(name=None)", "returns when all ranks have called it", "decision"),
    Operation(
        "all_gather",
        "(x, dim=None, *, ragged=False, sizes=None, to=None)",
        "dim=None: every rank's tensor along a new leading dim, (world_size, *x.shape); dim=k: concatenated along k; "
        "ragged: the list of exact pieces, or their concatenation along k",
        pairs=(
            (
                "replicate",
                Pair(
                    "varying",
                    "replicate",
                    "all x_k, in rank order",
                    "reduce_scatter of the gradients' sum",
                    "gather from sequence-parallel region, torch.distributed.nn.all_gather",
                ),
            ),
            (
                "invariant",
                Pair(
                    "varying",
                    "invariant",
                    "all x_k, in rank order",
                    "own slice of the gradient",
                    "gather from tensor-parallel region",
                ),
            ),
        ),
    ),
    Operation(
        "broadcast",
        "(x, src=0, *, to=None)",
        "the value of rank src",
        pairs=(
            ("replicate", Pair("varying", "replicate", "x_src", "the gradients' sum at src, zeros elsewhere")),
            ("invariant", Pair("varying", "invariant", "x_src", "own gradient at src, zeros elsewhere")),
        ),
    ),
    Operation(
        "all_reduce",
        "(x, op='sum', *, to=None)",
        "the reduction over all ranks",
        pairs=(
            ("replicate", Pair("partial", "replicate", "sum of x_k", "sum of the gradients", "psum")),
            ("invariant", Pair("partial", "invariant", "sum of x_k", "the gradient as it is", "Megatron's g")),
        ),
    ),
    Operation(
        "reduce",
        "(x, op='mean', dst=None, *, to=None)",
        "dst=None: the reduction on every rank, as all_reduce; dst=k: on rank k, None elsewhere",
    ),
    Operation(
        "gather",
        "(x, dst=0, dim=None, *, ragged=False)",
        "as all_gather on rank dst, None elsewhere",
    ),
    Operation(
        "reduce_scatter",
        "(x, op='sum', dim=0, *, sizes=None)",
        "own chunk (along dim) of the reduction",
        pairs=(("", Pair("partial", "varying", "own chunk of the sum of x_k", "all_gather of the gradients")),),
    ),
    Operation(
        "scatter",
        "(x, src=0, dim=0, *, sizes=None)",
        "own chunk (along dim) of the tensor of rank src",
        pairs=(
            (
                "",
                Pair(
                    "varying", "varying", "own chunk of x_src", "the chunks' gradients gathered at src, zeros elsewhere"
                ),
            ),
        ),
    ),
    Operation(
        "all_to_all",
        "(x, split_dim=0, concat_dim=0, *, sizes=None)",
        "chunk r of every rank, concatenated along concat_dim",
        pairs=(("", Pair("varying", "varying", "chunk k to rank k", "the inverse exchange")),),
    ),
    Operation(
        "replicate",
        "(x)",
        "x; nothing is sent in forward",
        pairs=(("", Pair("invariant", "replicate", "x", "sum of the gradients", "Megatron's f")),),
    ),
    Operation(
        "shard",
        "(x, dim=0, *, sizes=None, of='invariant')",
        "own chunk (along dim) of x; nothing is sent in forward",
        pairs=(
            (
                "invariant",
                Pair("invariant", "varying", "own chunk", "all_gather of the gradients", "Megatron's scatter"),
            ),
            ("replicate", Pair("replicate", "varying", "own chunk", "own gradient between zeros")),
        ),
    ),
    Operation(
        "shift",
        "(x, offset=1, wrap=True)",
        "the tensor of rank r - offset; zeros where there is none (wrap=False)",
        pairs=(("", Pair("varying", "varying", "x of rank r - offset", "shift by -offset")),),
    ),
    Operation(
        "permute",
        "(x, pairs)",
        "the tensor of the rank that sends to r, zeros if none",
        pairs=(("", Pair("varying", "varying", "x of the source", "permute by the inverse pairs", "ppermute")),),
    ),
    Operation(
        "halo_exchange",
        "(x, dim, width, *, wrap=False)",
        "x with the neighbours' borders on both sides along dim; zeros at the ends of the domain (wrap=False)",
        pairs=(("", Pair("varying", "varying", "border, x, border", "borders' gradients added to the neighbours'")),),
    ),
    Operation(
        "exchange_sizes",
        "(sizes)",
        "a whole number: the list of every rank's; a list with one per rank: what each rank has for this one",
        "decision",
    ),
    Operation("send", "(x, dst)", "None", "point_to_point"),
    Operation("recv", "(like, src)", "the tensor that rank src sent, of like's shape and dtype", "point_to_point"),
    Operation("all", "(flag)", "True if the flag is true on every rank", "decision"),
    Operation("any", "(flag)", "True if the flag is true on some rank", "decision"),
    Operation("split", "(color)", "the sub-collective of the ranks that gave the same color", "group"),
    Operation("duplicate", "(axes=None)", "a collective of the same ranks with communication of its own", "group"),
    Operation("all_gather_object", "(obj)", "the list of every rank's object", "object"),
    Operation("gather_object", "(obj, dst=0)", "the list of every rank's object on rank dst, None elsewhere", "object"),
    Operation("broadcast_object", "(obj, src=0)", "the object of rank src", "object"),
    Operation("scatter_object", "(objs, src=0)", "entry r of the list that rank src gave", "object"),
    Operation("all_reduce_", "(tensor, op='sum', *, async_op=False)", "tensor, reduced in place", "in_place"),
    Operation("broadcast_", "(tensor, src=0, *, async_op=False)", "tensor, overwritten with src's value", "in_place"),
    Operation("all_gather_", "(output, tensor, *, async_op=False)", "output, (world_size, *tensor.shape)", "in_place"),
    Operation(
        "reduce_scatter_",
        "(output, tensor, op='sum', *, async_op=False)",
        "output, own chunk of the reduction",
        "in_place",
    ),
)


def operation(name: str) -> Operation:
    """The row of a method."""
    return next(row for row in OPERATIONS if row.name == name)
