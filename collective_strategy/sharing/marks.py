"""Marks: what a weight is on each axis of the mesh, said where the module is built.

A mark lives on the module, under the parameter's name, because a parameter has no owner it could be found by and is
replaced by many operations (``load_state_dict(assign=True)``, ``to_empty``, parametrizations). Marks are plain data, so
they survive deepcopy and pickling. They are resolved when the gradient plan is made.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from torch import Tensor, nn

Kind = Literal["shared", "sharded", "private"]
GradReduction = Literal["sum", "mean", "none"]
M = TypeVar("M", bound=nn.Module)
C = TypeVar("C", bound=type[nn.Module])

ATTRIBUTE = "_collective_marks"
CLASS_ATTRIBUTE = "_collective_class_marks"
ALL_AXES = "*"


@dataclass(frozen=True)
class Mark:
    """What some parameters of a module are over some axes.

    ``include`` and ``exclude`` are patterns of names relative to the module; ``axes`` may be ``("*",)``, every axis but
    the data axis. ``dim`` and ``parts`` say how a sharded weight is cut.
    """

    kind: Kind
    axes: tuple[str, ...]
    grad: GradReduction = "none"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    dim: int | None = None
    parts: tuple[int, ...] | None = None

    def matches(self, name: str) -> bool:
        """Whether a relative parameter name is meant; parametrized and pruned names count as the original one."""
        names = {name, original_name(name)}
        return any(_match(names, pattern) for pattern in self.include) and not any(
            _match(names, pattern) for pattern in self.exclude
        )

    def describe(self) -> str:
        """As the user wrote it, for messages."""
        over = f"over={self.axes[0]!r}" if len(self.axes) == 1 else f"over={self.axes!r}"
        if self.kind == "shared":
            return f"shared({over}, grad={self.grad!r})"
        if self.kind == "sharded":
            return f"sharded({over}, dim={self.dim})"
        return "private()"


def original_name(name: str) -> str:
    """``"parametrizations.weight.original0"`` -> ``"weight"``; also of pruned, normed and compiled modules' tensors."""
    steps = [step for step in name.split(".") if step != "_orig_mod"]
    if "parametrizations" in steps[:-2]:
        place = steps.index("parametrizations")
        return ".".join([*steps[:place], steps[place + 1]])
    for suffix in ("_orig", "_mask", "_g", "_v", "_u"):
        if steps[-1].endswith(suffix):
            steps[-1] = steps[-1].removesuffix(suffix)
            break
    return ".".join(steps)


@overload
def shared(target: M, /, *names: str, over: str | Sequence[str], grad: GradReduction = ...,
           exclude: Iterable[str] = ...) -> M: ...  # fmt: skip
@overload
def shared(
    *, over: str | Sequence[str], grad: GradReduction = ..., exclude: Iterable[str] = ...
) -> Callable[[C], C]: ...
def shared(
    target: Any = None,
    /,
    *names: str,
    over: str | Sequence[str],
    grad: GradReduction = "sum",
    exclude: Iterable[str] = (),
) -> Any:
    """Marks weights that are equal on all ranks of an axis; returns the module, or a class decorator without one.

    The strategy starts them equal and keeps them equal: their gradients are reduced over the axis, and averaged over
    the data axis, in one all-reduce.

    Args:
        target: A module; its parameters and those of its submodules are meant.
        names: Patterns of parameter names, relative to the module; all if not given.
        over: Axis, axes or union of axes of the mesh. Checked when the plan is made.
        grad: ``"sum"``: each rank computes a part of the gradient (it sees another part of the data or of the
            activations). ``"mean"``: each rank computes the whole gradient; averaging keeps them equal against drift.
            ``"none"``: the gradient is whole on each rank already, nothing is sent.
        exclude: Patterns of names that are not meant.

    Raises:
        TypeError: a bare parameter or something else that is no module.
        ValueError: an unknown ``grad``, or a different mark for the same names and axis.

    Example:
        >>> self.norm = shared(nn.LayerNorm(64), over="model")
        >>> @shared(over="model")
        ... class Norm(nn.Module): ...
    """
    if grad not in ("sum", "mean", "none"):
        raise ValueError(
            f"grad={grad!r} is not one of 'sum' (partial gradients), 'mean' (equal ones), 'none' (whole ones)."
        )
    mark = Mark("shared", _axes(over), grad, names or ("*",), _patterns(exclude))
    if target is not None:
        return _added(target, mark, "shared")

    def decorate(cls: C) -> C:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"@shared(over=...) decorates a subclass of nn.Module, got {cls!r}.")
        marks = [*cls.__dict__.get(CLASS_ATTRIBUTE, ()), mark]
        _refuse_conflicts(marks, cls.__name__)
        setattr(cls, CLASS_ATTRIBUTE, tuple(marks))
        return cls

    return decorate


def SharedModule(
    module: M, *, over: str | Sequence[str], grad: GradReduction = "sum", exclude: Iterable[str] = ()
) -> M:
    """Marks a module as `shared` and returns it: the same object, class and parameter names.

    Example:
        >>> self.encoder = SharedModule(nn.Linear(20, 30), over="model")
    """
    return shared(module, over=over, grad=grad, exclude=exclude)


def sharded(module: M, *names: str, over: str, dim: int, parts: Sequence[int] | None = None) -> M:
    """Marks weights of which each rank of an axis holds another piece; returns the module.

    Nothing of their gradients is sent over the axis. Norms and checkpoints need to know.

    Args:
        module: The owner of the weights.
        names: Parameter names or patterns, relative to the module; at least one.
        over: The axis.
        dim: The dim along which the whole weight is cut.
        parts: Lengths along ``dim`` of parts that were cut one by one and joined (a fused QKV weight).
    """
    if not names:
        raise ValueError("sharded(module, 'weight', over=..., dim=...) needs the names of the weights.")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be a whole number, got {dim!r}.")
    return _added(
        module, Mark("sharded", _axes(over), "none", names, (), dim, None if parts is None else tuple(parts)), "sharded"
    )


def private(module: M, *names: str) -> M:
    """Marks weights that differ between ranks on purpose, on every axis but the data axis; returns the module."""
    return _added(module, Mark("private", (ALL_AXES,), "none", names or ("*",)), "private")


def unmark(module: M, *, recurse: bool = True) -> M:
    """Takes all marks off a module (and its submodules) and returns it. Marks of its class stay."""
    for part in module.modules() if recurse else (module,):
        part.__dict__.pop(ATTRIBUTE, None)
    return module


def marks_of(module: nn.Module) -> tuple[Mark, ...]:
    """The marks on this very module: its own and its class's."""
    of_class = [mark for cls in type(module).__mro__ for mark in cls.__dict__.get(CLASS_ATTRIBUTE, ())]
    return (*of_class, *module.__dict__.get(ATTRIBUTE, ()))


def record_marks(root: nn.Module) -> dict[str, tuple[Mark, ...]]:
    """The marks of all modules by path, before something replaces modules (layer synchronisation, conversion)."""
    return {path: marks for path, module in root.named_modules() if (marks := marks_of(module))}


def restore_marks(root: nn.Module, recorded: dict[str, tuple[Mark, ...]]) -> None:
    """Puts recorded marks on the modules that took the marked ones' places.

    Raises:
        ValueError: a marked module is gone; its weights must not silently become private.
    """
    modules = {original_path(path): module for path, module in root.named_modules()}
    for path, marks in recorded.items():
        module = modules.get(original_path(path))
        if module is None:
            raise ValueError(
                f"the module {path or 'root'!r} was marked {', '.join(mark.describe() for mark in marks)}, but no "
                "module of that name is left after layers were synchronised, converted or compiled. Mark the module "
                "that replaces it."
            )
        missing = tuple(mark for mark in marks if mark not in marks_of(module))
        if missing:
            module.__dict__[ATTRIBUTE] = (*module.__dict__.get(ATTRIBUTE, ()), *missing)


def original_path(path: str) -> str:
    """A module's path without the steps that torch.compile adds."""
    return ".".join(step for step in path.split(".") if step != "_orig_mod")


def _added(module: M, mark: Mark, form: str) -> M:
    if isinstance(module, Tensor):
        raise TypeError(
            f"{form}() was given a bare {type(module).__name__}, which does not know its owner, so the mark would be "
            f"lost when the parameter is replaced. Mark it through its module: {form}(module, 'name', over=...)."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"{form}() marks an nn.Module, got {type(module).__name__}.")
    marks = (*module.__dict__.get(ATTRIBUTE, ()), mark)
    if mark in marks[:-1]:
        return module
    _refuse_conflicts(marks, type(module).__name__)
    module.__dict__[ATTRIBUTE] = marks
    return module


def _refuse_conflicts(marks: Sequence[Mark], where: str) -> None:
    last = marks[-1]
    for mark in marks[:-1]:
        same_axis = set(mark.axes) & set(last.axes)
        same_names = set(mark.include) & set(last.include) and mark.exclude == last.exclude
        if same_axis and same_names and mark != last:
            raise ValueError(
                f"{where} is marked {mark.describe()} already; {last.describe()} for the same weights and axis "
                f"contradicts it. "
                "unmark() it first."
            )


def _axes(over: str | Sequence[str]) -> tuple[str, ...]:
    axes = (over,) if isinstance(over, str) else tuple(over)
    if not axes or not all(isinstance(axis, str) and axis for axis in axes) or len(set(axes)) != len(axes):
        raise ValueError(f"over={over!r} must name an axis of the mesh, or several, each once.")
    return axes


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _match(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
