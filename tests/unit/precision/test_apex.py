"""The Apex engine, on the small Apex of tests/apex_amp.py; tests/worlds/test_apex.py trains with it on two ranks."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest
import torch
from apex_amp import SmallApexAmp
from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, MissingDependencyError
from parallelize.plugins.base import Amp
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
    return ApexPrecision().open(
        amp=Amp(level, dtype=torch.float16), models=[model], optimizers=optimizers, device=device, world=World()
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_a_loop_trains_the_masters(fake_amp: SmallApexAmp) -> None:
    """Backward is scaled by Apex, clipping uses the masters, and the model ends trained and in fp32."""
    model = net()
    parameters = list(model.parameters())
    before = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with open_apex(model, optimizer):
        assert fake_amp.calls[0]["opt_level"] == "O2"
        loss = model(torch.randn(8, 3)).square().mean() / 100  # no overflow in fp16
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert total > 1e-3
        masters = [each for group in optimizer.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in masters]).norm()
        assert norm.item() == pytest.approx(1e-3, rel=0.01)
        trained = [each.detach().clone() for each in masters]
        optimizer.step()
        assert not torch.equal(masters[0], trained[0])
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [each for group in optimizer.param_groups for each in group["params"]] == parameters
    for each, master in zip(parameters, masters, strict=True):
        assert each.dtype is torch.float32
        assert torch.equal(each, master)
        assert "momentum_buffer" in optimizer.state[each]
    assert not torch.equal(parameters[0], before[0])


def test_o3_takes_the_state_of_optimizers_along(fake_amp: SmallApexAmp) -> None:
    """Steps before, in and after the block compute with moments of the weights' dtype."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> torch.dtype:
        model(torch.ones(8, 3)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.state[model[0].weight]["exp_avg"].dtype

    assert step() is torch.float32
    with open_apex(model, optimizer, level="O3"):
        assert step() is torch.float16
    assert step() is torch.float32
    assert fake_amp.calls[0]["opt_level"] == "O3"


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_every_patch_is_removed(fake_amp: SmallApexAmp, error: type[Exception] | None) -> None:
    """Functions of torch, the model's forward and the optimizer's methods are restored, also after an exception."""

    def patched() -> list[Any]:
        utils = torch.nn.utils
        return [torch.autograd.backward, utils.clip_grad_norm_, utils.clip_grad.clip_grad_value_]

    before, model = patched(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attributes = set(optimizer.__dict__)
    with contextlib.suppress(RuntimeError), open_apex(model, optimizer):
        assert patched() != before
        assert "forward" in model.__dict__
        assert all(part._state_dict_hooks for part in model.modules())
        if error is not None:
            raise error
    assert patched() == before
    assert "forward" not in model.__dict__
    assert not any(part._state_dict_hooks for part in model.modules())
    assert set(optimizer.__dict__) == attributes


def test_state_is_that_of_apex(fake_amp: SmallApexAmp) -> None:
    """state_dict and load_state_dict are those of apex.amp."""
    model = net()
    with open_apex(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        state = session.state_dict()
        assert state == fake_amp.state_dict()
        session.load_state_dict(state)
        assert fake_amp.calls[-1] == state


def test_several_roots_are_refused(fake_amp: SmallApexAmp) -> None:
    """Apex scales one loss at a time."""
    model = net()
    with open_apex(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        out = model(torch.randn(4, 3)).sum()
        with pytest.raises(ConfigError, match="backward from 2 tensors") as caught:
            torch.autograd.backward([out, out])
    assert "amp_engine='native'" in caught.value.faults[0].fix


def test_optimizers_are_required(fake_amp: SmallApexAmp) -> None:
    """The error says how to pass them."""
    with pytest.raises(ConfigError, match="without optimizers") as caught, open_apex(net()):
        pass
    assert "parallel_model(model, optimizers=optimizer)" in caught.value.faults[0].fix


def test_an_apex_without_amp_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """For PyPI's apex, and NVIDIA's since 2025, the error has the file that was found and a fix."""
    apex = types.ModuleType("apex")
    apex.__file__ = "/somewhere/apex/__init__.py"
    monkeypatch.setitem(sys.modules, "apex", apex)
    with (
        pytest.raises(MissingDependencyError, match=r"has no amp: .*/somewhere/apex/__init__.py") as caught,
        open_apex(net()),
    ):
        pass
    (fault,) = caught.value.faults
    assert "removed apex.amp in 2025" in fault.why
    assert "unrelated" in fault.why
    assert "amp_engine='native'" in fault.fix


def test_no_apex_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apex the error suggests the native engine."""
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(MissingDependencyError, match="cannot be imported") as caught, open_apex(net()):
        pass
    assert isinstance(caught.value, ImportError)
    assert "amp_engine='native'" in caught.value.faults[0].fix


def test_apex_is_not_imported_with_the_package(run_script: Any) -> None:
    """`import parallelize`, and listing the names of the engines, import no apex."""
    found = run_script(
        """
        import sys
        import parallelize
        from parallelize.plugins import registry
        print(registry.names("precision"), "apex" in sys.modules)
        """,
        how="-c",
    )
    assert found.stdout.strip() == "('apex', 'native') False"
