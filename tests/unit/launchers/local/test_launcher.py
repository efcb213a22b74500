"""Environment variables of the workers: the caller's, with CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS set."""

from __future__ import annotations

import io
import sys

import pytest

from parallelize.cluster.devices import Hardware
from parallelize.config.config import Config
from parallelize.config.layout import Layout, compute_layout
from parallelize.launchers.local.launcher import worker_environ


def on_gpus(gpus: object) -> Layout:
    return compute_layout(Config.parse(gpus=gpus), Hardware("cuda", 4))


def on_cpu(processes: int) -> Layout:
    return compute_layout(Config.parse(processes=processes), Hardware())


@pytest.mark.parametrize(
    ("mask", "gpus", "seen"),
    [
        (None, [2, 0], "2,0"),
        (None, 2, "0,1"),
        ("4,5,6,7", [3, 1], "7,5"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", [1], "GPU-b"),
        ("MIG-a, MIG-b, MIG-c, MIG-d", -1, "MIG-a,MIG-b,MIG-c,MIG-d"),
        ("4, 5 ,6,7", [2, 0], "6,4"),
    ],
)
def test_gpus_are_picked_from_the_mask(mask: str | None, gpus: object, seen: str) -> None:
    """A mask of indices or UUIDs composes with `gpus`: entries are picked, never renumbered."""
    before = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    environ = worker_environ(before, on_gpus(gpus), cores=8)
    assert environ["CUDA_VISIBLE_DEVICES"] == seen
    assert "CUDA_DEVICE_ORDER" not in environ  # the caller has resolved the indices


def test_no_mask_on_the_cpu() -> None:
    """On the CPU, CUDA_VISIBLE_DEVICES is not set."""
    assert "CUDA_VISIBLE_DEVICES" not in worker_environ({}, on_cpu(2), cores=8)


@pytest.mark.parametrize(("set_to", "cores", "threads"), [(None, 8, "4"), ("", 8, "4"), (None, 1, "1"), ("3", 8, "3")])
def test_threads_are_a_share_of_the_cores(set_to: str | None, cores: int, threads: str) -> None:
    """OMP_NUM_THREADS is cores by local ranks, at least 1, unless the user has set it to something."""
    before = {} if set_to is None else {"OMP_NUM_THREADS": set_to}
    assert worker_environ(before, on_cpu(2), cores=cores)["OMP_NUM_THREADS"] == threads


def test_variables_of_the_user_stay() -> None:
    """COLUMNS in the environment is not overwritten."""
    before = {"COLUMNS": "50", "HOME": "/home/me"}
    environ = worker_environ(before, on_cpu(2), cores=2)
    assert {name: environ[name] for name in before} == before


class Terminal(io.StringIO):
    """A stream of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "width"), [(Terminal(), "77"), (io.StringIO(), None), (None, None)])
def test_progress_bars_have_the_width_of_the_callers_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None, width: str | None
) -> None:
    """Workers, which write to files, see no terminal; without one, there is no width."""
    monkeypatch.setenv("COLUMNS", "77")  # what shutil.get_terminal_size() returns
    monkeypatch.setattr(sys, "stderr", stream)
    assert worker_environ({}, on_cpu(2), cores=2).get("COLUMNS") == width
