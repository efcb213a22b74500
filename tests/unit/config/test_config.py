"""Parsing of options into a Config, with all faults in one error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import option_sets

from parallelize.backends.ddp import DDPBackend
from parallelize.config.config import Config
from parallelize.config.options import ALL_GPUS, Options, backend_by_device_type
from parallelize.errors import ConfigError, Fault
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher
from parallelize.precision.native import NativePrecision

ALL_LEVELS = frozenset(LEVELS)


@dataclass(frozen=True, kw_only=True)
class Declared(Backend):
    """A backend with capabilities and no engine."""

    name = "declared"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": ALL_LEVELS}
    static: bool = False

    def engine(self, inner, *, world, devices):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SingleNode(Declared):
    """A backend of one process for all devices of a single node, with two levels."""

    name = "nodewise"
    process_per = "node"
    max_nodes = 1
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset({"O0", "O1"})}


@dataclass(frozen=True)
class ClusterLauncher(Launcher):
    """A launcher with an option."""

    name = "queue"
    partition: str = "short"

    def launch(self, task, *, environ):
        raise NotImplementedError


backend_values = st.sampled_from([*registry.names("backends"), DDPBackend(), Declared(static=True), SingleNode()])
engines = st.sampled_from(registry.names("precision"))


def faults_of(**options):
    """Return the faults of a request."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(**options)
    return caught.value.faults


def parsed(options):
    """Return the Config of some options, or None if they contradict each other."""
    try:
        return Config.parse(**options)
    except ConfigError:
        return None


@given(option_sets(), backend_values, engines)
def test_round_trip(options, backend, engine):
    """Valid options give a Config that round-trips, or contradict each other in pairs."""
    request = {**options, "backend": backend, "amp_engine": engine}
    try:
        config = Config.parse(**request)
    except ConfigError as error:
        faults = error.faults
    else:
        faults = ()
        assert Config.parse(**vars(config)) == config
    for fault in faults:
        names = ["backend", "gpus", "processes", "num_nodes", "amp", "amp_engine"]
        assert any(f"{name}=" in fault.what for name in names)
        assert fault.why
        assert fault.fix


@given(option_sets(), option_sets(invalid=True))
def test_every_fault_is_named(options, wrong):
    """One error names each invalid value, whatever the other options are."""
    faults = faults_of(**{**options, **wrong})
    for name, value in wrong.items():
        shown = value.__name__ if isinstance(value, type) else repr(value)
        (fault,) = [fault for fault in faults if fault.what.startswith(f"{name}=")]
        assert shown in fault.what or isinstance(value, Amp)
        assert fault.why
        assert fault.fix


@given(option_sets(), option_sets())
def test_changed_never_mutates(options, changes):
    """`changed` returns a Config with the changes, and leaves the original unchanged."""
    config = parsed(options)
    if config is None:
        return
    before = dict(vars(config))
    try:
        other = config.changed(**changes)
    except ConfigError:
        pass
    else:
        for name, value in changes.items():
            assert getattr(other, name) == getattr(Config.parse(**{name: value}), name)
    assert vars(config) == before
    assert config == Config.parse(**before)


def test_is_frozen():
    """Options of a Config cannot be assigned."""
    with pytest.raises(FrozenInstanceError):
        Config.parse().seed = 1  # type: ignore[misc]  # on purpose


def test_defaults():
    """Without options the backend is ddp and everything else has its default."""
    assert Config.parse() == Config(backend=DDPBackend(), amp_engine=NativePrecision)


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"backend": "ddp"}, "backend", DDPBackend()),
        ({"backend": DDPBackend}, "backend", DDPBackend()),
        ({"gpus": "0,2"}, "gpus", (0, 2)),
        ({"amp": True}, "amp", Amp()),
        ({"amp": False}, "amp", None),
        ({"amp": "O2"}, "amp", Amp(level="O2")),
        ({"amp": "bf16"}, "amp", Amp(dtype=torch.bfloat16)),
        ({"amp": "fp16"}, "amp", Amp(dtype=torch.float16)),
        ({"timeout": 90}, "timeout", timedelta(seconds=90)),
        ({"timeout": timedelta(hours=1)}, "timeout", timedelta(hours=1)),
        ({"timeout": "10min"}, "timeout", timedelta(minutes=10)),
        ({"timeout": "1.5 h"}, "timeout", timedelta(minutes=90)),
        ({"timeout": "30s"}, "timeout", timedelta(seconds=30)),
        ({"timeout": "30 sec"}, "timeout", timedelta(seconds=30)),
        ({"timeout": "2d"}, "timeout", timedelta(days=2)),
        ({"timeout": 0.5}, "timeout", timedelta(seconds=0.5)),
        ({"timeout": 10**8}, "timeout", timedelta(seconds=10**8)),
        ({"timeout": timedelta(seconds=10**8)}, "timeout", timedelta(seconds=10**8)),
        ({"process_group_backend": "cpu:gloo,cuda:nccl"}, "process_group_backend", "cpu:gloo,cuda:nccl"),
    ],
)
def test_values(options, name, value):
    """Each form of an option's value is parsed."""
    assert getattr(Config.parse(**options), name) == value


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("processes", 1, 65536),
        ("num_nodes", 1, 65536),
        ("seed", 0, 2**32 - 1),
        ("max_restarts", 0, 2**31 - 1),
        ("verify_every", 0, 2**31 - 1),
    ],
)
def test_limits_of_integers(name, least, most):
    """The least and the largest value are accepted, and those beside them are refused."""
    optional = name in {"processes", "num_nodes", "seed"}
    for value in (least, most, *([None] if optional else [])):
        assert getattr(Config.parse(**{name: value}), name) == value
    assert getattr(Config.parse(**{name: str(most)}), name) == most
    for value in (least - 1, most + 1, True, 1.0, *([] if optional else [None])):
        (fault,) = faults_of(**{name: value})
        assert fault == Fault(
            f"{name}={value}", f"it must be an integer from {least} to {most}", f"use {name}={least}, for example"
        )


@pytest.mark.parametrize("timeout", [1e-9, -0.5, 10**8 + 1, timedelta(0), timedelta(seconds=10**8 + 1), True, "30 x"])
def test_limits_of_a_timeout(timeout):
    """A timeout that is 0 after rounding, or too long for a clock, is refused, as is a text that is no time."""
    (fault,) = faults_of(timeout=timeout)
    assert fault.why == "it must be a time above 0, of at most 100000000 seconds"


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("init_scale", [0.5, 1, 2.0**126], [0, 2.0**127, 1000.0, math.inf, math.nan, "1"]),
        ("growth_factor", [2, 2.0**126], [1, 1.5, 2.0**127]),
        ("backoff_factor", [2.0**-20, 0.5], [0.0, 0.9, 1.0]),
        ("growth_interval", [1, 2**62], [0, 1.5, True]),
        ("outputs", ["fp32", "as computed"], [None, "half"]),
        ("communication_dtype", [None, torch.bfloat16, torch.float16, torch.float32], [torch.float64]),
    ],
)
def test_limits_of_the_fields_of_amp(name, valid, invalid):
    """The scale stays a finite fp32 number, and its rules let it grow and shrink."""
    for value in valid:
        assert Config.parse(amp=Amp(**{name: value})).amp == Amp(**{name: value})
    for value in invalid:
        (fault,) = faults_of(amp=Amp(**{name: value}))
        assert fault.what == f"amp=Amp({name}={value!r})"


KNOWN = ", ".join(map(repr, sorted(vars(Config.parse()))))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"gpu": 4}, Fault("option gpu=4", "no option has this name", f"did you mean 'gpus'? known: {KNOWN}")),
        ({"rocket": 1}, Fault("option rocket=1", "no option has this name", f"known: {KNOWN}")),
        (
            {"distributed_backend": "ddp"},
            Fault(
                "option distributed_backend='ddp'",
                "no option has this name",
                f"did you mean 'backend'? known: {KNOWN}",
            ),
        ),
        (
            {"nb_gpu_nodes": 2},
            Fault("option nb_gpu_nodes=2", "no option has this name", f"did you mean 'num_nodes'? known: {KNOWN}"),
        ),
        (
            {"amp": "O4"},
            Fault(
                "amp='O4'",
                "it names neither a level nor a half-precision type",
                "use True, an Amp(...), or a name; known: 'O0', 'O1', 'O2', 'O3', 'bf16', 'fp16'",
            ),
        ),
        (
            {"amp": Amp(growth_factor=1.0, backoff_factor=1.5, growth_interval=0, dtype=torch.float64)},
            Fault(
                "amp=Amp(dtype=torch.float64, growth_factor=1.0, backoff_factor=1.5, growth_interval=0)",
                "dtype is torch.bfloat16 or torch.float16; growth_factor is a power of two above 1; "
                "backoff_factor is a power of two between 0 and 1; growth_interval is at least 1 step",
                "correct them, or leave them out",
            ),
        ),
        (
            {"processes": 0},
            Fault("processes=0", "it must be an integer from 1 to 65536", "use processes=1, for example"),
        ),
        (
            {"seed": -1},
            Fault("seed=-1", "it must be an integer from 0 to 4294967295", "use seed=0, for example"),
        ),
        (
            {"timeout": 0},
            Fault(
                "timeout=0",
                "it must be a time above 0, of at most 100000000 seconds",
                "use seconds (a positive number), a text such as '10min', or a timedelta",
            ),
        ),
        ({"logs": ""}, Fault("logs=''", "it is not 'rank0', 'all' or a path", "use 'rank0', 'all' or a directory")),
        ({"wrap": 1}, Fault("wrap=1", "it cannot be called", "pass a function, as in wrap=my_function")),
        ({"update_modules": 1}, Fault("update_modules=1", "it is not a bool", "use True or False")),
    ],
)
def test_faults(options, fault):
    """Each fault has the value, the reason and the fix."""
    assert faults_of(**options) == (fault,)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"backend": "dpp"}, "no backend has this name"),
        ({"backend": 3}, "no backend has this name"),
        ({"launcher": "sge"}, "no launcher has this name"),
        ({"amp_engine": "amp"}, "no amp_engine has this name"),
    ],
)
def test_unknown_plug_ins_list_the_known_ones(options, why):
    """The fault of an unknown plug-in lists the known ones."""
    ((name, value),) = options.items()
    kind = {"backend": "backends", "launcher": "launchers", "amp_engine": "precision"}[name]
    (fault,) = faults_of(**options)
    assert (fault.what, fault.why) == (f"{name}={value!r}", why)
    for known in registry.names(kind):
        assert repr(known) in fault.fix


def test_a_backend_of_torch_is_told_its_option():
    """Torch calls nccl a backend, which is another option here."""
    (fault,) = faults_of(backend="nccl")
    assert fault.fix.startswith("use process_group_backend='nccl' for the collectives; known: 'auto', 'balanced'")


def test_process_group_backends():
    """A backend that torch does not have is refused, with torch's list."""
    (fault,) = faults_of(process_group_backend="cpu:gloo,cuda:ncl")
    assert fault.what == "process_group_backend='cpu:gloo,cuda:ncl'"
    assert fault.why == "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'"
    assert fault.fix.startswith("did you mean 'nccl'? known:")


@pytest.mark.parametrize("text", ["cpu:gloo,cpu:nccl", "undefined", "gloo,nccl", "cpu:undefined"])
def test_a_device_type_has_one_process_group_backend(text):
    """A device type named twice, or a backend that cannot be used, is refused."""
    assert len(faults_of(process_group_backend=text)) == 1


def test_process_group_backends_by_device_type():
    """A list names them; a single backend is used for every device that it supports."""
    assert backend_by_device_type("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert backend_by_device_type("nccl") == {"cuda": "nccl"}


def test_contradictions_are_named_beside_invalid_options():
    """Two options that exclude each other are named, although another option could not be parsed."""
    whats = [fault.what for fault in faults_of(gpus=2, processes=2, seed=-1)]
    assert whats == ["seed=-1", "gpus=2 with processes=2"]


def backends_where(fits):
    """Return the names of the backends for which `fits` is true."""
    return [name for name in registry.names("backends") if fits(registry.find("backends", name))]


@pytest.mark.parametrize(
    ("options", "what", "why", "fix"),
    [
        (
            {"gpus": [0, 1], "processes": 2},
            "gpus=[0, 1] with processes=2",
            "gpus= starts one process per GPU, and processes= starts processes on the CPU",
            "drop processes= to run on GPUs, or gpus= to run on the CPU, or use gpus='auto': GPUs if there are any",
        ),
        (
            {"gpus": [0, 0]},
            "gpus=[0, 0]",
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks share one GPU)",
        ),
        (
            {"backend": SingleNode(), "processes": 2},
            "backend='nodewise' with processes=2",
            "nodewise drives all devices of a node from one process",
            "use processes=1, or backend='",
        ),
        (
            {"backend": SingleNode(), "num_nodes": 2},
            "backend='nodewise' with num_nodes=2",
            "nodewise runs on at most 1 node(s)",
            "use num_nodes=1, or backend='",
        ),
        (
            {"backend": SingleNode(), "amp": "O3"},
            "backend='nodewise' with amp_engine='native' and amp='O3'",
            "under nodewise, the levels of the native engine are: O0, O1",
            "use amp='O0' or 'O1', or backend='",
        ),
        (
            {"amp": "fp16", "processes": 2},
            "amp='fp16' on cpu",
            "native computes on cpu in: bf16",
            "use amp='bf16', or amp=False on cpu",
        ),
        (
            {"amp": "fp16", "gpus": 0},
            "amp='fp16' on cpu",
            "native computes on cpu in: bf16",
            "use amp='bf16', or amp=False on cpu",
        ),
    ],
)
def test_contradictions(options, what, why, fix):
    """Options that exclude each other are refused, with both values."""
    (fault,) = faults_of(**options)
    assert (fault.what, fault.why) == (what, why)
    assert fault.fix.startswith(fix)


def test_an_unsupported_precision_engine():
    """A precision engine that a backend does not declare is refused, and the declared ones are offered."""
    backend = Declared()
    object.__setattr__(backend, "amp", {"other": ALL_LEVELS})
    (fault,) = faults_of(backend=backend, amp=True)
    assert fault.what == "backend='declared' with amp_engine='native' and amp='O1'"
    assert fault.why == "under declared, the levels of the native engine are: none"
    assert fault.fix.startswith("use amp_engine='other', or backend='")
    for name in backends_where(lambda other: "native" in other.amp):
        assert repr(name) in fault.fix


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 0, "processes": 2},
        {"gpus": "auto", "processes": 2},
        {"gpus": [0, 0], "process_group_backend": "gloo"},
        {"backend": SingleNode(), "processes": 1},
        {"backend": SingleNode(), "num_nodes": 1},
        {"amp": "bf16", "processes": 2},
        {"amp": Amp(level="O0", dtype=torch.float16), "processes": 2},
        {"backend": SingleNode(), "amp": True},
    ],
)
def test_compatible_options(options):
    """Options that are close to a contradiction, but compatible, are accepted."""
    assert Config.parse(**options)


def test_an_invalid_value_is_one_fault():
    """An invalid value is not also reported as a contradiction with other options."""
    assert len(faults_of(gpus="two", processes=2)) == 1
    assert len(faults_of(amp_engine="amp", amp=True, backend=SingleNode())) == 1


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({"gpus": 4}, {"processes": 2}, (None, 2)),
        ({"processes": 2}, {"gpus": 4}, (4, None)),
        ({"processes": 2}, {"gpus": None}, (None, 2)),
        ({"processes": 2}, {"gpus": "auto"}, (ALL_GPUS, 2)),
        ({"gpus": "auto", "processes": 2}, {"processes": 1}, (None, 1)),
        ({"gpus": "auto", "processes": 2}, {"gpus": 4}, (4, None)),
        ({"gpus": "auto", "processes": 2}, {"seed": 1}, (ALL_GPUS, 2)),
        ({"processes": 2}, {"gpus": 0}, (0, 2)),
        ({"gpus": 0}, {"processes": 2}, (0, 2)),
        ({"gpus": 4}, {"seed": 1}, (4, None)),
    ],
)
def test_a_change_resets_the_excluded_option(options, changes, expected):
    """A change resets the option that it excludes, and no other."""
    config = Config.parse(**options).changed(**changes)
    assert (config.gpus, config.processes) == expected


def test_changes_that_exclude_each_other():
    """Two changes that exclude each other are a fault."""
    with pytest.raises(ConfigError, match=r"gpus=4 with processes=2"):
        Config.parse(gpus=1).changed(gpus=4, processes=2)


@pytest.mark.parametrize(
    ("options", "environ", "name", "value"),
    [
        ({"gpus": 4}, {"PARALLELIZE_GPUS": "0,2"}, "gpus", (0, 2)),
        ({"gpus": 4}, {"PARALLELIZE_PROCESSES": "2"}, "gpus", None),
        ({"processes": 2}, {"PARALLELIZE_GPUS": "4"}, "processes", None),
        ({"gpus": 4}, {"PARALLELIZE_GPUS": ""}, "gpus", 4),
        ({"gpus": 4}, {"PARALLELIZE_GPUS": "  "}, "gpus", 4),
        ({}, {"PARALLELIZE_NUM_NODES": " 2 "}, "num_nodes", 2),
        ({}, {"PARALLELIZE_AMP": "true"}, "amp", Amp()),
        ({}, {"PARALLELIZE_AMP": "O2"}, "amp", Amp(level="O2")),
        ({"amp": True}, {"PARALLELIZE_AMP": "0"}, "amp", None),
        ({"amp": "O2"}, {"PARALLELIZE_AMP": "1"}, "amp", Amp(level="O2")),
        ({"amp": "O2"}, {"PARALLELIZE_AMP": "True"}, "amp", Amp(level="O2")),
        ({"amp": "O2"}, {"PARALLELIZE_AMP": "O1"}, "amp", Amp(level="O1")),
        ({}, {"PARALLELIZE_TIMEOUT": "90.5"}, "timeout", timedelta(seconds=90.5)),
        ({}, {"PARALLELIZE_TIMEOUT": "2min"}, "timeout", timedelta(minutes=2)),
        ({}, {"PARALLELIZE_SEED": "7"}, "seed", 7),
        ({}, {"PARALLELIZE_UPDATE_MODULES": "no"}, "update_modules", False),
        ({}, {"PARALLELIZE_LOGS": "all"}, "logs", "all"),
        ({"backend": Declared()}, {"PARALLELIZE_BACKEND": "ddp"}, "backend", DDPBackend()),
        ({}, {"PARALLEL_GPUS": "4", "parallelize_gpus": "4", "GPUS": "4"}, "gpus", None),
    ],
)
def test_variables_override_code(options, environ, name, value):
    """A variable overrides the option given in code; an empty variable does not."""
    assert getattr(Config.parse(**options).merged(environ), name) == value


def test_the_same_backend_keeps_its_options():
    """A variable with the name of the backend given in code keeps the code's object."""
    backend = DDPBackend()
    config = Config.parse(backend=backend).merged({"PARALLELIZE_BACKEND": " ddp "})
    assert config.backend is backend


def test_the_same_launcher_keeps_its_options():
    """A variable with the name of the launcher given in code keeps the code's object."""
    config = Config.parse(launcher=ClusterLauncher(partition="long"))
    assert config.merged({"PARALLELIZE_LAUNCHER": "queue"}).launcher == ClusterLauncher(partition="long")


def test_nothing_to_merge():
    """Without PARALLELIZE_ variables `merged` returns the same object."""
    config = Config.parse(gpus=2)
    assert config.merged({"HOME": "/root", "PARALLELIZE_SEED": ""}) is config


def merge_faults(environ, **options):
    """Return the faults of a request merged with variables."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(**options).merged(environ)
    return caught.value.faults


@pytest.mark.parametrize(
    ("variable", "option", "hint"),
    [
        ("PARALLELIZE_GPU", "gpu", "did you mean 'gpus'? "),
        ("PARALLELIZE_WORKERS", "workers", ""),
        ("PARALLELIZE_", "", ""),
    ],
)
def test_unknown_variables(variable, option, hint):
    """A PARALLELIZE_ variable that names no option is refused, and the known ones are listed."""
    (fault,) = merge_faults({variable: "1"})
    assert fault.what == f"option {option}='1'"
    assert fault.why == f"no option has this name (the environment has {variable}=1)"
    assert fault.fix == f"{hint}known: {KNOWN}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GPUS", "two"),
        ("PROCESSES", "2.5"),
        ("PROCESSES", "+-3"),
        ("PROCESSES", "²"),
        ("SEED", "9" * 5000),
        ("AMP", "maybe"),
        ("TIMEOUT", "nan"),
        ("TIMEOUT", "half an hour"),
        ("BACKEND", "dpp"),
        ("AMP_ENGINE", "cuda"),
        ("UPDATE_MODULES", "2"),
        ("PROCESS_GROUP_BACKEND", "ncl"),
    ],
)
def test_invalid_values_of_variables(name, text):
    """An invalid value is refused with the name and the text of the variable."""
    (fault,) = merge_faults({f"PARALLELIZE_{name}": text})
    assert fault.what == f"{name.lower()}={text!r}"
    assert fault.why.endswith(f" (the environment has PARALLELIZE_{name}={text})")
    assert fault.fix


def test_a_variable_that_contradicts_the_code():
    """The fault of a contradiction names the variable."""
    (fault,) = merge_faults({"PARALLELIZE_PROCESSES": "2"}, amp="fp16", gpus=2)
    assert fault.what == "amp='fp16' on cpu"
    assert fault.why == "native computes on cpu in: bf16 (the environment has PARALLELIZE_PROCESSES=2)"


def test_every_fault_of_a_merge():
    """One error lists unknown variables, invalid values and contradictions."""
    faults = merge_faults(
        {
            "PARALLELIZE_GPU": "1",
            "PARALLELIZE_TIMEOUT": "x",
            "PARALLELIZE_GPUS": "2",
            "PARALLELIZE_PROCESSES": "2",
        }
    )
    assert [fault.what for fault in faults] == [
        "timeout='x'",
        "option gpu='1'",
        "gpus=2 with processes=2",
    ]


@given(
    st.dictionaries(
        st.sampled_from([f"PARALLELIZE_{name.upper()}" for name in vars(Config.parse())]), st.text(max_size=6)
    )
)
def test_random_variables(environ):
    """Random variables give a Config that round-trips, or a ConfigError."""
    try:
        config = Config.parse().merged(environ)
    except ConfigError as error:
        faults = error.faults
    else:
        faults = ()
        assert Config.parse(**vars(config)) == config
    assert all(fault.what and fault.why and fault.fix for fault in faults)


def test_the_options_that_a_user_may_pass():
    """They have types for checkers, and every one but functions can be given as text."""
    assert vars(Config.parse()).keys() == Options.__optional_keys__
    (fault,) = merge_faults({"PARALLELIZE_WRAP": "f"})
    assert (fault.what, fault.why) == ("wrap='f'", "it cannot be called (the environment has PARALLELIZE_WRAP=f)")
