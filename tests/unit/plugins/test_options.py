"""Options of plug-ins: each value is kept with its documented meaning, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from parallelize import (
    Amp,
    AutoBackend,
    BalancedBackend,
    ConfigError,
    DDPBackend,
    FSDPBackend,
    LocalLauncher,
    Plan,
    RayLauncher,
    SlurmLauncher,
    SSHLauncher,
    checkpoints,
    distributed,
    load,
    parallel_model,
    save,
    shard_loader,
)
from parallelize.config.config import Config
from parallelize.config.options import duration
from parallelize.plugins import registry
from parallelize.plugins.base import Backend

PLUGINS: list[Any] = [
    registry.find(kind, name) for kind in ("backends", "launchers") for name in registry.BUILTIN[kind]
]
OPTIONS = [(plugin, field.name) for plugin in PLUGINS for field in dataclasses.fields(plugin)]

PLAN = Plan(
    samples=1,
    devices=("cpu",),
    units=("0",),
    bounds=(0, 1),
    forward_s=(1.0,),
    backward_s=(1.0,),
    memory_bytes=(1.0,),
)

# Words that some option takes, so that values are not only refused.
WORDS = [
    *("forkserver", "spawn", "spwan", "auto", "world", "node", "device", "fp16", "PACK", "cpu", "cuda:0", "cpu,cpu"),
    *("python3 -u", "ssh", "gpu1:8", "gpu1, gpu2", "4h", "5min", "1-02:00:00", "64G", "a 'b c'", "a 'b", "", " ", "\0"),
]


class Broken:
    """Cannot be shown, as an object of a user whose __init__ has failed."""

    def __repr__(self) -> str:
        raise AttributeError("name")

    __str__ = __repr__


# Values that Python cannot evaluate, compare with a float, or show.
HOSTILE = ["{[]: 1}", "-" * 5000 + "1", "(" * 5000, "9" * 5000, 10**400, -(10**400), 10**5000, [10**30], Broken()]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.integers()
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=8)
    | st.binary(max_size=3)
    | st.timedeltas(min_value=timedelta(seconds=-5), max_value=timedelta(days=2))
    | st.sampled_from(
        [
            *(np.int64(4), np.float64(0.5), np.bool_(True), np.array([1, 2]), np.array(2)),
            *(torch.tensor(2.0), torch.device("cpu"), torch.float16, Path("a", "b"), object(), len),
            *(nn.Linear, [nn.Linear, nn.Conv1d], int, nn.Identity()),
            *(PLAN, torch_fsdp.MixedPrecisionPolicy()),
            *HOSTILE,
        ]
    )
)
keys = st.sampled_from(["A", "hold", "working_dir", "a=b", "nodes", "", "env_vars", 1])
values = (
    scalars
    | st.lists(scalars, max_size=3)
    | st.lists(scalars, max_size=3).map(tuple)
    | st.dictionaries(keys, scalars | st.dictionaries(keys, scalars, max_size=2), max_size=3)
    | st.sets(st.sampled_from(WORDS), max_size=2)
)


@functools.cache
def types_of_options(plugin: Any) -> dict[str, Any]:
    return typing.get_type_hints(plugin, localns={"MixedPrecisionPolicy": torch_fsdp.MixedPrecisionPolicy})


def is_of_type(value: object, annotation: Any) -> bool:
    """Whether a value is of an annotated type; True is no int here."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_of_type(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return type(value) is str and value in arguments
    if origin is type:
        return isinstance(value, type) and issubclass(value, arguments[0])
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return type(value) is tuple and all(is_of_type(part, arguments[0]) for part in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = value.items() if type(value) is dict else [(None, None)]
        return all(is_of_type(key, arguments[0]) and is_of_type(part, arguments[1]) for key, part in pairs)
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation if annotation in (bool, int, str) else isinstance(value, annotation)


def meanings(given: Any) -> list[object]:
    """Return what a value may stand for: itself, a list as a tuple, and what the documentation says of texts."""
    found: list[object] = [given]
    if isinstance(given, (list, tuple)):
        found.append(tuple(part.item() if isinstance(part, np.generic) else part for part in given))
        found.append(tuple(part.strip() if isinstance(part, str) else part for part in given))
        found.append(tuple(str(part) if isinstance(part, torch.device) else part for part in given))
    if isinstance(given, str):
        found += [given.strip(), tuple(part.strip() for part in given.split(",")), duration(given)]
        with contextlib.suppress(ValueError):
            found.append(tuple(shlex.split(given)))
    if isinstance(given, Path):
        found.append(str(given))
    if isinstance(given, type):
        found.append((given,))
    if isinstance(given, np.generic) or (isinstance(given, float) and given.is_integer()):
        found.append(given.item() if isinstance(given, np.generic) else int(given))
    return found


def made_or_error(plugin: Any, options: dict[str, Any]) -> Any:
    try:
        return plugin(**options)
    except ConfigError as error:
        return error


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_option_has_a_parser(plugin: Any) -> None:
    """A new option without one would take any value."""
    assert {field.name for field in dataclasses.fields(plugin)} == plugin.option_parsers.keys()


def test_precision_engines_have_no_options() -> None:
    """Theirs are those of Amp, which the option amp= checks."""
    assert not any(dataclasses.is_dataclass(registry.find("precision", name)) for name in registry.names("precision"))


@pytest.mark.parametrize(("plugin", "option"), OPTIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values)
def test_a_value_keeps_its_meaning_or_is_refused(plugin: Any, option: str, value: Any) -> None:
    """What is accepted has the declared type, equals what was given, and stays the same when it is parsed again."""
    made = made_or_error(plugin, {option: value})
    if isinstance(made, ConfigError):
        assert f"{plugin.__name__}({option}" in str(made)
        return
    kept = getattr(made, option)
    assert is_of_type(kept, types_of_options(plugin)[option])
    assert any(type(meant) is type(kept) and meant == kept for meant in meanings(value) if meant is not None) or (
        kept is None and value is None
    )
    assert dataclasses.replace(made) == made


KEPT: list[tuple[object, str, object]] = [
    (SlurmLauncher(python="python3"), "python", ("python3",)),
    (SlurmLauncher(python="conda run -n 'my env' python"), "python", ("conda", "run", "-n", "my env", "python")),
    (SlurmLauncher(python=["python3", "-u"]), "python", ("python3", "-u")),
    (SlurmLauncher(folder=Path("a", "b")), "folder", "a/b"),
    (SSHLauncher(hosts="gpu1"), "hosts", ("gpu1",)),
    (SSHLauncher(hosts="gpu1:8, gpu2:8"), "hosts", ("gpu1:8", "gpu2:8")),
    (SSHLauncher(ssh="ssh -p 2222"), "ssh", ("ssh", "-p", "2222")),
    (LocalLauncher(start_method="spawn"), "start_method", "spawn"),
    (BalancedBackend(devices="cpu"), "devices", ("cpu",)),  # type: ignore[arg-type]  # a text
    (BalancedBackend(devices=["cpu", "cpu"]), "devices", ("cpu", "cpu")),  # type: ignore[arg-type]  # a list
    (BalancedBackend(memory=[8e9, np.int64(4)]), "memory", (8_000_000_000, 4)),  # type: ignore[arg-type]  # a list
    (FSDPBackend(blocks=nn.Linear), "blocks", (nn.Linear,)),  # type: ignore[arg-type]  # one class
    (FSDPBackend(blocks=["layers.0", nn.Linear]), "blocks", ("layers.0", nn.Linear)),
    (FSDPBackend(blocks="layers.0, layers.1"), "blocks", ("layers.0", "layers.1")),  # type: ignore[arg-type]  # a text
    (FSDPBackend(reshard_after_forward=1), "reshard_after_forward", 1),
]


@pytest.mark.parametrize(("plugin", "option", "meant"), KEPT)
def test_what_options_mean(plugin: object, option: str, meant: object) -> None:
    """A text is no list of its characters, lists become tuples, and 1 is no True."""
    kept = getattr(plugin, option)
    assert (type(kept), kept) == (type(meant), meant)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (LocalLauncher, {"start_method": "spwan"}, "did you mean 'spawn'"),
    (LocalLauncher, {"start_method": "fork"}, "known: 'forkserver', 'spawn'"),
    (LocalLauncher, {"heartbeat_timeout": float("nan")}, "finite number above 0"),
    (LocalLauncher, {"heartbeat_timeout": True}, "finite number above 0"),
    (DDPBackend, {"bucket_cap_mb": 0}, "finite number above 0"),
    (DDPBackend, {"bucket_cap_mb": float("inf")}, "finite number above 0"),
    (DDPBackend, {"broadcast_buffers": "no"}, "not a bool"),
    (BalancedBackend, {"memory": 0}, "at least 1"),
    (BalancedBackend, {"memory": "8GB"}, "at least 1"),
    (BalancedBackend, {"memory": True}, "at least 1"),
    (BalancedBackend, {"batch_dim": "1"}, "at least 0"),
    (BalancedBackend, {"batch_dim": True}, "at least 0"),
    (BalancedBackend, {"plan": {}}, "no Plan"),
    (AutoBackend, {"memory": float("nan")}, "at least 1"),
    (FSDPBackend, {"blocks": ""}, "no submodules"),
    (FSDPBackend, {"blocks": [5]}, "no submodules"),
    (FSDPBackend, {"blocks": 0}, "at least 1"),
    (FSDPBackend, {"shard_over": "nodes"}, "did you mean 'node'"),
    (RayLauncher, {"strategy": "SPRAED"}, "did you mean 'SPREAD'"),
    (RayLauncher, {"resources": {"jobs": "1"}}, r"resources\['jobs'\]"),
    (SSHLauncher, {"env": {"NCCL_DEBUG": 1}}, "a number is a text, too"),
    (SSHLauncher, {"ssh": "ssh 'a"}, "neither a command"),
    (SlurmLauncher, {"cpus_per_task": "4", "mem": -1, "max_requeues": 1.5}, "3 faults"),
    (SlurmLauncher, {"time": "soon"}, "4:00:00"),
]


@pytest.mark.parametrize(("plugin", "options", "named"), REFUSED)
def test_what_is_refused(plugin: Any, options: dict[str, Any], named: str) -> None:
    """The error names the option, its value, and what would be right; several faults are listed together."""
    with pytest.raises(ConfigError, match=named) as caught:
        plugin(**options)
    assert all(f"{plugin.__name__}({option}" in str(caught.value) for option in options)


def test_a_plug_in_of_a_user_needs_no_parsers() -> None:
    """Its options are as they were given, whether it has a method __post_init__ or not."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(Backend):
        name = "own"
        process_per = "device"
        width: int = 3

        def engine(self, *_: Any, **__: Any) -> Any:
            """Build nothing."""

    assert Own(width=4).width == 4


@pytest.mark.parametrize("options", [{"init_scale": True}, {"growth_factor": torch.tensor(2.0)}, {"level": ["O1"]}])
def test_fields_of_amp_are_plain(options: dict[str, Any]) -> None:
    """True equals 1.0, which is a power of two, and so does a tensor."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Config.parse(amp=Amp(**options))


CALLS: list[tuple[Any, str]] = [
    (lambda: parallel_model(nn.Linear(1, 1), optimizers="adam").start(), "optimizers='adam'"),
    (lambda: parallel_model(nn.Linear(1, 1), methods=3).start(), "methods=3"),
    (lambda: parallel_model(nn.Linear(1, 1), methods=[b"loss"]).start(), "methods="),
    (lambda: parallel_model(nn.Linear(1, 1), restore="no").start(), "restore='no'"),
    (lambda: parallel_model(nn.Linear(1, 1), split_rng=0).start(), "split_rng=0"),
    (lambda: parallel_model(nn.Linear(1, 1), buffers="").start(), "buffers=''"),
    (lambda: parallel_model(nn.Linear(1, 1), average=np.array(["sum", "sum"])).start(), "average="),
    (lambda: shard_loader(DataLoader([1]), to_device="cpu"), "to_device='cpu'"),  # type: ignore[arg-type]  # bad input
    (lambda: shard_loader(DataLoader([1]), progress=3), "progress=3"),  # type: ignore[arg-type]  # bad input
    (lambda: shard_loader(DataLoader([1]), tail=np.array([1, 2])), "tail="),  # type: ignore[arg-type]  # bad input
    (lambda: checkpoints("a", in_background="no", model=nn.Linear(1, 1)).__enter__(), "in_background='no'"),
    (lambda: checkpoints("a", sharded="no", model=nn.Linear(1, 1)).__enter__(), "sharded='no'"),
    (lambda: save("a.pt", sharded="no", model=nn.Linear(1, 1)), "sharded='no'"),
    (lambda: load("a.pt", strict="no", model=nn.Linear(1, 1)), "strict='no'"),
    (lambda: load("a.pt", rng=0, model=nn.Linear(1, 1)), "rng=0"),
    (lambda: distributed(processes=2)(print).compare("3"), "compare('3', ...)"),
    (lambda: distributed(processes=2, launcher="slurm")(print).submit_many([{}], at_most=0), "at_most=0"),
]


@pytest.mark.parametrize(("call", "named"), CALLS)
def test_options_of_functions_are_checked(
    call: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is no list, no bool and no number for them either."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        call()
    assert named in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_values_that_cannot_be_evaluated_or_shown_are_refused(value: object) -> None:
    """Each is a fault with a reason and a fix, of options of plug-ins and of a call alike."""
    for plugin, option in OPTIONS:
        made = made_or_error(plugin, {option: value})
        assert isinstance(made, (plugin, ConfigError))
    for option in ("gpus", "processes", "timeout", "seed", "backend", "amp", "launcher", "process_group_backend"):
        with pytest.raises(ConfigError) as caught:
            Config.parse(**{option: value})
        (fault,) = caught.value.faults
        assert fault.what.startswith(f"{option}=")
        assert all((fault.why, fault.fix))


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(Config)])
@settings(max_examples=60, deadline=None)
@given(value=values)
def test_options_of_distributed_are_parsed_or_refused(option: str, value: Any) -> None:
    """No value raises another error than ConfigError, and what is parsed stays the same when it is parsed again."""
    try:
        config = Config.parse(**{option: value})
    except ConfigError:
        return
    assert Config.parse(**vars(config)) == config
