"""The versions that the environments install with."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def pins(name):
    lines = (line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def test_both_files_agree_on_everything_but_torch():
    everywhere, xla = pins("constraints.txt"), pins("constraints-xla.txt")
    assert {name for name in xla if xla[name] != everywhere.get(name)} == {"torch", "torch_xla"}
