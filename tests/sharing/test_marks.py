"""Which weights a mark means, in all its forms, and what it survives. No ranks are needed."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from collective_strategy import SharedModule, private, sharded, shared, unmark
from collective_strategy.sharing import Mark, marks_of, resolve_roles

SUM, MEAN, NONE = ("shared", "sum"), ("shared", "mean"), ("shared", "none")
PIECE, OWN, UNMARKED = ("sharded", "none"), ("private", "none"), None


def roles(module, axis="model", axes=("model",), **options):
    """Kind and reduction over an axis, by name."""
    found = resolve_roles(module, axes, **options)
    return {name: (mark.kind, mark.grad) if (mark := role.mark(axis)) else None for name, role in found.items()}


def two():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@shared(over="model")
class Norm(nn.Module):
    """Decorated."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        if affine:
            self.scale = nn.Parameter(torch.ones(2))


# Forms


def test_a_module_is_returned_as_it_is():
    layer = nn.Linear(2, 2)
    assert shared(layer, over="model") is layer
    assert SharedModule(layer, over="model") is layer
    assert type(layer) is nn.Linear
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert roles(layer) == {"weight": SUM, "bias": SUM}
    assert marks_of(layer) == (Mark("shared", ("model",), "sum"),)  # once, although marked twice


def test_a_class_is_decorated():
    class Special(Norm):
        pass

    module = nn.ModuleDict({"norm": Norm(), "special": Special(), "plain": nn.LayerNorm(2)})
    assert roles(module) == {
        "norm.scale": SUM,
        "special.scale": SUM,
        "plain.weight": UNMARKED,
        "plain.bias": UNMARKED,
    }
    assert roles(Norm(affine=False)) == {}


@pytest.mark.parametrize("grad", ["sum", "mean", "none"])
def test_reductions(grad):
    assert roles(SharedModule(nn.Linear(1, 1, bias=False), over="model", grad=grad)) == {"weight": ("shared", grad)}


def test_names_and_patterns():
    assert roles(shared(two(), "1.weight", "*.bias", over="model")) == {
        "0.weight": UNMARKED,
        "0.bias": SUM,
        "1.weight": SUM,
        "1.bias": SUM,
    }
    assert roles(shared(two(), over="model", exclude=["0.*"])) == {
        "0.weight": UNMARKED,
        "0.bias": UNMARKED,
        "1.weight": SUM,
        "1.bias": SUM,
    }
    assert roles(shared(two(), over="model", exclude="*bias"))["0.bias"] is UNMARKED


def test_several_axes():
    layer = shared(nn.Linear(1, 1, bias=False), over=("tall", "wide"))
    (role,) = resolve_roles(layer, ("tall", "wide", "deep")).values()
    assert role.replicated_over == role.reduced_over == ("tall", "wide")
    assert role.mark("deep") is None

    layer = sharded(shared(nn.Linear(1, 1, bias=False), over="tall", grad="mean"), "weight", over="wide", dim=0)
    (role,) = resolve_roles(layer, ("tall", "wide")).values()
    assert (role.replicated_over, role.averaged_over) == (("tall",), ("tall",))
    assert role.mark("wide").kind == "sharded"


def test_a_union_of_axes_by_its_name():
    layer = shared(nn.Linear(1, 1, bias=False), over="model")
    (role,) = resolve_roles(layer, ("reader", "lane"), unions={"model": ("reader", "lane")}).values()
    assert role.replicated_over == ("reader", "lane")


def test_sharded_with_parts():
    layer = sharded(nn.Linear(2, 12), "weight", over="model", dim=0, parts=[4, 4, 4])
    assert roles(layer) == {"weight": PIECE, "bias": UNMARKED}
    mark = resolve_roles(layer, ("model",))["weight"].mark("model")
    assert (mark.dim, mark.parts) == (0, (4, 4, 4))


def test_private_and_unmarked():
    module = nn.ModuleDict({"head": private(nn.Linear(1, 1, bias=False)), "body": nn.Linear(1, 1, bias=False)})
    assert roles(module) == {"head.weight": OWN, "body.weight": UNMARKED}
    assert roles(module, unmarked="shared") == {"head.weight": OWN, "body.weight": SUM}
    with pytest.raises(ValueError, match=r"parameter body\.weight has no mark, and unmarked='error'"):
        roles(module, unmarked="error")
    assert roles(nn.Linear(1, 1), axes=(), unmarked="error") == {"weight": UNMARKED, "bias": UNMARKED}


def test_unmark():
    module = shared(nn.Sequential(private(nn.Linear(1, 1)), Norm()), over="model")
    assert roles(unmark(module, recurse=False)) == {"0.weight": OWN, "0.bias": OWN, "1.scale": SUM}
    assert roles(unmark(module)) == {"0.weight": UNMARKED, "0.bias": UNMARKED, "1.scale": SUM}  # the class stays marked
    assert unmark(module) is module


# Which mark wins


def test_an_inner_mark_wins_over_an_outer_one_axis_by_axis():
    module = two()
    shared(module, over=("model", "space"))
    private(module[0])
    shared(module[1], "bias", over="space", grad="mean")
    axes = ("model", "space")
    assert roles(module, "model", axes) == {"0.weight": OWN, "0.bias": OWN, "1.weight": SUM, "1.bias": SUM}
    assert roles(module, "space", axes) == {"0.weight": OWN, "0.bias": OWN, "1.weight": SUM, "1.bias": MEAN}


def test_a_second_different_mark_is_refused():
    layer = shared(nn.Linear(1, 1), over="model")
    with pytest.raises(ValueError, match=r"Linear is marked shared\(over='model', grad='sum'\) already; .*grad='mean'"):
        shared(layer, over="model", grad="mean")
    with pytest.raises(ValueError, match="unmark"):
        private(layer) and shared(layer, over=("model", "space"))
    sharded(unmark(layer), "weight", over="model", dim=0)
    with pytest.raises(ValueError, match="contradicts"):
        sharded(layer, "weight", over="model", dim=1)


def test_marks_that_overlap_in_part_are_refused_when_they_are_resolved():
    layer = shared(nn.Linear(1, 1), over="model")
    sharded(layer, "weight", over="model", dim=0)
    with pytest.raises(ValueError, match="parameter weight has two marks on the root module") as raised:
        roles(layer)
    assert "shared(over='model', grad='sum') and sharded(over='model', dim=0)" in str(raised.value)


def test_a_tied_weight_has_one_role():
    module = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "output": nn.Linear(2, 3, bias=False)})
    module["output"].weight = module["embedding"].weight
    shared(module["embedding"], over="model")
    with pytest.raises(ValueError, match=r"tied weight embedding\.weight = output\.weight has two roles") as raised:
        roles(module)
    assert "(on embedding)" in str(raised.value)
    shared(module["output"], over="model")
    assert roles(module) == {"embedding.weight": SUM}


# What is refused


def test_a_bare_parameter_is_refused_and_the_message_shows_the_form():
    for mark in (
        lambda p: shared(p, over="model"),
        lambda p: SharedModule(p, over="model"),
        lambda p: sharded(p, "weight", over="model", dim=0),
        private,
    ):
        with pytest.raises(TypeError, match=r"bare Parameter.*\(module, 'name', over=\.\.\.\)"):
            mark(nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: shared("x", over="model"), TypeError, "marks an nn.Module, got str"),
        (lambda: shared(over="model")(int), TypeError, "decorates a subclass of nn.Module"),
        (lambda: shared(nn.Linear(1, 1), over="model", grad="max"), ValueError, "grad='max' is not one of 'sum'"),
        (lambda: shared(nn.Linear(1, 1), over=()), ValueError, "must name an axis"),
        (lambda: shared(nn.Linear(1, 1), over=("a", "a")), ValueError, "each once"),
        (lambda: sharded(nn.Linear(1, 1), over="model", dim=0), ValueError, "needs the names"),
        (lambda: sharded(nn.Linear(1, 1), "weight", over="model", dim=True), TypeError, "dim must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused_where_the_mark_is_made(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


@pytest.mark.parametrize("axis", ["modle", "data"])
def test_an_axis_that_the_mesh_has_not_is_refused_with_those_it_has(axis):
    module = nn.Sequential(shared(nn.Linear(1, 1), over=axis))
    with pytest.raises(ValueError, match=rf"0 \(Linear\) is marked .*no model axis '{axis}'") as raised:
        roles(module, axes=("model", "space"))
    assert "['model', 'space']" in str(raised.value)


def test_a_mark_that_finds_no_parameter_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"for \['wieght'\], but no parameter of it matches.*\['weight', 'bias'\]"):
        roles(shared(nn.Linear(1, 1), "wieght", over="model"))
    with pytest.raises(ValueError, match="no parameter of it matches"):
        roles(shared(nn.ReLU(), over="model"))
    statistics = shared(nn.BatchNorm1d(2, affine=False), over="model")
    assert roles(statistics) == {}
    assert set(roles(statistics, buffers=True).values()) == {SUM}


# What marks survive


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    return module


def compiled(module):
    return torch.compile(module, backend="eager")


def part_compiled(module):
    module[0] = compiled(module[0])
    return module


def pruned(module):
    prune.l1_unstructured(module[0], "weight", 0.5)
    return module


def renewed(module):
    module[0].weight = nn.Parameter(torch.ones(2, 2))
    return module


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "load_state_dict(assign)": assigned,
    "another parameter": renewed,
    "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "dtype": lambda module: module.half(),
    "compile": compiled,
    "compile a part": part_compiled,
    "prune": pruned,
    "weight_norm": lambda module: weight_norm(module[0]) and module,
    "old weight_norm": lambda module: nn.utils.weight_norm(module[0]) and module,
    "spectral_norm": lambda module: spectral_norm(module[0]) and module,
    "orthogonal": lambda module: orthogonal(module[0]) and module,
    "parametrize": lambda module: parametrize.register_parametrization(module[0], "weight", nn.Softplus()) and module,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
@pytest.mark.parametrize("marked_outside", [False, True], ids=["on the layer", "on the model"])
def test_marks_survive(change, marked_outside):
    """Only the first layer's weight is marked: whatever it is called afterwards, it alone keeps its role."""
    module = two()
    shared(module, "0.weight", over="model") if marked_outside else shared(module[0], "weight", over="model")
    found = roles(change(module))
    marked = [name for name, role in found.items() if role == SUM]
    assert marked
    assert all("0" in name and ("weight" in name) for name in marked)
    assert len(found) - len(marked) == 3  # the two biases and the second weight


def test_what_a_norm_or_mask_keeps_beside_a_marked_weight_has_its_role():
    layer = spectral_norm(shared(nn.Linear(2, 2), "weight", over="model"))
    assert set(roles(layer, buffers=True).values()) == {SUM}
    layer = shared(nn.Linear(2, 2), "weight", over="model")
    prune.l1_unstructured(layer, "weight", 0.5)
    assert roles(layer, buffers=True) == {"weight_mask": SUM}


def test_a_lazy_layer_keeps_its_mark():
    layer = shared(nn.LazyLinear(2), over="model")
    layer(torch.ones(1, 3))
    assert roles(layer) == {"weight": SUM, "bias": SUM}
