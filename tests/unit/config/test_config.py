"""What a request means, and everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import option_sets

from parallelize.backends.ddp import DDPBackend
from parallelize.cluster.devices import Gpus
from parallelize.config.config import Config
from parallelize.config.options import FROM_TEXT, PARSERS, Options
from parallelize.errors import ConfigError, Fault
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher

ALL_LEVELS = frozenset(LEVELS)


@dataclass(frozen=True, kw_only=True)
class Declared(Backend):
    """A backend that only declares."""

    name = "declared"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": ALL_LEVELS}
    static: bool = False

    def engine(self, inner, *, world, devices):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NodeWise(Declared):
    """One process drives all devices of its node, on one node, with two levels."""

    name = "nodewise"
    process_per = "node"
    max_nodes = 1
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset({"O0", "O1"})}


@dataclass(frozen=True)
class Queue(Launcher):
    """A launcher with an option."""

    name = "queue"
    partition: str = "short"

    def launch(self, task, *, environ):
        raise NotImplementedError


backend_values = st.sampled_from([*registry.names("backends"), DDPBackend(), Declared(static=True), NodeWise()])
engines = st.sampled_from(registry.names("precision"))


def faults_of(**options):
    """The faults of a request."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(**options)
    return caught.value.faults


def parsed(options):
    """The Config of some options, or None if they contradict each other."""
    try:
        return Config.parse(**options)
    except ConfigError:
        return None


@given(option_sets(), backend_values, engines)
def test_round_trip(options, backend, engine):
    """Options that mean something give a Config equal to its own round trip, or contradict each other in pairs."""
    request = {**options, "backend": backend, "amp_engine": engine}
    try:
        config = Config.parse(**request)
    except ConfigError as error:
        faults = error.faults
    else:
        faults = ()
        assert Config.parse(**config.options()) == config
        assert set(config.options()) == {each.name for each in fields(Config)}
    for fault in faults:
        names = ["backend", "gpus", "processes", "num_nodes", "amp", "amp_engine"]
        assert any(f"{name}=" in fault.what for name in names)
        assert fault.why
        assert fault.fix


@given(option_sets(), option_sets(invalid=True))
def test_every_fault_is_named(options, wrong):
    """One error names each value without a meaning, whatever the other options are."""
    faults = faults_of(**{**options, **wrong})
    for name, value in wrong.items():
        shown = value.__name__ if isinstance(value, type) else repr(value)
        (fault,) = [fault for fault in faults if fault.what.startswith(f"{name}=")]
        assert shown in fault.what or isinstance(value, Amp)
        assert fault.why
        assert fault.fix


@given(option_sets(), option_sets())
def test_changed_never_mutates(options, changes):
    """A changed Config leaves the first as it was, and has the changes."""
    config = parsed(options)
    if config is None:
        return
    before = config.options()
    try:
        other = config.changed(**changes)
    except ConfigError:
        pass
    else:
        for name, value in changes.items():
            assert getattr(other, name) == PARSERS[name](name, value)
    assert config.options() == before
    assert config == Config.parse(**before)


def test_is_frozen():
    """Nothing sets an option of a Config."""
    with pytest.raises(FrozenInstanceError):
        Config.parse().seed = 1  # type: ignore[misc]  # on purpose


def test_defaults():
    """A request of nothing is ddp on whatever there is."""
    assert Config.parse() == Config(backend=DDPBackend())


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"backend": "ddp"}, "backend", DDPBackend()),
        ({"gpus": "0,2"}, "gpus", Gpus(indices=(0, 2))),
        ({"amp": True}, "amp", Amp()),
        ({"amp": False}, "amp", None),
        ({"amp": "O2"}, "amp", Amp(level="O2")),
        ({"amp": "bf16"}, "amp", Amp(dtype=torch.bfloat16)),
        ({"amp": "fp16"}, "amp", Amp(dtype=torch.float16)),
        ({"timeout": 90}, "timeout", timedelta(seconds=90)),
        ({"timeout": timedelta(hours=1)}, "timeout", timedelta(hours=1)),
        ({"process_group_backend": "cpu:gloo,cuda:nccl"}, "process_group_backend", "cpu:gloo,cuda:nccl"),
    ],
)
def test_meanings(options, name, value):
    """What an option's value means."""
    assert getattr(Config.parse(**options), name) == value


KNOWN = ", ".join(map(repr, sorted(PARSERS)))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"gpu": 4}, Fault("option gpu=4", "there is no such option", f"did you mean 'gpus'? known: {KNOWN}")),
        ({"rocket": 1}, Fault("option rocket=1", "there is no such option", f"known: {KNOWN}")),
        (
            {"distributed_backend": "ddp"},
            Fault(
                "option distributed_backend='ddp'",
                "there is no such option",
                f"did you mean 'backend'? known: {KNOWN}",
            ),
        ),
        (
            {"nb_gpu_nodes": 2},
            Fault("option nb_gpu_nodes=2", "there is no such option", f"did you mean 'num_nodes'? known: {KNOWN}"),
        ),
        (
            {"backend": DDPBackend},
            Fault("backend=DDPBackend", "it is a class, not a backend with its options", "use backend=DDPBackend()"),
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
                "dtype is torch.bfloat16 or torch.float16; growth_factor is above 1; "
                "backoff_factor is between 0 and 1; growth_interval is a number of steps from 1",
                "correct them, or leave them out",
            ),
        ),
        (
            {"processes": 0},
            Fault("processes=0", "it must be a whole number from 1 to 65536", "use processes=1, say"),
        ),
        (
            {"seed": -1},
            Fault("seed=-1", "it must be a whole number from 0 to 4294967295", "use seed=0, say"),
        ),
        (
            {"timeout": 0},
            Fault(
                "timeout=0",
                "a wait lasts some time, and must end (100000000 seconds at most)",
                "use seconds (a positive number) or a timedelta",
            ),
        ),
        ({"logs": ""}, Fault("logs=''", "it names no place for output", "use 'rank0', 'all' or a directory")),
        (
            {"logs": "rank1"},
            Fault(
                "logs='rank1'",
                "it looks like a rank, and rank 0 alone or all of them can be shown",
                "use 'rank0' or 'all'; a directory of this name is './rank1'",
            ),
        ),
        ({"wrap": 1}, Fault("wrap=1", "it cannot be called", "give a function, as in wrap=my_function")),
        ({"update_modules": 1}, Fault("update_modules=1", "it is neither on nor off", "use True or False")),
    ],
)
def test_faults(options, fault):
    """Each fault says what, why and how to fix it."""
    assert faults_of(**options) == (fault,)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"backend": "dpp"}, "there is no backend of that name"),
        ({"backend": 3}, "a int names no backend"),
        ({"launcher": "sge"}, "there is no launcher of that name"),
        ({"amp_engine": "amp"}, "there is no amp_engine of that name"),
    ],
)
def test_unknown_plug_ins_list_the_known(options, why):
    """A name without a plug-in lists those that there are."""
    ((name, value),) = options.items()
    kind = {"backend": "backends", "launcher": "launchers", "amp_engine": "precision"}[name]
    (fault,) = faults_of(**options)
    assert (fault.what, fault.why) == (f"{name}={value!r}", why)
    for known in registry.names(kind):
        assert repr(known) in fault.fix


def test_process_group_backends():
    """What torch does not have is refused, with torch's own list."""
    (fault,) = faults_of(process_group_backend="cpu:gloo,cuda:ncl")
    assert fault.what == "process_group_backend='cpu:gloo,cuda:ncl'"
    assert fault.why == "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'"
    assert fault.fix.startswith("did you mean 'nccl'? known:")


def offered(fits):
    """The backends that an error offers."""
    return [name for name in registry.names("backends") if fits(registry.get("backends", name))]


@pytest.mark.parametrize(
    ("options", "what", "why", "fix"),
    [
        (
            {"gpus": [0, 1], "processes": 2},
            "gpus=[0, 1] with processes=2",
            "gpus= starts one process per GPU, processes= so many on the CPU: both at once say two things",
            "drop processes= to run on GPUs, or gpus= to run on the CPU",
        ),
        (
            {"gpus": [0, 0]},
            "gpus=[0, 0]",
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks share one GPU)",
        ),
        (
            {"backend": NodeWise(), "processes": 2},
            "backend='nodewise' with processes=2",
            "nodewise drives all devices of a node from one process",
            "use processes=1, or backend='",
        ),
        (
            {"backend": NodeWise(), "num_nodes": 2},
            "backend='nodewise' with num_nodes=2",
            "nodewise spans at most 1 node(s)",
            "use num_nodes=1, or backend='",
        ),
        (
            {"backend": NodeWise(), "amp": "O3"},
            "backend='nodewise' with amp='O3'",
            "under nodewise the native engine has the levels O0, O1",
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
    """Options that exclude each other are refused, both with their values."""
    (fault,) = faults_of(**options)
    assert (fault.what, fault.why) == (what, why)
    assert fault.fix.startswith(fix)


def test_an_engine_that_a_backend_lacks():
    """A precision engine that a backend does not declare is refused, and the declared ones are offered."""
    backend = Declared()
    object.__setattr__(backend, "amp", {"other": ALL_LEVELS})
    (fault,) = faults_of(backend=backend, amp=True)
    assert fault.what == "backend='declared' with amp_engine='native'"
    assert fault.why == "native cannot run under declared"
    assert fault.fix.startswith("use amp_engine='other', or backend='")
    for name in offered(lambda other: "native" in other.amp):
        assert repr(name) in fault.fix


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 0, "processes": 2},
        {"gpus": [0, 0], "process_group_backend": "gloo"},
        {"backend": NodeWise(), "processes": 1},
        {"backend": NodeWise(), "num_nodes": 1},
        {"amp": "bf16", "processes": 2},
        {"amp": Amp(level="O0", dtype=torch.float16), "processes": 2},
        {"backend": NodeWise(), "amp": True},
    ],
)
def test_what_looks_like_a_contradiction_and_is_none(options):
    """Options that agree are accepted."""
    assert Config.parse(**options)


def test_a_fault_contradicts_nothing():
    """A value without a meaning is one fault, and not a second one against its neighbour."""
    assert len(faults_of(gpus="two", processes=2)) == 1
    assert len(faults_of(amp_engine="amp", amp=True, backend=NodeWise())) == 1


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({"gpus": 4}, {"processes": 2}, (None, 2)),
        ({"processes": 2}, {"gpus": 4}, (Gpus(count=4), None)),
        ({"processes": 2}, {"gpus": None}, (None, 2)),
        ({"processes": 2}, {"gpus": 0}, (Gpus.NONE, 2)),
        ({"gpus": 0}, {"processes": 2}, (Gpus.NONE, 2)),
        ({"gpus": 4}, {"seed": 1}, (Gpus(count=4), None)),
    ],
)
def test_the_excluded_option_gives_way(options, changes, expected):
    """A change drops the option that it excludes, and no other."""
    config = Config.parse(**options).changed(**changes)
    assert (config.gpus, config.processes) == expected


def test_changes_do_not_give_way_to_each_other():
    """Two changes that exclude each other are a fault."""
    with pytest.raises(ConfigError, match=r"gpus=4 with processes=2"):
        Config.parse(gpus=1).changed(gpus=4, processes=2)


@pytest.mark.parametrize(
    ("options", "environ", "name", "value"),
    [
        ({"gpus": 4}, {"PARALLELIZE_GPUS": "0,2"}, "gpus", Gpus(indices=(0, 2))),
        ({"gpus": 4}, {"PARALLELIZE_PROCESSES": "2"}, "gpus", None),
        ({"processes": 2}, {"PARALLELIZE_GPUS": "4"}, "processes", None),
        ({"gpus": 4}, {"PARALLELIZE_GPUS": ""}, "gpus", Gpus(count=4)),
        ({"gpus": 4}, {"PARALLELIZE_GPUS": "  "}, "gpus", Gpus(count=4)),
        ({}, {"PARALLELIZE_NUM_NODES": " 2 "}, "num_nodes", 2),
        ({}, {"PARALLELIZE_AMP": "true"}, "amp", Amp()),
        ({}, {"PARALLELIZE_AMP": "O2"}, "amp", Amp(level="O2")),
        ({"amp": True}, {"PARALLELIZE_AMP": "0"}, "amp", None),
        ({"amp": "O2"}, {"PARALLELIZE_AMP": "1"}, "amp", Amp(level="O2")),
        ({"amp": "O2"}, {"PARALLELIZE_AMP": "O1"}, "amp", Amp(level="O1")),
        ({}, {"PARALLELIZE_TIMEOUT": "90.5"}, "timeout", timedelta(seconds=90.5)),
        ({}, {"PARALLELIZE_SEED": "7"}, "seed", 7),
        ({}, {"PARALLELIZE_UPDATE_MODULES": "no"}, "update_modules", False),
        ({}, {"PARALLELIZE_LOGS": "all"}, "logs", "all"),
        ({"backend": Declared()}, {"PARALLELIZE_BACKEND": "ddp"}, "backend", DDPBackend()),
        ({}, {"PARALLEL_GPUS": "4", "parallelize_gpus": "4", "GPUS": "4"}, "gpus", None),
    ],
)
def test_the_environment_wins(options, environ, name, value):
    """A variable replaces what the code says; one that is set to nothing does not."""
    assert getattr(Config.parse(**options).merged(environ), name) == value


def test_the_same_backend_keeps_its_options():
    """Naming the backend or launcher that the code has keeps the code's object."""
    backend = DDPBackend()
    config = Config.parse(backend=backend).merged({"PARALLELIZE_BACKEND": " ddp "})
    assert config.backend is backend


def test_the_same_launcher_keeps_its_options(monkeypatch):
    """So it does for a launcher."""
    monkeypatch.setattr(registry, "find", lambda kind, name: Queue if kind == "launchers" else None)
    config = Config(backend=DDPBackend(), launcher=Queue(partition="long"))
    assert config.merged({"PARALLELIZE_LAUNCHER": "queue"}).launcher == Queue(partition="long")


def test_nothing_to_merge():
    """Without a variable of ours the request is the same object."""
    config = Config.parse(gpus=2)
    assert config.merged({"HOME": "/root", "PARALLELIZE_SEED": ""}) is config


def merge_faults(environ, **options):
    """The faults of a merge."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(**options).merged(environ)
    return caught.value.faults


VARIABLES = ", ".join(repr(f"PARALLELIZE_{name.upper()}") for name in sorted(FROM_TEXT, key=str.upper))


@pytest.mark.parametrize(
    ("variable", "why", "hint"),
    [
        ("PARALLELIZE_GPU", "it names no option", "did you mean 'PARALLELIZE_GPUS'? "),
        ("PARALLELIZE_gpus", "it names no option", "did you mean 'PARALLELIZE_GPUS'? "),
        ("PARALLELIZE_WRAP", "only Python can give this option", ""),
        ("PARALLELIZE_WORKERS", "it names no option", ""),
        ("PARALLELIZE_", "it names no option", ""),
    ],
)
def test_unknown_variables(variable, why, hint):
    """A variable with our prefix that names no option is refused, and the known ones are listed."""
    (fault,) = merge_faults({variable: "1"})
    assert fault.what == f"environment variable {variable}"
    assert fault.why == why
    assert fault.fix == f"{hint}known: {VARIABLES}; unset it if it is another program's"


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
def test_values_without_a_meaning(name, text):
    """A value without a meaning is refused by the variable's name, as it was written."""
    (fault,) = merge_faults({f"PARALLELIZE_{name}": text})
    assert fault.what == f"environment variable PARALLELIZE_{name}={text!r}"
    assert fault.why
    assert fault.fix


def test_a_variable_that_contradicts_the_code():
    """A contradiction says which side the environment took."""
    (fault,) = merge_faults({"PARALLELIZE_PROCESSES": "2"}, amp="fp16", gpus=2)
    assert fault.what == "amp='fp16' on cpu"
    assert fault.why == "native computes on cpu in: bf16 (the environment says PARALLELIZE_PROCESSES=2)"


def test_every_fault_of_a_merge():
    """One error holds unknown variables, values without a meaning, and contradictions."""
    faults = merge_faults(
        {
            "PARALLELIZE_GPU": "1",
            "PARALLELIZE_TIMEOUT": "x",
            "PARALLELIZE_GPUS": "2",
            "PARALLELIZE_PROCESSES": "2",
        }
    )
    assert [fault.what for fault in faults] == [
        "environment variable PARALLELIZE_GPU",
        "environment variable PARALLELIZE_TIMEOUT='x'",
        "gpus=2 with processes=2",
    ]


@given(st.dictionaries(st.sampled_from([f"PARALLELIZE_{name.upper()}" for name in PARSERS]), st.text(max_size=6)))
def test_random_variables(environ):
    """Whatever the variables say, it is a Config that round-trips, or a ConfigError."""
    try:
        config = Config.parse().merged(environ)
    except ConfigError as error:
        faults = error.faults
    else:
        faults = ()
        assert Config.parse(**config.options()) == config
    assert all(fault.what and fault.why and fault.fix for fault in faults)


def test_every_option_has_a_parser():
    """Options, parsers and the fields of Config are the same names; text gives all but functions."""
    assert set(PARSERS) == {each.name for each in fields(Config)} == Options.__optional_keys__
    assert set(PARSERS) - set(FROM_TEXT) == {"init_connection", "wrap"}
