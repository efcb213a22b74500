"""Config: the user's options, each parsed once, and checked against each other; one error lists all faults.

Checks use what plug-ins declare, never their names.
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

ENV_PREFIX = "PARALLELIZE_"
# PRELOAD=0: the fork server imports none of the caller's modules; TRACEBACK=full: errors show this package's frames
_NO_OPTIONS = (
    "PARALLELIZE_KEY",
    "PARALLELIZE_POST_MORTEM",
    "PARALLELIZE_PRELOAD",
    "PARALLELIZE_TRACEBACK",
)

NO_COLLECTIVES = frozenset({"mps"})
"""Types of devices without collectives in torch: only a single process can run on them, under any backend."""

_NO_NUMBER = (None, 0, ALL_GPUS)  # values of gpus= that name no GPU

# Option names of other libraries -> our name, for the "did you mean" of an unknown option.
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
    """The options of a run, each with its parser, validated as far as possible without hardware information.

    `distributed` documents the options. Create one with `Config.parse`; `Config.parse(**vars(config))` is equal to
    `config`.
    """

    backend: Annotated[Backend, parse.plugin("backends", Backend)]
    gpus: Annotated[Gpus, parse.gpus] = None
    processes: Annotated[int | None, parse.integer(1, 65536)] = None
    num_nodes: Annotated[int | None, parse.integer(1, 65536)] = None
    amp: Annotated[Amp | None, parse.amp] = None
    amp_engine: Annotated[type[Precision], parse.plugin("precision", Precision, is_class=True)]
    seed: Annotated[int | None, parse.integer(0, 2**32 - 1)] = None
    timeout: Annotated[timedelta, parse.timeout] = timedelta(minutes=30)
    max_restarts: Annotated[int, parse.integer(0)] = 0
    launcher: Annotated[Launcher | None, parse.plugin("launchers", Launcher)] = None
    hosts: Annotated[tuple[str, ...] | None, parse.hosts] = None
    logs: Annotated[str, parse.logs] = "rank0"
    process_group_backend: Annotated[str | None, parse.process_group_backend] = None
    init_connection: Annotated[Callable[..., Any] | None, parse.function] = None
    wrap: Annotated[Callable[..., Any] | None, parse.function] = None
    verify_every: Annotated[int, parse.integer(0)] = 0
    logical: Annotated[int | None, parse.integer(1, 65536)] = None
    update_modules: Annotated[bool, parse.flag] = True

    @classmethod
    def parse(cls, **options: Any) -> Config:
        """Parse the user's options into a Config; `backend` defaults to "ddp", `amp_engine` to "native".

        Raises:
            ConfigError: options are unknown, invalid or exclude each other; the error lists all faults.
        """
        plugins = {"backend": "ddp", "amp_engine": "native"}
        parsed, faults = (
            {name: _parse(name, value) for name, value in plugins.items()},
            list[Fault](),
        )
        for name, value in options.items():
            try:
                parsed[name] = _parse(name, value)
            except ConfigError as error:
                faults += error.faults
        config = cls(**parsed)  # an invalid option has its default, which contradicts no other one
        faults += contradictions(
            config, config.num_nodes or 1, "cpu" if config.is_for_cpu else None
        )
        if faults:
            raise ConfigError.of(faults)
        return config

    @property
    def is_for_cpu(self) -> bool:
        """Whether the run is on the CPU of any machine."""
        return self.gpus == 0 or (self.gpus is None and self.processes is not None)

    @property
    def starter(self) -> Launcher | None:
        """The launcher that is asked for, by `launcher` or by `hosts`; None: the one for this machine."""
        return registry.find("launchers", "ssh")(hosts=self.hosts) if self.hosts else self.launcher

    def changed(self, **changes: Any) -> Config:
        """Return a copy with some options replaced.

        An option that excludes one of the changes is reset: `changed(processes=2)` resets `gpus` to None.

        Raises:
            ConfigError: the changes are invalid, or exclude other options.
        """
        options = {**vars(self), **changes}
        if "gpus" not in changes and changes.get("processes") is not None and self.gpus != 0:
            options["gpus"] = None
        with contextlib.suppress(ConfigError):  # an invalid gpus= is refused with all other faults
            if "processes" not in changes and _parse("gpus", changes.get("gpus")) not in _NO_NUMBER:
                options["processes"] = None
        return Config.parse(**options)

    def merged(self, environ: Mapping[str, str]) -> Config:
        """Return a copy in which PARALLELIZE_<OPTION> variables override the options given in code.

        An empty variable counts as unset. A PARALLELIZE_ variable that names no option is refused: it is probably a
        typo, and a long job with the wrong options costs more than unsetting another tool's variable.

        An object given in code is kept if the variable only repeats its name: PARALLELIZE_BACKEND=ddp keeps
        `backend=DDPBackend(...)` with its options, and PARALLELIZE_AMP=1 keeps `amp=Amp(...)`.

        Args:
            environ: environment variables of this process; not modified.

        Raises:
            ConfigError: a variable names no option, has an invalid value, or contradicts an option given in code.
        """
        changes = {}
        for variable, text in _variables(environ).items():
            name = variable.removeprefix(ENV_PREFIX).lower()
            own = getattr(self, name, None)
            is_same_by_name = text == getattr(own, "name", None) or (
                isinstance(own, Amp) and FLAGS.get(text.lower())
            )
            if not is_same_by_name:
                changes[name] = text
        try:
            return self.changed(**changes) if changes else self
        except ConfigError as error:
            raise naming_variables(error, environ) from None


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    name: annotated.__metadata__[0]
    for name, annotated in get_type_hints(Config, include_extras=True).items()
}


def _parse(name: str, value: Any) -> Any:
    if name not in _PARSERS:
        fix = did_you_mean(_FOREIGN_NAMES.get(name, name), _PARSERS)
        raise ConfigError(f"option {name}={value!r}", why="no option has this name", fix=fix)
    is_default = value is None and getattr(Config, name, "") is None
    return None if is_default else _PARSERS[name](name, value)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text.strip()
        for name, text in sorted(environ.items())
        if name.startswith(ENV_PREFIX) and name not in _NO_OPTIONS and text.strip()
    }


def naming_variables(error: ConfigError, environ: Mapping[str, str]) -> ConfigError:
    """Return an error of options that variables may have overridden; it names these variables."""
    given = ", ".join(f"{name}={text}" for name, text in _variables(environ).items())
    end = f" (the environment has {given})" if given else ""
    return ConfigError.of([Fault(each.what, each.why + end, each.fix) for each in error.faults])


def contradictions(config: Config, num_nodes: int, device_type: str | None) -> Iterator[Fault]:
    """Yield a Fault for each combination of options that is impossible on this type of device; None: on any."""
    gpus, processes, backend = config.gpus, config.processes, config.backend
    if gpus not in _NO_NUMBER and processes is not None:
        yield Fault(
            f"{gpus_text(gpus)} with processes={processes}",
            "gpus= starts one process per GPU, and processes= starts processes on the CPU",
            "drop processes= to run on GPUs, or gpus= to run on the CPU, or use gpus='auto': GPUs if there are any",
        )
    if config.hosts and config.launcher is not None:
        yield Fault(
            f"hosts={list(config.hosts)} with launcher={config.launcher.name!r}",
            "hosts= starts the processes by ssh",
            "drop one of them, or use launcher=SSHLauncher(hosts=...) with options",
        )
    is_single = backend.process_per == "node" and backend.devices_per_process is None
    if is_single and gpus != ALL_GPUS and (processes or 1) > 1:
        yield Fault(
            f"backend={backend.name!r} with processes={processes}",
            f"{backend.name} drives all devices of a node from one process",
            use("processes=1", lambda other: other.process_per == "device"),
        )
    if num_nodes > (backend.max_nodes or num_nodes) and not backend.multi_node_fallback:
        yield Fault(
            f"backend={backend.name!r} with num_nodes={num_nodes}",
            f"{backend.name} runs on at most {backend.max_nodes} node(s)",
            use(f"num_nodes={backend.max_nodes}", lambda other: other.max_nodes is None),
        )
    by_device = backend_by_device_type(config.process_group_backend or "cuda:nccl")
    is_on_nccl = backend.process_per == "device" and by_device.get("cuda") == "nccl"
    if isinstance(gpus, tuple) and len(set(gpus)) < len(gpus) and is_on_nccl:
        yield Fault(
            gpus_text(gpus),
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks share one GPU)",
        )
    if config.logical is not None and (config.wrap is not None or not backend.divides_batches):
        yield Fault(
            f"logical={config.logical} with {f'backend={backend.name!r}' if config.wrap is None else 'wrap='}",
            "only its own engine divides batches into parts, and adds their gradients in one order",
            use("no wrap=" if config.wrap else "", lambda other: other.divides_batches),
        )
    if config.amp is not None:
        yield from _amp_faults(backend, config.amp, config.amp_engine, device_type)
    if device_type is not None and device_type not in NO_COLLECTIVES:
        yield from _device_faults(backend, config.process_group_backend, device_type)


def _device_faults(backend: Backend, group: str | None, device_type: str) -> Iterator[Fault]:
    if device_type not in backend.device_types:
        yield Fault(
            f"backend={backend.name!r} on {device_type}",
            f"it runs on: {', '.join(sorted(backend.device_types))}",
            use(
                "processes=1 to run on the CPU" if "cpu" in backend.device_types else "",
                lambda other: device_type in other.device_types,
            ),
        )
    if group is not None and device_type not in (by_device := backend_by_device_type(group)):
        yield Fault(
            f"process_group_backend={group!r} on {device_type}",
            f"its collectives support: {', '.join(sorted(by_device))}",
            "omit it (the default depends on the device), or use 'gloo'",
        )


def _amp_faults(
    backend: Backend, amp: Amp, engine: type[Precision], device_type: str | None
) -> Iterator[Fault]:
    levels, level = backend.amp.get(engine.name, frozenset()), amp.level or engine.default_level
    if level not in levels:
        instead = _choices("amp", levels) or _choices("amp_engine", backend.amp)
        yield Fault(
            f"backend={backend.name!r} with amp_engine={engine.name!r} and amp={level!r}",
            f"under {backend.name}, the levels of the {engine.name} engine are: {', '.join(sorted(levels)) or 'none'}",
            use(instead, lambda other: level in other.amp.get(engine.name, ())),
        )
    if device_type is None or level == "O0":
        return
    known = {name for name, dtype in DTYPES.items() if dtype in engine.dtypes.get(device_type, ())}
    asked = {name for name, dtype in DTYPES.items() if dtype == amp.dtype}
    if not known or not asked <= known:
        yield Fault(
            f"amp={min(asked, default=level)!r} on {device_type}",
            f"{engine.name} computes on {device_type} in: {', '.join(sorted(known)) or 'fp32'}",
            f"use {_choices('amp', known) or 'another amp_engine'}, or amp=False on {device_type}",
        )


def use(alternative: str, fits: Callable[[type[Backend]], bool]) -> str:
    """Return the `fix` text "use processes=1, or backend='ddp' or 'fsdp'", with the backends for which `fits` is true.

    Args:
        alternative: to a backend; may be empty.
        fits: whether a backend is an alternative.
    """
    backends = [
        name for name in registry.names("backends") if fits(registry.find("backends", name))
    ]
    usable = [each for each in (alternative, _choices("backend", backends)) if each]
    return f"use {', or '.join(usable) or 'a backend of your own (see parallelize.plugins.base)'}"


def _choices(option: str, values: Iterable[str]) -> str:
    names = " or ".join(map(repr, sorted(values)))
    return names and f"{option}={names}"
