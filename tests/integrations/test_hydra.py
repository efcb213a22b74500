"""A decorated function called from a program that Hydra configures."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("hydra", reason="hydra-core is not installed")

PROGRAM = """
    import os
    from dataclasses import dataclass

    import hydra
    import torch
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig

    from parallelize import distributed, parallel_model, rank


    @dataclass
    class Settings:
        lr: float = 0.5
        processes: int = 2


    ConfigStore.instance().store(name="settings", node=Settings)


    @distributed()
    def train(cfg: DictConfig):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
        with parallel_model(model):
            model(torch.ones(1) * (1 + rank())).backward()
            optimizer.step()
        if rank() == 0:
            torch.save(model.state_dict(), "model.pt")  # in the folder that Hydra made for this run
        return model.weight.item(), os.getcwd()


    @hydra.main(version_base=None, config_name="settings")
    def main(cfg: DictConfig) -> None:
        ranks = train.options(processes=cfg.processes).all_ranks(cfg)
        print(ranks[0][0], len(ranks), {folder for _, folder in ranks} == {os.getcwd()})


    main()
"""


def test_configuration_and_working_directory_reach_the_workers(run_script, tmp_path: Path) -> None:
    """Command-line overrides reach the workers, which write to Hydra's working directory."""
    folder = tmp_path / "run of hydra"
    done = run_script(PROGRAM, args=("lr=0.2", f"hydra.run.dir={folder}", "hydra.job.chdir=True"))
    weight, processes, is_same = done.stdout.splitlines()[-1].split()  # Hydra logs to the same stream
    assert float(weight) == pytest.approx(1 - 0.2 * 1.5)
    assert (processes, is_same) == ("2", "True")
    assert (folder / "model.pt").exists()


def test_a_sweep_calls_the_function_per_job(run_script, tmp_path: Path) -> None:
    """Each job of a multirun is a separate call, with its own number of processes and folder."""
    options = ("--multirun", "processes=1,2", "lr=0.4", f"hydra.sweep.dir={tmp_path}/sweep", "hydra.job.chdir=True")
    lines = [line.split() for line in run_script(PROGRAM, args=options).stdout.splitlines() if line.endswith("True")]
    assert [processes for _, processes, _ in lines] == ["1", "2"]
    assert [float(weight) for weight, _, _ in lines] == pytest.approx([0.6, 1 - 0.4 * 1.5])
    assert sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/model.pt")) == ["0", "1"]
