"""The versions that the environments install with."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pins(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), f"{name} pins something twice"
    return found


def test_both_files_agree_on_everything_but_torch():
    everywhere, xla = pins("constraints.txt"), pins("constraints-xla.txt")
    assert {name for name in xla if xla[name] != everywhere.get(name)} == {"torch", "torch_xla"}


def test_all_that_tests_and_demo_install_is_pinned():
    """A name that is misspelt there would leave the version to the day of the installation."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    deps = {name for section in tox.values() for name in section.get("deps", "").split()}
    project = re.sub(r"(?m)^#.*$", "", (ROOT / "pyproject.toml").read_text())
    extras = re.search(r"(?s)\[project\.optional-dependencies\]\n(.*?)\n\[", project)
    assert extras is not None
    named = {re.split(r"[<>=\[]", text)[0] for text in re.findall(r'"([^"]+)"', extras[1])}
    assert named | deps <= pins("constraints.txt").keys() | {"torch_xla", "collective_strategy"}
