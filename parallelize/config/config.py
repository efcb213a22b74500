"""Config: the user's options, each parsed once, and checked against each other; one error lists all faults.

Checks use what plug-ins declare, never their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from parallelize.config import options as parse
from parallelize.config.options import DTYPES, Gpus, backend_by_device_type
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.plugins import registry
from parallelize.plugins.base import Amp, Backend, Launcher, Precision

__all__ = ["ENV_PREFIX", "Config", "dtype_faults", "matching_backends", "naming_variables", "node_faults", "use_any_of"]

ENV_PREFIX = "PARALLELIZE_"
# PRELOAD=0: the fork server imports none of the caller's modules; TRACEBACK=full: errors show this package's frames
_NO_OPTIONS = ("PARALLELIZE_KEY", "PARALLELIZE_PRELOAD", "PARALLELIZE_TRACEBACK")

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


def _by(parser: Callable[[str, Any], Any]) -> dict[str, Any]:
    return {"parser": parser}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a run, validated as far as possible without hardware information.

    `distributed` documents the options. Create one with `Config.parse`; `Config.parse(**config.options())` is equal to
    `config`.
    """

    backend: Backend = field(metadata=_by(parse.plugin("backends", Backend)))
    gpus: Gpus | None = field(default=None, metadata=_by(parse.gpus))
    processes: int | None = field(default=None, metadata=_by(parse.integer(1, most=65536, optional=True)))
    num_nodes: int | None = field(default=None, metadata=_by(parse.integer(1, most=65536, optional=True)))
    amp: Amp | None = field(default=None, metadata=_by(parse.amp))
    amp_engine: str = field(default="native", metadata=_by(parse.plugin("precision", Precision)))
    seed: int | None = field(default=None, metadata=_by(parse.integer(0, most=2**32 - 1, optional=True)))
    timeout: timedelta = field(default=timedelta(minutes=30), metadata=_by(parse.timeout))
    max_restarts: int = field(default=0, metadata=_by(parse.integer(0)))
    launcher: Launcher | None = field(default=None, metadata=_by(parse.plugin("launchers", Launcher)))
    logs: str = field(default="rank0", metadata=_by(parse.logs))
    process_group_backend: str | None = field(default=None, metadata=_by(parse.process_group_backend))
    init_connection: Callable[..., Any] | None = field(default=None, metadata=_by(parse.function))
    wrap: Callable[..., Any] | None = field(default=None, metadata=_by(parse.function))
    verify_every: int = field(default=0, metadata=_by(parse.integer(0)))
    update_modules: bool = field(default=True, metadata=_by(parse.flag))

    @classmethod
    def parse(cls, **options: Any) -> Config:
        """Parse the user's options into a Config; `backend` defaults to "ddp".

        Raises:
            ConfigError: options are unknown, invalid or exclude each other; the error lists all faults.
        """
        parsed, faults = {"backend": _parse("backend", "ddp")}, list[Fault]()
        for name, value in options.items():
            try:
                parsed[name] = _parse(name, value)
            except ConfigError as error:
                faults += error.faults
        config = cls(**parsed)  # an invalid option has its default, which contradicts no other one
        faults += _conflicts(config)
        if faults:
            raise ConfigError.of(faults)
        return config

    def options(self) -> dict[str, Any]:
        """Return every option by name, as `parse` accepts them."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def changed(self, **changes: Any) -> Config:
        """Return a copy with some options replaced.

        An option that excludes one of the changes is reset: `changed(processes=2)` resets `gpus` to None.

        Raises:
            ConfigError: the changes are invalid, or exclude other options.
        """
        options = {**self.options(), **changes}
        if "gpus" not in changes and changes.get("processes") is not None and self.gpus != Gpus.NONE:
            options["gpus"] = None
        elif "processes" not in changes and _names_gpus(changes.get("gpus")):
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
        changes, faults = dict[str, Any](), list[Fault]()
        for variable, text in sorted(environ.items()):
            if not variable.startswith(ENV_PREFIX) or not text.strip() or variable in _NO_OPTIONS:
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in PARSERS or variable != _variable(name):
                known = did_you_mean(variable.removeprefix(ENV_PREFIX), map(str.upper, PARSERS), prefix=ENV_PREFIX)
                fix = f"{known}; unset it if it is another program's"
                faults.append(Fault(f"environment variable {variable}", "it names no option", fix))
                continue
            try:
                value = _parse(name, text.strip())
            except ConfigError as error:
                what = f"environment variable {variable}={text!r}"
                faults += [dataclasses.replace(each, what=what) for each in error.faults]
                continue
            own = getattr(self, name)
            is_same_by_name = type(own) is type(value) and (name in ("backend", "launcher") or value == Amp())
            if not is_same_by_name:
                changes[name] = value
        config = self
        try:
            config = self.changed(**changes) if changes else self
        except ConfigError as error:
            faults += naming_variables(error, changes, environ)
        if faults:
            raise ConfigError.of(faults)
        return config


PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    each.name: each.metadata["parser"] for each in dataclasses.fields(Config)
}


def _parse(name: str, value: Any) -> Any:
    if name in PARSERS:
        return PARSERS[name](name, value)
    fix = did_you_mean(_FOREIGN_NAMES.get(name, name), PARSERS)
    raise ConfigError(f"option {name}={value!r}", why="no option has this name", fix=fix)


def _names_gpus(value: object) -> bool:
    return value is not None and _parse("gpus", value) not in (Gpus.NONE, Gpus.ALL)


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def naming_variables(error: ConfigError, names: Iterable[str], environ: Mapping[str, str]) -> list[Fault]:
    """Return the faults of an error; each names the variables that the environment has for these options."""
    given = ", ".join(f"{_variable(name)}={environ[_variable(name)]}" for name in names if environ.get(_variable(name)))
    end = f" (the environment has {given})" if given else ""
    return [dataclasses.replace(fault, why=f"{fault.why}{end}") for fault in error.faults]


def _conflicts(config: Config) -> Iterator[Fault]:
    """Yield a Fault for each combination of options that is impossible on every machine."""
    gpus, processes, backend = config.gpus, config.processes, config.backend
    if _names_gpus(gpus) and gpus is not None and processes is not None:
        yield Fault(
            f"{gpus.as_option} with processes={processes}",
            "gpus= starts one process per GPU, and processes= starts processes on the CPU",
            "drop processes= to run on GPUs, or gpus= to run on the CPU, or use gpus='auto': GPUs if there are any",
        )
    is_single = backend.process_per == "node" and backend.devices_per_process is None
    if is_single and gpus != Gpus.ALL and (processes or 1) > 1:
        yield Fault(
            f"backend={backend.name!r} with processes={processes}",
            f"{backend.name} drives all devices of a node from one process",
            use_any_of("processes=1", matching_backends(lambda other: other.process_per == "device")),
        )
    if backend.multi_node_fallback is None:
        yield from node_faults(backend, config.num_nodes or 1)
    by_device = backend_by_device_type(config.process_group_backend or "cuda:nccl")
    if gpus is not None and gpus.has_duplicates and backend.process_per != "node" and by_device.get("cuda") == "nccl":
        yield Fault(
            gpus.as_option,
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks share one GPU)",
        )
    if config.amp is not None:
        yield from _amp_faults(backend, config.amp, config.amp_engine)
        if gpus == Gpus.NONE or (gpus is None and processes is not None):
            yield from dtype_faults(config, "cpu")


def node_faults(backend: Backend, num_nodes: int) -> Iterator[Fault]:
    """Yield a Fault if the backend cannot run on `num_nodes` nodes."""
    if backend.max_nodes is not None and num_nodes > backend.max_nodes:
        yield Fault(
            f"backend={backend.name!r} with num_nodes={num_nodes}",
            f"{backend.name} runs on at most {backend.max_nodes} node(s)",
            use_any_of(f"num_nodes={backend.max_nodes}", matching_backends(lambda other: other.max_nodes is None)),
        )


def _amp_faults(backend: Backend, amp: Amp, engine: str) -> Iterator[Fault]:
    levels = backend.amp.get(engine, frozenset())
    level = amp.level or registry.get("precision", engine).default_level
    if not levels:
        engines = [name for name, supported in backend.amp.items() if supported]
        others = matching_backends(lambda other: bool(other.amp.get(engine)))
        yield Fault(
            f"backend={backend.name!r} with amp_engine={engine!r}",
            f"{engine} cannot run under {backend.name}",
            use_any_of(_choices("amp_engine", engines), others),
        )
    elif level not in levels:
        others = matching_backends(lambda other: level in other.amp.get(engine, ()))
        yield Fault(
            f"backend={backend.name!r} with amp={level!r}",
            f"under {backend.name}, the {engine} engine supports the levels {', '.join(sorted(levels))}",
            use_any_of(_choices("amp", levels), others),
        )


def dtype_faults(config: Config, device_type: str) -> Iterator[Fault]:
    """Yield a Fault if the precision engine does not support the dtype of `amp` on a type of device."""
    amp, engine = config.amp, registry.get("precision", config.amp_engine)
    if amp is None or (amp.level or engine.default_level) == "O0":
        return
    known = engine.dtypes.get(device_type, frozenset())
    names = {dtype: name for name, dtype in DTYPES.items()}
    if not known:
        yield Fault(
            f"amp_engine={engine.name!r} on {device_type}",
            f"it runs on: {', '.join(sorted(engine.dtypes))}",
            use_any_of(f"amp=False on {device_type}", "another amp_engine"),
        )
    elif amp.dtype is not None and amp.dtype not in known:
        usable = [names[each] for each in known]
        yield Fault(
            f"amp={names[amp.dtype]!r} on {device_type}",
            f"{engine.name} computes on {device_type} in: {', '.join(sorted(usable))}",
            use_any_of(_choices("amp", usable), f"amp=False on {device_type}"),
        )


def matching_backends(fits: Callable[[type[Backend]], bool]) -> str:
    """Return a text that lists the backends for which `fits` is true: "backend='ddp' or 'fsdp'"; empty if none."""
    return _choices("backend", [name for name in registry.names("backends") if fits(registry.get("backends", name))])


def use_any_of(*alternatives: str) -> str:
    """Return the `fix` text that lists the non-empty alternatives: "use amp='O1', or backend='ddp'"."""
    usable = [each for each in alternatives if each]
    return f"use {', or '.join(usable)}" if usable else "write a plug-in that can (see parallelize.plugins.base)"


def _choices(option: str, values: Iterable[str]) -> str:
    names = " or ".join(map(repr, sorted(values)))
    return names and f"{option}={names}"
