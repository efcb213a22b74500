"""Jobs of Ray without a cluster: what they leave there if they cannot start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallelize import RayLauncher, distributed
from parallelize.launchers import ray as ray_launcher


def test_a_job_whose_actors_cannot_start_leaves_no_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses a runtime environment in the caller; the group would hold its GPUs until the caller ends."""
    removed = []

    def refuse(**_options: object) -> None:
        raise ValueError("no such working_dir")

    util = SimpleNamespace(
        placement_group=lambda bundles, strategy: (len(bundles), strategy),
        remove_placement_group=removed.append,
        scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=None),
    )
    ray = SimpleNamespace(util=util, remote=refuse, exceptions=SimpleNamespace(RayError=ConnectionError))
    monkeypatch.setattr(ray_launcher, "_connected", lambda _address: ray)
    job = distributed(launcher=RayLauncher(), processes=1, num_nodes=2)(print).submit()
    with pytest.raises(ValueError, match="no such working_dir"):
        job.result()
    assert removed == [(2, "STRICT_SPREAD")]
