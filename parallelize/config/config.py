"""What the user asked for: parsed once into a frozen Config, every fault of the request in one error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from parallelize.cluster.devices import Gpus
from parallelize.config.compatibility import contradictions
from parallelize.config.options import FROM_TEXT, PARSERS
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.plugins.base import Amp, Backend, Launcher

__all__ = ["ENV_PREFIX", "Config"]

ENV_PREFIX = "PARALLELIZE_"

# Names that other libraries give to what is called otherwise here.
_ELSEWHERE = {
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
    """A request, checked as far as it can be without looking at a machine.

    Make one with `Config.parse`; `Config.parse(**config.options())` is the same one again.

    Args:
        backend: how a model is parallel.
        gpus: the GPUs of each node; None: all of them, or the CPU where there are none.
        processes: processes per node on the CPU; None: as `gpus` says.
        num_nodes: machines; None: as the launcher's environment says, else 1.
        amp: mixed precision; None: none.
        amp_engine: "native" (torch.amp) or "apex".
        seed: first state of the random generators; None: nothing global is touched.
        timeout: how long a collective or a rendezvous may wait.
        max_restarts: how often the group of workers is started again after a failure.
        launcher: how processes start; None: the launcher of this machine (torch elastic).
        logs: whose output is shown: "rank0", "all", or a directory that gets one file per rank.
        process_group_backend: torch's name ("nccl", "gloo", "cpu:gloo,cuda:nccl"); None: by device.
        init_connection: called with the World instead of `init_process_group`; None: ours.
        wrap: called with (module, World), returns the module that runs instead of the backend's; None: the backend's.
        verify_every: compare parameters across ranks every so many steps; 0: never.
        update_modules: whether modules passed as arguments come back trained.
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
        """The Config that a user's options mean; `backend` defaults to "ddp".

        Raises:
            ConfigError: every fault of the request: unknown names, values without a meaning, options that exclude
                each other.
        """
        parsed, faults = _parsed({"backend": "ddp", **options})
        # What the user left out has its default here; what has no meaning is in neither, and contradicts nothing.
        defaults = {each.name: each.default for each in dataclasses.fields(cls) if each.name not in options}
        faults += contradictions({**defaults, **parsed})
        if faults:
            raise ConfigError.of(faults)
        return cls(**parsed)

    def options(self) -> dict[str, Any]:
        """Every option by name, as `parse` takes them."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def changed(self, **changes: Any) -> Config:
        """Another Config with some options replaced.

        An option that excludes one of the changes gives way: `changed(processes=2)` of a Config with `gpus` has none.

        Raises:
            ConfigError: the changes have faults of their own, or contradict what stays.
        """
        return Config.parse(**{**self.options(), **self._given_way(changes), **changes})

    def _given_way(self, changes: Mapping[str, Any]) -> dict[str, None]:
        changed = {name for name in ("gpus", "processes") if changes.get(name) is not None}
        if changed == {"processes"} and "gpus" not in changes and self.gpus != Gpus.NONE:
            return {"gpus": None}
        if changed == {"gpus"} and "processes" not in changes and PARSERS["gpus"]("gpus", changes["gpus"]) != Gpus.NONE:
            return {"processes": None}
        return {}

    def merged(self, environ: Mapping[str, str]) -> Config:
        """This request with what PARALLELIZE_<OPTION> variables say instead: the environment wins over the code.

        A variable that is set to nothing counts as not set. The prefix belongs to this library: a name that is no
        option's is refused, for it is most likely a typing error, and a job that runs for days without what its script
        asked for costs more than unsetting another tool's variable.

        What the variable names in other words is not replaced: where the code says `backend=DDPBackend(...)` or
        `amp=Amp(...)`, PARALLELIZE_BACKEND=ddp or PARALLELIZE_AMP=1 keeps that object with its options.

        Args:
            environ: variables of this process, as in os.environ; only read.

        Raises:
            ConfigError: a variable that names no option or has a value without a meaning (by the variable's name), or
                one that contradicts the code.
        """
        changes, faults = self._said_by(environ)
        try:
            config = self.changed(**changes) if changes else self
        except ConfigError as error:
            said = ", ".join(f"{_variable(name)}={environ[_variable(name)]}" for name in changes)
            for fault in error.faults:
                faults.append(dataclasses.replace(fault, why=f"{fault.why} (the environment says {said})"))
            raise ConfigError.of(faults) from error
        if faults:
            raise ConfigError.of(faults)
        return config

    def _said_by(self, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Fault]]:
        """Options that variables give, parsed, and variables without a meaning."""
        changes: dict[str, Any] = {}
        faults: list[Fault] = []
        for variable, text in sorted(environ.items()):
            if not variable.startswith(ENV_PREFIX) or not text.strip():
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in FROM_TEXT or variable != _variable(name):
                faults.append(_unknown_variable(variable))
                continue
            parsed = PARSERS[name](name, FROM_TEXT[name](text.strip()))
            if isinstance(parsed, Fault):
                faults.append(dataclasses.replace(parsed, what=f"environment variable {variable}={text!r}"))
            elif not self._names_already(name, parsed):
                changes[name] = parsed
        return changes, faults

    def _names_already(self, name: str, parsed: object) -> bool:
        """Whether text, which knows a plug-in's name and nothing of its options, names what this request has."""
        own = getattr(self, name)
        if name in ("backend", "launcher"):
            return type(own) is type(parsed)
        return name == "amp" and own is not None and parsed == Amp()


def _parsed(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
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
    fix = did_you_mean(_ELSEWHERE.get(name, name), PARSERS)
    return Fault(f"option {name}={value!r}", "there is no such option", fix)


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def _unknown_variable(variable: str) -> Fault:
    name = variable.removeprefix(ENV_PREFIX)
    why = "only Python can give this option" if variable in map(_variable, PARSERS) else "it names no option"
    known = did_you_mean(name, (each.upper() for each in FROM_TEXT), prefix=ENV_PREFIX)
    return Fault(f"environment variable {variable}", why, f"{known}; unset it if it is another program's")
