"""Runs a command on the pretended CUDA: `python tests/fake_cuda pytest -m "gpu or gpu2" tests/gpu`."""

from __future__ import annotations

import os
import sys

from compiled import environment

command = sys.argv[1:]
if command and command[0].startswith("--devices="):
    os.environ["FAKE_CUDA_DEVICES"] = command.pop(0).removeprefix("--devices=")
if not command:
    sys.exit(f"{__doc__}\nThe command, such as pytest, python or parallelize, and its arguments are missing.")
os.environ.update(environment())
if reason := os.environ.get("FAKE_CUDA_UNAVAILABLE"):
    print(f"There is no pretended CUDA here: {reason}", file=sys.stderr)
os.execvp(command[0], command)
