"""Parsing of options into a Config, with all faults in one error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import option_sets, valid_gpus

from parallelize.backends.ddp import DDPBackend
from parallelize.config.config import Config
from parallelize.config.options import ALL_GPUS, Options, backend_by_device_type, gpus_text
from parallelize.errors import ConfigError, Fault
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher
from parallelize.precision.native import NativePrecision


@dataclass(frozen=True, kw_only=True)
class SingleNode(Backend):
    """One process for all devices of a single node, with two levels of one engine."""

    name = "nodewise"
    process_per = "node"
    max_nodes = 1
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset({"O0", "O1"})}

    def engine(self, inner, *, world, devices):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OtherEngine(SingleNode):
    """Another precision engine, and an option of its own."""

    name = "other"
    max_nodes = None
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"other": frozenset(LEVELS)}
    static: bool = False


@dataclass(frozen=True)
class ClusterLauncher(Launcher):
    """A launcher with an option."""

    name = "queue"
    partition: str = "short"

    def launch(self, task, *, environ):
        raise NotImplementedError


backend_values = st.sampled_from([*registry.names("backends"), DDPBackend(), OtherEngine(static=True), SingleNode()])
engines = st.sampled_from(registry.names("precision"))


def faults_of(environ=None, **options):
    """Return the faults of a request, merged with variables."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(**options).merged(environ or {})
    return caught.value.faults


@given(option_sets(), backend_values, engines)
def test_round_trip(options, backend, engine):
    """Valid options give a Config that round-trips, or contradict each other in pairs."""
    try:
        config = Config.parse(**options, backend=backend, amp_engine=engine)
    except ConfigError as error:
        for fault in error.faults:
            names = ["backend", "gpus", "processes", "num_nodes", "amp", "amp_engine"]
            assert any(f"{name}=" in fault.what for name in names)
            assert fault.why
            assert fault.fix
    else:
        assert Config.parse(**vars(config)) == config


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
    try:
        config = Config.parse(**options)
    except ConfigError:
        return
    before = dict(vars(config))
    with contextlib.suppress(ConfigError):
        other = config.changed(**changes)
        for name, value in changes.items():
            assert getattr(other, name) == getattr(Config.parse(**{name: value}), name)
    assert vars(config) == before


def test_defaults():
    """Without options the backend is ddp and everything else has its default; options cannot be assigned."""
    assert Config.parse() == Config(backend=DDPBackend(), amp_engine=NativePrecision)
    with pytest.raises(FrozenInstanceError):
        Config.parse().seed = 1


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
        ({"timeout": "10min"}, "timeout", timedelta(minutes=10)),
        ({"timeout": "1.5 h"}, "timeout", timedelta(minutes=90)),
        ({"timeout": "30 sec"}, "timeout", timedelta(seconds=30)),
        ({"timeout": "2d"}, "timeout", timedelta(days=2)),
        ({"timeout": 0.5}, "timeout", timedelta(seconds=0.5)),
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
    ("options", "what", "why", "fix"),
    [
        ({"gpu": 4}, "option gpu=4", "no option has this name", f"did you mean 'gpus'? known: {KNOWN}"),
        ({"rocket": 1}, "option rocket=1", "no option has this name", f"known: {KNOWN}"),
        ({"distributed_backend": "ddp"}, "option distributed_backend='ddp'", "no option", "did you mean 'backend'?"),
        ({"nb_gpu_nodes": 2}, "option nb_gpu_nodes=2", "no option", "did you mean 'num_nodes'?"),
        ({"amp": "O4"}, "amp='O4'", "it names neither a level", "use True, an Amp(...), or a name; known: 'O0', 'O1'"),
        ({"timeout": 0}, "timeout=0", "a time above 0", "use seconds (a positive number), a text such as '10min'"),
        ({"logs": ""}, "logs=''", "it is not 'rank0', 'all' or a path", "use 'rank0', 'all' or a directory"),
        ({"wrap": 1}, "wrap=1", "it cannot be called", "pass a function, as in wrap=my_function"),
        ({"update_modules": 1}, "update_modules=1", "it is not a bool", "use True or False"),
        ({"backend": "dpp"}, "backend='dpp'", "no backend has this name", "'auto', 'balanced', 'ddp'"),
        ({"backend": 3}, "backend=3", "no backend has this name", "known: 'auto', 'balanced', 'ddp'"),
        ({"launcher": "sge"}, "launcher='sge'", "no launcher has this name", "'ray', 'slurm', 'ssh'"),
        ({"amp_engine": "amp"}, "amp_engine='amp'", "no amp_engine has this name", "'apex', 'native'"),
        # Torch calls nccl a backend, which is another option here.
        ({"backend": "nccl"}, "backend='nccl'", "no backend", "use process_group_backend='nccl' for the collectives"),
        (
            {"process_group_backend": "cpu:gloo,cuda:ncl"},
            "process_group_backend='cpu:gloo,cuda:ncl'",
            "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'",
            "did you mean 'nccl'? known:",
        ),
        # Options that exclude each other
        ({"gpus": [0, 1], "processes": 2}, "gpus=[0, 1] with processes=2", "one process per GPU", "drop processes="),
        ({"gpus": [0, 0]}, "gpus=[0, 0]", "it names a GPU twice, and NCCL", "add process_group_backend='gloo'"),
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
            {"backend": OtherEngine(), "amp": True},
            "backend='other' with amp_engine='native' and amp='O1'",
            "under other, the levels of the native engine are: none",
            "use amp_engine='other', or backend='auto' or 'balanced'",
        ),
        ({"amp": "fp16", "processes": 2}, "amp='fp16' on cpu", "native computes on cpu in: bf16", "use amp='bf16'"),
        ({"amp": "fp16", "gpus": 0}, "amp='fp16' on cpu", "native computes on cpu in: bf16", "or amp=False on cpu"),
        # An invalid value is not also reported as a contradiction.
        ({"gpus": "two", "processes": 2}, "gpus='two'", "neither a number of GPUs", "use an int (how many)"),
        ({"amp_engine": "amp", "amp": True, "backend": SingleNode()}, "amp_engine='amp'", "no amp_engine", "known:"),
    ],
)
def test_faults(options, what, why, fix):
    """One fault has the value, or both of a contradiction, the reason and the fix."""
    (fault,) = faults_of(**options)
    assert fault.what == what
    assert why in fault.why
    assert fix in fault.fix


def test_process_group_backends_by_device_type():
    """A list names them; a device type named twice, or a backend that cannot be used, is refused."""
    assert backend_by_device_type("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert backend_by_device_type("nccl") == {"cuda": "nccl"}
    for text in ("cpu:gloo,cpu:nccl", "undefined", "gloo,nccl", "cpu:undefined"):
        assert len(faults_of(process_group_backend=text)) == 1


def test_contradictions_are_named_beside_invalid_options():
    """Two options that exclude each other are named, although another option could not be parsed."""
    whats = [fault.what for fault in faults_of(gpus=2, processes=2, seed=-1)]
    assert whats == ["seed=-1", "gpus=2 with processes=2"]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": SingleNode(), "processes": 1, "num_nodes": 1, "amp": True},
        {"amp": Amp(level="O0", dtype=torch.float16), "processes": 2},
    ],
)
def test_compatible_options(options):
    """Options that are close to a contradiction, but compatible, are accepted."""
    assert Config.parse(**options)


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
    """A change resets the option that it excludes, and no other; two changes may not exclude each other."""
    config = Config.parse(**options).changed(**changes)
    assert (config.gpus, config.processes) == expected
    with pytest.raises(ConfigError, match="gpus=4 with processes=2"):
        config.changed(gpus=4, processes=2)


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
        ({"backend": SingleNode()}, {"PARALLELIZE_BACKEND": "ddp"}, "backend", DDPBackend()),
        ({}, {"PARALLEL_GPUS": "4", "parallelize_gpus": "4", "GPUS": "4"}, "gpus", None),
    ],
)
def test_variables_override_code(options, environ, name, value):
    """A variable overrides the option given in code; an empty variable does not."""
    assert getattr(Config.parse(**options).merged(environ), name) == value


def test_what_a_variable_only_repeats_keeps_its_options():
    """A variable with the name of the plug-in given in code keeps the code's object; empty ones change nothing."""
    config = Config.parse(backend=OtherEngine(static=True), launcher=ClusterLauncher(partition="long"))
    merged = config.merged({"PARALLELIZE_BACKEND": " other ", "PARALLELIZE_LAUNCHER": "queue"})
    assert merged.backend is config.backend
    assert merged.launcher is config.launcher
    assert config.merged({"HOME": "/root", "PARALLELIZE_SEED": ""}) is config


@pytest.mark.parametrize(
    ("variable", "option", "hint"),
    [("GPU", "gpu", "did you mean 'gpus'? "), ("WORKERS", "workers", ""), ("", "", "")],
)
def test_unknown_variables(variable, option, hint):
    """A PARALLELIZE_ variable that names no option is refused, and the known ones are listed."""
    why = f"no option has this name (the environment has PARALLELIZE_{variable}=1)"
    assert faults_of({f"PARALLELIZE_{variable}": "1"}) == (Fault(f"option {option}='1'", why, f"{hint}known: {KNOWN}"),)


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
        ("WRAP", "f"),
        ("PROCESS_GROUP_BACKEND", "ncl"),
    ],
)
def test_invalid_values_of_variables(name, text):
    """An invalid value is refused with the name and the text of the variable."""
    (fault,) = faults_of({f"PARALLELIZE_{name}": text})
    assert fault.what == f"{name.lower()}={text!r}"
    assert fault.why.endswith(f" (the environment has PARALLELIZE_{name}={text})")
    assert fault.fix


def test_every_fault_of_a_merge():
    """One error lists unknown variables, invalid values and contradictions, and names the variables."""
    values = {"GPU": "1", "TIMEOUT": "x", "GPUS": "2", "PROCESSES": "2"}
    faults = faults_of({f"PARALLELIZE_{name}": text for name, text in values.items()})
    assert [fault.what for fault in faults] == ["timeout='x'", "option gpu='1'", "gpus=2 with processes=2"]
    (fault,) = faults_of({"PARALLELIZE_PROCESSES": "2"}, amp="fp16", gpus=2)
    assert fault.what == "amp='fp16' on cpu"
    assert fault.why == "native computes on cpu in: bf16 (the environment has PARALLELIZE_PROCESSES=2)"


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
        for fault in error.faults:
            assert all((fault.what, fault.why, fault.fix))
    else:
        assert Config.parse(**vars(config)) == config


def test_the_options_that_a_user_may_pass():
    """All have types for checkers."""
    assert vars(Config.parse()).keys() == Options.__optional_keys__


def parsed(value):
    """Return the parsed value of `gpus=`."""
    return Config.parse(gpus=value, process_group_backend="gloo").gpus


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (0, 0),
        (1, 1),
        (4, 4),
        ("4", 4),
        (" 4 ", 4),
        ("0", 0),
        (-1, ALL_GPUS),
        ("-1", ALL_GPUS),
        ("auto", ALL_GPUS),
        ([0], (0,)),
        ([2, 0], (2, 0)),
        ((1, 2), (1, 2)),
        (range(2), (0, 1)),
        ("0,2", (0, 2)),
        ("0, 2", (0, 2)),
        ("3,", (3,)),
        ([0, 0], (0, 0)),
        ([], 0),
    ],
)
def test_forms_of_gpus(value, meaning):
    """Each form of `gpus` is parsed into the documented meaning."""
    assert parsed(value) == meaning


@pytest.mark.parametrize(
    "value",
    [True, 1.0, {0, 1}, b"01", -2, 10**30, "-2", "two", "", "0,,1", "²", "9" * 5000, [0, -1, True], [1, 1.0, "1"]],
)
def test_invalid_gpus(value):
    """An invalid value is refused; the error has the value, the reason and the accepted forms."""
    with pytest.raises(ConfigError) as caught:
        parsed(value)
    (fault,) = caught.value.faults
    assert fault.what == f"gpus={value!r}"
    assert fault.why == "it is neither a number of GPUs nor a list of their indices, from 0"
    assert fault.fix.startswith("use an int (how many), a list of indices, -1 or 'auto' (all)")


@given(valid_gpus)
def test_gpus_are_printed_as_they_are_written(value):
    """A parsed value is parsed into itself, and messages show it as Python code with the same meaning."""
    meaning = parsed(value)
    assert parsed(meaning) == meaning
    name, _, written = gpus_text(meaning).partition("=")
    assert (name, parsed(eval(written))) == ("gpus", meaning)
