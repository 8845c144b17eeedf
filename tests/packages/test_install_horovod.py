"""The script that builds Horovod: what it looks at, and what it says when something is missing. No build here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collective_strategy.install_horovod import (
    FAST_PATCH,
    PATCHES,
    InstallError,
    build_environment,
    cached_wheel,
    cxx_standard,
    patch,
    wheel_key,
)

ROOT = Path(__file__).parents[2]
ORIGINAL = {
    "CMakeLists.txt": 'set(CMAKE_CXX_STANDARD 14)\nstring(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${X}")\n',
    "horovod/torch/CMakeLists.txt": "    set(CMAKE_CXX_STANDARD 14)\n",
    "cmake/Modules/FindPytorch.cmake": 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
    "horovod/__init__.py": "__version__ = '0.28.1'\n",
    "horovod/common/gloo/gloo_controller.cc": "  global_ranks_.reserve(size_);\n",
    "horovod/common/gloo/gloo_context.cc": "void GlooContext::Finalize() {\n  if (!enabled_) {\n    return;\n  }\n",
    "horovod/common/process_set.cc": """      continue;
    }
    LOG(TRACE, Get(0).controller->GetRank())
        << "Finalizing ProcessSetTable, process set id: " << id;
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
""",
    "horovod/common/operations.cc": """  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
    LOG(ERROR, rank)
        << "Horovod background loop uncaught exception: " << ex.what();
  }
""",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The lines of the source package that are changed."""
    for name, text in ORIGINAL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_change_is_made_once(source: Path) -> None:
    patch(source, "20", fast=True)
    changed = {name: (source / name).read_text() for name in ORIGINAL}
    assert {name for name, _, _ in (*PATCHES, FAST_PATCH)} == set(ORIGINAL)
    assert changed["CMakeLists.txt"].count("set(CMAKE_CXX_STANDARD 20)") == 1
    assert '"-O1 -DNDEBUG"' in changed["CMakeLists.txt"]
    assert "resize(size_)" in changed["horovod/common/gloo/gloo_controller.cc"]
    assert "initialization_failed = true" in changed["horovod/common/operations.cc"]
    assert changed["horovod/common/process_set.cc"].count("catch (const std::exception&)") == 1
    assert changed["horovod/__init__.py"].startswith("__version__ = '0.28.1'\ncollective_strategy_revision = ")
    with pytest.raises(InstallError, match=r"is it Horovod 0\.28\.1"):
        patch(source, "20", fast=True)


def test_another_source_package_is_refused(source: Path) -> None:
    (source / "horovod/common/process_set.cc").write_text("// all new\n")
    with pytest.raises(InstallError, match=r"process_set\.cc"):
        patch(source, "17", fast=False)


@pytest.mark.parametrize(
    ("text", "standard"), [("#if __cplusplus < 201703L", "17"), ("#if __cplusplus < 202002L", "20")]
)
def test_the_standard_is_that_of_the_headers(text: str, standard: str, tmp_path: Path) -> None:
    (tmp_path / "include" / "ATen").mkdir(parents=True)
    (tmp_path / "include" / "ATen" / "ATen.h").write_text(text)
    assert cxx_standard(tmp_path) == standard
    with pytest.raises(InstallError, match="headers are missing"):
        cxx_standard(tmp_path / "elsewhere")


def test_wheels_for_different_torches_and_options_have_different_places(tmp_path: Path) -> None:
    keys = {wheel_key(*arguments) for arguments in (("2.9.1",), ("2.13.0",), ("2.13.0", True), ("2.13.0", True, True))}
    assert len(keys) == 4
    assert all(sys.implementation.cache_tag in key for key in keys)
    assert cached_wheel(tmp_path) is None
    (tmp_path / ".123.partial").touch()
    assert cached_wheel(tmp_path) is None
    (tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").touch()
    assert cached_wheel(tmp_path) is not None


def test_settings_of_another_build_are_not_taken_over() -> None:
    variables = build_environment({"HOROVOD_GPU_OPERATIONS": "NCCL", "PATH": "/bin"}, 2, mpi=False)
    assert "HOROVOD_GPU_OPERATIONS" not in variables
    assert (variables["PATH"], variables["MAKEFLAGS"], variables["HOROVOD_WITHOUT_MPI"]) == ("/bin", "-j2", "1")
    assert build_environment({}, 2, mpi=True)["HOROVOD_WITH_MPI"] == "1"


def test_a_missing_compiler_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    """Also: the file in tools/ is the same program."""
    for program in (["-m", "collective_strategy.install_horovod"], [str(ROOT / "tools" / "install_horovod.py")]):
        finished = subprocess.run(
            [sys.executable, *program, "--wheel-dir", str(tmp_path)],
            env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert finished.returncode == 1
        assert "not found: cmake (CMake 3.13 or newer), c++ (a C++ compiler), make (make)" in finished.stderr
        assert "apt-get install build-essential cmake" in finished.stderr


def test_without_torch_the_script_says_so(tmp_path: Path) -> None:
    program = str(ROOT / "tools" / "install_horovod.py")
    finished = subprocess.run(
        [sys.executable, "-S", program], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 1
    assert "torch is not installed in this environment" in finished.stderr


@pytest.mark.parametrize("built", [False, True], ids=["absent", "for another torch"])
def test_a_horovod_that_cannot_be_loaded_is_named_with_the_command(built: bool, tmp_path: Path) -> None:
    """In an environment of any backend: where Horovod is installed, a folder before it stands for the wrong one."""
    script = "import collective_strategy; collective_strategy.init('horovod', timeout=20)"
    if built:
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").touch()
        (tmp_path / "horovod" / "torch.py").write_text("raise ImportError('Horovod was built with torch 1.13.')")
    else:
        script = "import sys; sys.modules['horovod'] = None; " + script
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]),
             "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert finished.returncode == 1
    words = "cannot be loaded with torch" if built else "which is not installed here"
    assert words in finished.stderr
    assert "python -m collective_strategy.install_horovod" in finished.stderr
