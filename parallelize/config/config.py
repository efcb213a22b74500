"""Config: the user's options, parsed once into a frozen dataclass; one error lists all faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from parallelize.config.compatibility import conflicts
from parallelize.config.gpus import Gpus
from parallelize.config.options import FROM_TEXT, PARSERS
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.plugins.base import Amp, Backend, Launcher

__all__ = ["ENV_PREFIX", "Config", "naming_variables"]

ENV_PREFIX = "PARALLELIZE_"
# PRELOAD=0: the fork server imports none of the caller's modules; TRACEBACK=full: errors show this package's frames
_NO_OPTIONS = ("PARALLELIZE_PRELOAD", "PARALLELIZE_TRACEBACK")

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
    """The options of a run, validated as far as possible without hardware information.

    `distributed` documents the options. Create one with `Config.parse`; `Config.parse(**config.options())` is equal to
    `config`.
    """

    backend: Backend
    gpus: Gpus | None = None
    processes: int | None = None
    num_nodes: int | None = None
    amp: Amp | None = None
    amp_engine: str = "native"
    seed: int | None = None
    timeout: timedelta = field(default=timedelta(minutes=30))
    max_restarts: int = 0
    launcher: Launcher | None = None
    logs: str = "rank0"
    process_group_backend: str | None = None
    init_connection: Callable[..., Any] | None = None
    wrap: Callable[..., Any] | None = None
    verify_every: int = 0
    update_modules: bool = True

    @classmethod
    def parse(cls, **options: Any) -> Config:
        """Parse the user's options into a Config; `backend` defaults to "ddp".

        Raises:
            ConfigError: options are unknown, invalid or exclude each other; the error lists all faults.
        """
        parsed, faults = _parse_each({"backend": "ddp", **options})
        # Without the options that could not be parsed: they already have a Fault and must not cause a second one.
        defaults = {each.name: each.default for each in dataclasses.fields(cls) if each.name not in options}
        faults += conflicts({**defaults, **parsed})
        if faults:
            raise ConfigError.of(faults)
        return cls(**parsed)

    def options(self) -> dict[str, Any]:
        """Return every option by name, as `parse` accepts them."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def changed(self, **changes: Any) -> Config:
        """Return a copy with some options replaced.

        An option that excludes one of the changes is reset: `changed(processes=2)` resets `gpus` to None.

        Raises:
            ConfigError: the changes are invalid, or exclude other options.
        """
        return Config.parse(**{**self.options(), **self._reset_by(changes), **changes})

    def _reset_by(self, changes: Mapping[str, Any]) -> dict[str, None]:
        changed = {name for name in ("gpus", "processes") if changes.get(name) is not None}
        if changed == {"processes"} and "gpus" not in changes and self.gpus != Gpus.NONE:
            return {"gpus": None}
        keeps_processes = "processes" in changes or changes.get("gpus") is None
        if not keeps_processes and PARSERS["gpus"]("gpus", changes["gpus"]) not in (Gpus.NONE, Gpus.ALL):
            return {"processes": None}
        return {}

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
        changes, faults = self._parse_variables(environ)
        try:
            config = self.changed(**changes) if changes else self
        except ConfigError as error:
            raise ConfigError.of([*faults, *naming_variables(error, changes, environ)]) from error
        if faults:
            raise ConfigError.of(faults)
        return config

    def _parse_variables(self, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Fault]]:
        """Parse the PARALLELIZE_ variables; return the options to change, and a Fault per invalid variable."""
        changes: dict[str, Any] = {}
        faults: list[Fault] = []
        for variable, text in sorted(environ.items()):
            if not variable.startswith(ENV_PREFIX) or not text.strip() or variable in _NO_OPTIONS:
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in FROM_TEXT or variable != _variable(name):
                faults.append(_unknown_variable(variable))
                continue
            parsed = PARSERS[name](name, FROM_TEXT[name](text.strip()))
            if isinstance(parsed, Fault):
                faults.append(dataclasses.replace(parsed, what=f"environment variable {variable}={text!r}"))
            elif not self._is_same_by_name(name, parsed):
                changes[name] = parsed
        return changes, faults

    def _is_same_by_name(self, name: str, parsed: object) -> bool:
        """Return whether a variable's value, a name without options, names the object given in code."""
        current = getattr(self, name)
        if name in ("backend", "launcher"):
            return type(current) is type(parsed)
        return name == "amp" and current is not None and parsed == Amp()


def naming_variables(error: ConfigError, names: Iterable[str], environ: Mapping[str, str]) -> list[Fault]:
    """Return the faults of an error; each names the variables that the environment has for these options."""
    given = ", ".join(f"{_variable(name)}={environ[_variable(name)]}" for name in names if environ.get(_variable(name)))
    end = f" (the environment has {given})" if given else ""
    return [dataclasses.replace(fault, why=f"{fault.why}{end}") for fault in error.faults]


def _parse_each(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    parsed: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, value in options.items():
        result = PARSERS[name](name, value) if name in PARSERS else _unknown_option(name, value)
        if isinstance(result, Fault):
            faults.append(result)
        else:
            parsed[name] = result
    return parsed, faults


def _unknown_option(name: str, value: object) -> Fault:
    fix = did_you_mean(_FOREIGN_NAMES.get(name, name), PARSERS)
    return Fault(f"option {name}={value!r}", "no option has this name", fix)


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def _unknown_variable(variable: str) -> Fault:
    name = variable.removeprefix(ENV_PREFIX)
    why = "this option can only be set in Python" if variable in map(_variable, PARSERS) else "it names no option"
    known = did_you_mean(name, (each.upper() for each in FROM_TEXT), prefix=ENV_PREFIX)
    return Fault(f"environment variable {variable}", why, f"{known}; unset it if it is another program's")
