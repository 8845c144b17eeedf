"""Three ranks on Horovod; prints what each operation gave, as JSON: rank by rank, a dict."""

import json

import torch

from collective_strategy.testing import run_ranks


def act(collective):
    rank = collective.rank
    x = torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)
    grown = x.clone().requires_grad_()
    (collective.all_gather(grown).sum(0) * (rank + 1)).sum().backward()
    pair = collective.split("alone" if rank == 0 else "pair")
    results = {
        **{op: collective.all_reduce(x, op) for op in ("sum", "mean", "max", "min", "prod")},
        "bfloat16": collective.all_reduce(x.bfloat16()).float(),
        "int64": collective.all_reduce(torch.tensor([2**53 + rank])),
        "bool": collective.all_reduce(torch.tensor([rank == 1, True]), "any"),
        "all_gather": collective.all_gather(x),
        "ragged": collective.all_gather(x[: rank + 1], dim=0, ragged=True),
        "broadcast": collective.broadcast(x, src=1),
        "reduce_scatter": collective.reduce_scatter(x),
        "scatter": collective.scatter(x, src=2),
        "all_to_all": collective.all_to_all(x),
        "shift": collective.shift(x),
        "gradient": grown.grad,
        "group": pair.all_reduce(x),
    }
    plain = {name: value.tolist() for name, value in results.items()}
    return {**plain, "objects": collective.all_gather_object({"rank": rank}), "torch": torch.__version__}


if __name__ == "__main__":
    outcomes = run_ranks(3, act, backend="horovod", timeout=60, fresh=True)
    print(json.dumps([outcome.result() for outcome in outcomes]))
