"""What a call trains comes back, wherever the caller keeps it; what stays behind is named."""

from __future__ import annotations

import copy
import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TORCHRUN
from torch import nn
from worlds import legacy_state, legacy_training
from worlds.legacy_training import Rebuilt, Trainer, loop, sgd

from parallelize import distributed


def by_closure() -> tuple[Callable[[], Any], nn.Module]:
    net = nn.Linear(2, 1)
    return distributed(processes=2)(lambda: loop(net, sgd(net))), net


SHAPES: dict[str, Callable[[], tuple[Callable[[], Any], nn.Module]]] = {
    "closure": by_closure,
    "global variable": lambda: (legacy_training.train_global, legacy_training.model),
    "global variable by the name of its package": lambda: (legacy_training.train_by_package, legacy_state.model),
    "class attribute": lambda: (Trainer().fit_shared, Trainer.shared),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_comes_back_trained(shape: str) -> None:
    """The same object, with rank 0's weights; a second call goes on from them."""
    train, model = SHAPES[shape]()
    weight = next(model.parameters())
    for _ in range(2):
        before = weight.detach().clone()
        trained = train()
        assert torch.equal(weight, trained)
        assert not torch.equal(before, trained)
    assert next(model.parameters()) is weight


@pytest.mark.parametrize("fit", [Trainer.fit_ddp, Trainer.fit_fsdp], ids=["ddp", "fsdp"])
def test_a_trainer_trains_on_as_on_one_device(fit: Callable[[Trainer], torch.Tensor]) -> None:
    """Two calls equal two calls in this process: model, moving average, optimizer, scheduler and modes come back."""
    single, trainer = Trainer(), Trainer()
    trainer.model.load_state_dict(single.model.state_dict())
    trainer.ema.load_state_dict(single.ema.state_dict())
    held = trainer.model.first.weight
    for calls in (1, 2):
        for each in (single, trainer):
            each.model.train()
            each.model.norm.eval()  # the statistics of half a batch differ
        single.fit_ddp.options(processes=1)()
        assert torch.equal(fit(trainer), held)
        for ours, theirs in ((trainer.model, single.model), (trainer.ema, single.ema)):
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        torch.testing.assert_close(trainer.optimizer.state_dict(), single.optimizer.state_dict())
        assert trainer.optimizer.state[held]["step"].item() == 2 * calls
        assert trainer.scheduler.last_epoch == calls
        assert not trainer.model.training
    assert trainer.model.second.weight is trainer.model.first.weight is held
    assert trainer.optimizer.param_groups[0]["params"][0] is held


def test_a_restarted_call_trains_once() -> None:
    """The second attempt begins with the caller's weights, and its result comes back."""
    net = nn.Linear(2, 1)

    @distributed(processes=2, max_restarts=1)
    def train() -> torch.Tensor:
        weight = loop(net, sgd(net))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("the first attempt fails")
        return weight

    untrained = copy.deepcopy(net)
    trained = train()
    assert torch.equal(net.weight, trained)
    single = legacy_training.train_argument.options(processes=1)(untrained)
    torch.testing.assert_close(trained, single)


def test_state_of_another_module() -> None:
    """An optimizer made at the module's top goes on, and a list that has grown is named."""
    legacy_state.optimizer.state.clear()
    with pytest.warns(
        UserWarning, match=r"^worlds.legacy_state.history changed in the workers and does not come back: only"
    ):
        trained = legacy_training.train_state()
    assert torch.equal(legacy_state.model.weight, trained)
    assert legacy_state.optimizer.state[legacy_state.model.weight]["step"].item() == 2


def test_other_changed_attributes_are_named() -> None:
    """In one warning that points to the call."""
    trainer = Trainer()
    with pytest.warns(UserWarning, match=r"^Trainer.epoch, Trainer.history changed in the workers") as caught:
        trainer.count()
    assert [each.filename for each in caught] == [__file__]
    assert trainer.history == []
    trainer.count.options(update_modules=False)()  # nothing is to come back


def test_a_trained_model_that_does_not_come_back_is_named() -> None:
    """A model that an import or an unpickling has made once more is another object than the caller's."""
    with pytest.warns(UserWarning, match=r"^Rebuilt\.model changed in the workers and does not come back"):
        Rebuilt().fit()


JOINED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from worlds.legacy_training import Trainer

for fit in (Trainer.fit_ddp, Trainer.fit_fsdp):
    trainer = Trainer()
    held = trainer.model.first.weight
    fit(trainer)
    state = trainer.optimizer.state[held]
    result = [held.tolist(), state["exp_avg"].tolist(), trainer.scheduler.last_epoch]
    sys.stdout.write(json.dumps([fit.__name__, *result]) + "\\n")
"""


@pytest.mark.slow
def test_a_joined_call_trains_the_callers_own_objects(run_script: Callable[..., Any]) -> None:
    """Under torchrun the function runs in the caller itself: full weights and optimizer states on every rank."""
    done = run_script(JOINED, launcher=TORCHRUN, args=(str(Path(__file__).parents[1]),), env={"OMP_NUM_THREADS": "1"})
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(each[0] for each in ranks) == ["fit_ddp"] * 2 + ["fit_fsdp"] * 2, done.stderr
    for name in ("fit_ddp", "fit_fsdp"):
        one, other = (each for each in ranks if each[0] == name)
        assert one == other
        weight, moment, epoch = one[1:]
        assert (len(weight), len(moment), epoch) == (2, 2, 1)
        assert any(any(row) for row in moment)


class Table:
    def __init__(self) -> None:
        self.rows = [1, 2]

    @functools.cached_property
    def total(self) -> int:
        return sum(self.rows)


@distributed(processes=2)
def read_only(table: Table, spread: torch.distributions.Distribution) -> tuple[int, Any]:
    return table.total, spread.covariance_matrix


def test_an_object_that_was_only_read_is_not_named() -> None:
    """Values that it computes once stay in the workers, and a change of what it computes them from is named."""
    table, spread = Table(), torch.distributions.MultivariateNormal(torch.zeros(2), scale_tril=torch.eye(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total, covariance = read_only(table, spread)
    assert (total, covariance.tolist()) == (3, [[1, 0], [0, 1]])
    assert "total" not in vars(table)
    with pytest.warns(UserWarning, match=r"^table\.rows changed in the workers and does not come back"):
        append_to(table)


@distributed(processes=2)
def append_to(table: Table) -> None:
    table.rows.append(table.total)
