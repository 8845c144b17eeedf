"""Runs a script on the workers of ``horovod.run``: ``by_horovod_run.py N SCRIPT ARGUMENTS``."""

import runpy
import sys

import horovod


def script(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    horovod.run(script, args=(sys.argv[2:],), num_proc=int(sys.argv[1]), use_gloo=True)
