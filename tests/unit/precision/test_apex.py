"""The Apex engine, on the small Apex of tests/apex_amp.py; tests/worlds/test_apex.py trains with it on two ranks."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from typing import Any

import pytest
import torch
from apex_amp import SmallApexAmp
from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, MissingDependencyError
from parallelize.plugins.base import Amp, PrecisionRequest
from parallelize.precision.apex import ApexPrecision


@pytest.fixture
def fake_amp(monkeypatch: pytest.MonkeyPatch) -> SmallApexAmp:
    apex: Any = types.ModuleType("apex")
    apex.amp = SmallApexAmp()
    monkeypatch.setitem(sys.modules, "apex", apex)
    return apex.amp


def open_apex(model: nn.Module, *optimizers: torch.optim.Optimizer, level: Any = None) -> Any:
    # The engine declares no CPU support; the fake computes on the CPU, and nothing uses this CUDA device.
    device = torch.device("cuda", 0)
    amp = Amp(level, dtype=torch.float16)
    request = PrecisionRequest(amp=amp, models=[model], optimizers=optimizers, device=device, world=World())
    return ApexPrecision().open(request)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize(("level", "inside"), [("O2", torch.float32), ("O3", torch.float16)])
def test_optimizers_take_their_state_along(fake_amp: SmallApexAmp, level: str, inside: torch.dtype) -> None:
    """Before, in and after a block they step the weights of their dtype, or their masters, with moments of it."""
    model = net()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step() -> torch.dtype:
        model(torch.ones(8, 3)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped = optimizer.param_groups[0]["params"]
        assert {id(each) for each in optimizer.state} == {id(each) for each in stepped}
        return optimizer.state[stepped[0]]["exp_avg"].dtype

    assert step() is torch.float32
    with open_apex(model, optimizer, level=level):
        assert step() is inside
    assert step() is torch.float32
    assert optimizer.param_groups[0]["params"] == list(model.parameters()) == parameters
    assert fake_amp.calls[0]["opt_level"] == level


def test_every_patch_is_removed(fake_amp: SmallApexAmp) -> None:
    """Functions of torch, the model's forward and the optimizer's methods are restored after an exception."""

    def patched() -> list[Any]:
        utils = torch.nn.utils
        of_torch = [torch.autograd.backward, utils.clip_grad_norm_, utils.clip_grad.clip_grad_value_]
        hooks = [bool(part._state_dict_hooks) for part in model.modules()]
        return [of_torch, hooks, "forward" in vars(model), set(vars(optimizer))]

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = patched()
    with contextlib.suppress(RuntimeError), open_apex(model, optimizer):
        assert all(one != other for one, other in zip(patched()[:3], before, strict=False))
        raise RuntimeError
    assert patched() == before


def test_state_is_that_of_apex(fake_amp: SmallApexAmp) -> None:
    """state_dict and load_state_dict are those of apex.amp."""
    model = net()
    with open_apex(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        state = session.state_dict()
        assert state == fake_amp.state_dict()
        session.load_state_dict(state)
        assert fake_amp.calls[-1] == state


def test_what_apex_does_not_support_is_refused(fake_amp: SmallApexAmp) -> None:
    """Apex scales one loss at a time, and needs the optimizers; the error says what to do."""
    model = net()
    with open_apex(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        out = model(torch.randn(4, 3)).sum()
        with pytest.raises(ConfigError, match=r"(?s)backward from 2 tensors.*amp_engine='native'"):
            torch.autograd.backward([out, out])
    message = r"(?s)without optimizers.*parallel_model\(model, optimizers=optimizer\)"
    with pytest.raises(ConfigError, match=message), open_apex(net()):
        pass


UNRELATED = types.ModuleType("apex")  # PyPI's, or NVIDIA's since 2025
UNRELATED.__file__ = "/somewhere/apex/__init__.py"


@pytest.mark.parametrize(
    ("module", "what", "why"),
    [
        (UNRELATED, r"has no amp: .*/somewhere/apex/__init__.py", "removed apex.amp in 2025"),
        (None, "cannot be imported", ""),
    ],
)
def test_an_apex_without_amp_is_explained(monkeypatch: pytest.MonkeyPatch, module: Any, what: str, why: str) -> None:
    """The error has the file that was found, if any, and suggests the native engine."""
    monkeypatch.setitem(sys.modules, "apex", module)
    with pytest.raises(MissingDependencyError, match=what) as caught, open_apex(net()):
        pass
    assert isinstance(caught.value, ImportError)
    (fault,) = caught.value.faults
    assert re.search(why, fault.why)
    assert "amp_engine='native'" in fault.fix
    assert "git clone --branch 25.05 https://github.com/NVIDIA/apex && pip install" in fault.fix
