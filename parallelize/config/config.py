"""Config: the user's options, each parsed once, and checked against each other.

    options in code     ->  Config.parse, when a function is decorated: values and contradictions
    variables           ->  Config.merged, at each call: PARALLELIZE_GPUS=2 replaces gpus=
    hardware, launcher  ->  config.layout, at each call: the processes and their devices

Glossary:

    option         what the user asks for, by an argument of `distributed` or by a variable
    parser         a function from the value of an option to the value in a Config
    fault          what is wrong with a request, why, and how to fix it
    contradiction  a fault of two options that exclude each other
    layout         the processes of a call on each node, and the devices of each process
    local rank     a process of a node, from 0

One error lists all faults of a request. Checks use what plug-ins declare, never their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, get_type_hints

from parallelize.config import options as parse
from parallelize.config.options import (
    ALL_GPUS,
    DTYPES,
    FLAGS,
    Gpus,
    backend_by_device_type,
    gpus_text,
)
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.plugins import registry
from parallelize.plugins.base import Amp, Backend, Launcher, Precision
from parallelize.plugins.options import shown

ENV_PREFIX = "PARALLELIZE_"
# Variables that set no option. With PRELOAD=0, the fork server imports none of the caller's
# modules; with TRACEBACK=full, errors show the frames of this package.
_NO_OPTIONS = (
    "PARALLELIZE_KEY",
    "PARALLELIZE_POST_MORTEM",
    "PARALLELIZE_PRELOAD",
    "PARALLELIZE_TRACEBACK",
)

NO_COLLECTIVES = frozenset({"mps"})
"""Types of devices without collectives in torch: only one process can run on them."""

# Values of gpus= that name no GPU.
_NO_NUMBER = (None, 0, ALL_GPUS)

_MAX_PROCESSES = 65536

# Option of another library -> ours, for the "did you mean" of an unknown option.
_FOREIGN_NAMES = {
    "amp_level": "amp",
    "configure_ddp": "wrap",
    "devices": "gpus",
    "distributed_backend": "backend",
    "init_ddp_connection": "init_connection",
    "mixed_precision": "amp",
    "nb_gpu_nodes": "num_nodes",
    "nnodes": "num_nodes",
    "nproc_per_node": "gpus",
    "precision": "amp",
    "strategy": "backend",
    "use_amp": "amp",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a run, each with its parser, checked as far as no hardware is needed.

    `distributed` documents the options. Create a Config with `Config.parse`;
    `Config.parse(**vars(config))` is equal to `config`.
    """

    # How a model runs in parallel.
    backend: Annotated[Backend, parse.plugin("backends")]
    wrap: Annotated[Callable[..., Any] | None, parse.function] = None
    logical: Annotated[int | None, parse.integer(1, _MAX_PROCESSES)] = None
    verify_every: Annotated[int, parse.integer(0)] = 0

    # On what it runs.
    gpus: Annotated[Gpus, parse.gpus] = None
    processes: Annotated[int | None, parse.integer(1, _MAX_PROCESSES)] = None
    num_nodes: Annotated[int | None, parse.integer(1, _MAX_PROCESSES)] = None
    hosts: Annotated[tuple[str, ...] | None, parse.hosts] = None

    # In which numbers.
    amp: Annotated[Amp | None, parse.amp] = None
    amp_engine: Annotated[type[Precision], parse.plugin("precision", is_class=True)]
    seed: Annotated[int | None, parse.integer(0, 2**32 - 1)] = None

    # How its processes start, meet and end.
    launcher: Annotated[Launcher | None, parse.plugin("launchers")] = None
    process_group_backend: Annotated[str | None, parse.process_group_backend] = None
    init_connection: Annotated[Callable[..., Any] | None, parse.function] = None
    timeout: Annotated[timedelta, parse.timeout] = timedelta(minutes=30)
    max_restarts: Annotated[int, parse.integer(0)] = 0

    # What the caller sees of it.
    logs: Annotated[str, parse.logs] = "rank0"
    update_modules: Annotated[bool, parse.flag] = True

    @classmethod
    def parse(cls, **options: Any) -> Config:
        """Parse the user's options; `backend` defaults to "ddp", `amp_engine` to "native".

        Raises:
            ConfigError: options are unknown, invalid or exclude each other; it lists all faults.
        """
        parsed = {
            "backend": _parse("backend", "ddp"),
            "amp_engine": _parse("amp_engine", "native"),
        }
        faults: list[Fault] = []
        for name, value in options.items():
            try:
                parsed[name] = _parse(name, value)
            except ConfigError as error:
                faults += error.faults
        # An invalid option has its default here, which contradicts no other option.
        config = cls(**parsed)
        device_type = "cpu" if config.is_for_cpu else None
        faults += contradictions(config, config.num_nodes or 1, device_type)
        if faults:
            raise ConfigError.of(faults)
        return config

    @property
    def is_for_cpu(self) -> bool:
        """Whether the run is on the CPU of any machine."""
        return self.gpus == 0 or (self.gpus is None and self.processes is not None)

    @property
    def starter(self) -> Launcher | None:
        """The launcher that `launcher` or `hosts` ask for; None: the one for this machine."""
        if self.hosts:
            ssh: Launcher = registry.find("launchers", "ssh")(hosts=self.hosts)
            return ssh
        return self.launcher

    def changed(self, **changes: Any) -> Config:
        """Return a copy with some options replaced.

        An option that excludes a change is reset: `changed(processes=2)` resets `gpus` to None.

        Raises:
            ConfigError: the changes are invalid, or exclude other options.
        """
        options = {**vars(self), **changes}
        if "gpus" not in changes and changes.get("processes") is not None and self.gpus != 0:
            options["gpus"] = None
        # An invalid gpus= is no error here: `parse` refuses it, with all other faults.
        with contextlib.suppress(ConfigError):
            if "processes" not in changes and _parse("gpus", changes.get("gpus")) not in _NO_NUMBER:
                options["processes"] = None
        return Config.parse(**options)

    def merged(self, environ: Mapping[str, str]) -> Config:
        """Return a copy in which PARALLELIZE_<OPTION> variables replace options given in code.

        An empty variable counts as unset. A PARALLELIZE_ variable that names no option is refused:
        it is probably a typo, and a long job with the wrong options costs more than unsetting
        another tool's variable.

        An object given in code is kept if the variable only repeats its name:
        PARALLELIZE_BACKEND=ddp keeps `backend=DDPBackend(...)` with its options, and
        PARALLELIZE_AMP=1 keeps `amp=Amp(...)`.

        Args:
            environ: environment variables of this process; not modified.

        Raises:
            ConfigError: a variable names no option, has an invalid value, or contradicts an option
                given in code.
        """
        changes = {}
        for variable, text in _variables(environ).items():
            option = variable.removeprefix(ENV_PREFIX).lower()
            if not _is_named(getattr(self, option, None), text):
                changes[option] = text
        if not changes:
            return self
        try:
            return self.changed(**changes)
        except ConfigError as error:
            raise naming_variables(error, environ) from None


# Option -> its parser, which stands in the annotation of the option's field.
_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    option: annotation.__metadata__[0]
    for option, annotation in get_type_hints(Config, include_extras=True).items()
}


def _parse(name: str, value: Any) -> Any:
    """Return the value of an option as a Config has it.

    Raises:
        ConfigError: no option has this name, or its parser refuses the value.
    """
    if name not in _PARSERS:
        fix = did_you_mean(_FOREIGN_NAMES.get(name, name), _PARSERS)
        raise ConfigError(f"option {name}={shown(value)}", why="no option has this name", fix=fix)
    if value is None and getattr(Config, name, "") is None:
        # The option's default.
        return None
    return _PARSERS[name](name, value)


def _is_named(value: object, text: str) -> bool:
    """Whether a variable's text names the object that an option has in code."""
    if isinstance(value, Amp):
        return FLAGS.get(text.lower(), False)
    return text == getattr(value, "name", None)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set options, sorted by name."""
    variables = {}
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name not in _NO_OPTIONS and text.strip():
            variables[name] = text.strip()
    return variables


def naming_variables(error: ConfigError, environ: Mapping[str, str]) -> ConfigError:
    """Return an error of options that variables may have replaced; it names these variables."""
    assignments = ", ".join(f"{name}={text}" for name, text in _variables(environ).items())
    end = f" (the environment has {assignments})" if assignments else ""
    faults = [Fault(fault.what, fault.why + end, fault.fix) for fault in error.faults]
    return ConfigError.of(faults)


def contradictions(config: Config, num_nodes: int, device_type: str | None) -> Iterator[Fault]:
    """Yield a Fault for each combination of options that is impossible on this type of device.

    Args:
        config: the request.
        num_nodes: number of nodes, also if the request leaves it open.
        device_type: torch's name for the type of the devices; None: not known yet.
    """
    yield from _exclusive_options(config)
    yield from _process_faults(config, num_nodes)
    if config.amp is not None:
        yield from _amp_faults(config.backend, config.amp, config.amp_engine, device_type)
    if device_type is not None and device_type not in NO_COLLECTIVES:
        yield from _device_faults(config.backend, config.process_group_backend, device_type)


def _exclusive_options(config: Config) -> Iterator[Fault]:
    """Yield a Fault for options of which the user has to drop one."""
    if config.gpus not in _NO_NUMBER and config.processes is not None:
        yield Fault(
            f"{gpus_text(config.gpus)} with processes={config.processes}",
            "gpus= starts one process per GPU, and processes= starts processes on the CPU",
            "drop processes= to run on GPUs, or gpus= to run on the CPU, or use gpus='auto': "
            "GPUs if there are any",
        )

    if config.hosts and config.launcher is not None:
        yield Fault(
            f"hosts={list(config.hosts)} with launcher={config.launcher.name!r}",
            "hosts= starts the processes by ssh",
            "drop one of them, or use launcher=SSHLauncher(hosts=...) with options",
        )

    divides_batches = config.wrap is None and config.backend.divides_batches
    if config.logical is not None and not divides_batches:
        option = "wrap="
        alternative = "no wrap="
        if config.wrap is None:
            option = f"backend={config.backend.name!r}"
            alternative = ""
        yield Fault(
            f"logical={config.logical} with {option}",
            "only its own engine divides batches into parts, and adds their gradients in one order",
            fix_by_backend(alternative, lambda backend: backend.divides_batches),
        )


def _process_faults(config: Config, num_nodes: int) -> Iterator[Fault]:
    """Yield a Fault for processes that the backend, or NCCL between them, does not allow."""
    gpus, backend = config.gpus, config.backend
    has_one_process = backend.process_per == "node" and backend.devices_per_process is None
    if has_one_process and gpus != ALL_GPUS and (config.processes or 1) > 1:
        yield Fault(
            f"backend={backend.name!r} with processes={config.processes}",
            f"{backend.name} drives all devices of a node from one process",
            fix_by_backend("processes=1", lambda backend: backend.process_per == "device"),
        )

    has_too_many_nodes = backend.max_nodes is not None and num_nodes > backend.max_nodes
    if has_too_many_nodes and not backend.multi_node_fallback:
        fewer = f"num_nodes={backend.max_nodes}"
        yield Fault(
            f"backend={backend.name!r} with num_nodes={num_nodes}",
            f"{backend.name} runs on at most {backend.max_nodes} node(s)",
            fix_by_backend(fewer, lambda backend: backend.max_nodes is None),
        )

    # Without the option, the backend for GPUs is NCCL.
    backends = backend_by_device_type(config.process_group_backend or "cuda:nccl")
    is_on_nccl = backend.process_per == "device" and backends.get("cuda") == "nccl"
    if isinstance(gpus, tuple) and len(set(gpus)) < len(gpus) and is_on_nccl:
        yield Fault(
            gpus_text(gpus),
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks "
            "share one GPU)",
        )


def _device_faults(
    backend: Backend, process_group_backend: str | None, device_type: str
) -> Iterator[Fault]:
    """Yield a Fault if the backend, or the collectives, cannot run on this type of device.

    Args:
        backend: of the request.
        process_group_backend: the option; None: chosen by the type of the device, so it can run.
        device_type: torch's name for the type of the devices.
    """
    if device_type not in backend.device_types:
        device_types = sorted(backend.device_types)
        alternative = ""
        if "cpu" in device_types:
            alternative = "processes=1 to run on the CPU"
        yield Fault(
            f"backend={backend.name!r} on {device_type}",
            f"it runs on: {', '.join(device_types)}",
            fix_by_backend(alternative, lambda backend: device_type in backend.device_types),
        )
    if process_group_backend is None:
        return
    supported = backend_by_device_type(process_group_backend)
    if device_type not in supported:
        yield Fault(
            f"process_group_backend={process_group_backend!r} on {device_type}",
            f"its collectives support: {', '.join(sorted(supported))}",
            "omit it (the default depends on the device), or use 'gloo'",
        )


def _amp_faults(
    backend: Backend, amp: Amp, engine: type[Precision], device_type: str | None
) -> Iterator[Fault]:
    """Yield a Fault if the backend lacks the level, or the device the half-precision type.

    Args:
        backend: of the request.
        amp: the level and the half-precision type, of which the request may leave each open.
        engine: chooses what the request leaves open.
        device_type: torch's name for the type of the devices; None: not known yet.
    """
    levels = backend.amp.get(engine.name, frozenset())
    level = amp.level or engine.default_level
    if level not in levels:
        alternative = _choices("amp", levels) or _choices("amp_engine", backend.amp)
        names = ", ".join(sorted(levels)) or "none"
        yield Fault(
            f"backend={backend.name!r} with amp_engine={engine.name!r} and amp={level!r}",
            f"under {backend.name}, the levels of the {engine.name} engine are: {names}",
            fix_by_backend(alternative, lambda backend: level in backend.amp.get(engine.name, ())),
        )

    if device_type is None or level == "O0":
        return
    dtypes = engine.dtypes.get(device_type, frozenset())
    supported = [name for name, dtype in DTYPES.items() if dtype in dtypes]
    requested = [name for name, dtype in DTYPES.items() if dtype == amp.dtype]
    # Without a type in the request, the engine chooses one that the device supports.
    if supported and set(requested) <= set(supported):
        return
    fix = _choices("amp", supported) or "another amp_engine"
    yield Fault(
        f"amp={min(requested, default=level)!r} on {device_type}",
        f"{engine.name} computes on {device_type} in: {', '.join(sorted(supported)) or 'fp32'}",
        f"use {fix}, or amp=False on {device_type}",
    )


def fix_by_backend(alternative: str, fits: Callable[[type[Backend]], bool]) -> str:
    """Return a fix that names the backends which would do: "use backend='ddp' or 'fsdp'".

    Args:
        alternative: another way, which is named first, such as "processes=1"; "": there is none.
        fits: whether a backend has no such fault.
    """
    names = registry.names("backends")
    backends = [name for name in names if fits(registry.find("backends", name))]
    ways = [way for way in (alternative, _choices("backend", backends)) if way]
    if not ways:
        return "use a backend of your own (see parallelize.plugins.base)"
    return f"use {', or '.join(ways)}"


def _choices(option: str, values: Iterable[str]) -> str:
    """Return "option='a' or 'b'"; an empty text if there are no values."""
    names = [repr(value) for value in sorted(values)]
    if not names:
        return ""
    return f"{option}={' or '.join(names)}"
