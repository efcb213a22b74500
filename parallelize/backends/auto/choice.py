"""The choice among engines: the bytes and seconds that each is predicted to need, by what was measured of a model.

    a device holds   parameters   optimizer state   in backward: what forward has saved, and gradients
    ddp              all          all               all, and once more in the messages
    fsdp             1/n          1/n               1/n, and a gathered block with its gradients, or all blocks
    dp               all          all               all gradients, and 1/n of what is saved
    balanced         as its plan of stages says

A step takes forward, backward and the optimizer's step, and the messages. On an accelerator, messages that take less
time than forward and backward are hidden behind them; on the CPU, which sends them itself, none are. Optimizers are
taken to read and write as an addition to the gradients and to each tensor of their state.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from parallelize.errors import ConfigError

__all__ = ["SIZES", "USABLE", "Choice", "Facts", "choose", "saved_choices"]

Facts = dict[str, float]
"""Bytes of a model and its training, and seconds, by what they are of."""
SIZES = (2**16, 2**22)
"""Bytes of the messages that are timed."""
USABLE = 0.9
"""Fraction of the memory that is used; the rest is for workspaces and fragmentation."""
_PARTS = ("parameters", "gradients", "optimizer state", "saved for backward")
_GIB = 2**30


class Choice(NamedTuple):
    """An engine with its options, what it is predicted to need, and the table of all engines."""

    engine: str
    options: dict[str, Any]
    memory_bytes: float = 0.0
    step_s: float = 0.0
    table: str = ""

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        timed = f"{self.step_s * 1000:.1f} ms a step" if self.step_s < math.inf else "not timed"
        return f"{self.engine}{options}: {self.memory_bytes / _GIB:.3f} GiB, {timed}"


def _predicted(facts: Facts, n: int, in_node: int, devices: int) -> list[Choice]:
    """Return the engines that are possible with n processes, with what they need; arguments as of `choose`."""
    held, gradients, state, saved = (facts[each] for each in _PARTS)
    on_accelerator, unit, outside = facts["is on accelerator"], facts["largest unit"], facts["outside of units"]

    def sent_s(kind: str, size: float) -> float:  # in a message for each unit
        small, large = (facts[f"s of {kind} of {each} bytes"] for each in SIZES)
        return facts["units"] * small + size * max(0.0, large - small) / (SIZES[1] - SIZES[0])

    def choice(
        engine: str, options: dict[str, Any], memory: float, sending: float, *, shards: int = 1, runs: str = ""
    ) -> Choice:
        computing = facts[f"s of {runs or 'forward and backward'}"]
        step_s = max(computing, sending, (1 - on_accelerator) * (computing + sending))
        return Choice(engine, options, memory, step_s + facts["s of updating a byte"] * (gradients + state) / shards)

    # Messages are another copy of the gradients, and optimizers on accelerators compute with one.
    in_step = max(facts["in backward"], gradients * (1 + max(on_accelerator, n > 1)))
    reducing = sent_s("all_reduce", gradients) if n > 1 else 0.0
    found = [choice("ddp", {}, held + state + in_step, reducing)]
    if devices > 1:
        memory = held + state + in_step - saved * (1 - 1 / devices)
        return [
            *found,
            choice("dp" if n == 1 else "ddp2", {}, memory, reducing, runs="dp"),
            choice("balanced", {}, facts["largest stage"], reducing, runs="balanced"),
        ]
    for over, shards in [("", n), (" in a node", in_node)][: (n > 1) + (1 < in_node < n)]:
        for reshards in (True, False):
            # Two units are gathered at a time, or all. Backward frees what is saved while it computes the gradients of
            # a unit, and their message; the shards of gradients come with it, or in place of parameters that it frees.
            gathered, kept = (outside + 2 * unit, max(saved, gradients / shards)) if reshards else (held, saved)
            in_step = gathered + min(kept + 2 * max(outside, unit), facts["in backward"])
            memory = (held + state) / shards + max(in_step, gradients / shards + facts["restored at the end"])
            options: dict[str, Any] = {} if reshards else {"reshard_after_forward": False}
            sending = (1 + reshards) * sent_s(f"all_gather{over}", held)
            if over:  # gradients are added up within the nodes, and then over them
                options["shard_over"] = "node"
                sending += sent_s(f"all_gather{over}", gradients) + sent_s("all_reduce", gradients / shards)
            else:
                sending += reducing
            found.append(choice("fsdp", options, memory, sending, shards=shards))
    return found


def choose(facts: Facts, model: str, n: int, in_node: int, devices: int) -> Choice:
    """Return the fastest engine that fits.

    Args:
        facts: bytes and seconds, as `trial` measures them: the least memory of all ranks, and the most of other facts.
        model: name of the model's class.
        n: number of processes.
        in_node: number of processes on each node; 1: they differ.
        devices: number of devices that each process drives.

    Raises:
        ConfigError: none fits.
    """
    found, most = _predicted(facts, n, in_node, devices), facts["memory"] * USABLE
    fitting = [each for each in found if each.memory_bytes <= most]
    if not fitting:
        nearest = min(found, key=lambda each: each.memory_bytes)
        held, gradients, state, saved = (facts[each] / _GIB for each in _PARTS)
        raise ConfigError(
            f"{model} fits no engine of backend='auto'; the nearest is {nearest}",
            why=f"this is {(nearest.memory_bytes - most) / _GIB:.3f} GiB more than 90 % of a device's memory; of the "
            f"whole model, in GiB: parameters {held:.3f}, gradients {gradients:.3f}, optimizer state {state:.3f}, "
            f"saved for backward {saved:.3f}",
            fix="make the optimizer before the block, else two tensors per parameter count; save less for backward, by "
            "a smaller batch or torch.utils.checkpoint in the model; or use more devices, "
            "FSDPBackend(cpu_offload=True), or process_per='node', where balanced can divide the model",
        )
    best = min(fitting, key=lambda each: each.step_s)
    table = f"{model}: engines of backend='auto', with {most / _GIB:.3f} GiB to use on a device\n"
    for each in found:
        table += f"  {each}  ({'chosen' if each is best else 'slower' if each in fitting else 'does not fit'})\n"
    rest = "ddp is one device of each process" if devices > 1 else "process_per='node' compares dp and balanced"
    return best._replace(table=f"{table}  ({rest})")


def saved_choices(path: str | None) -> dict[str, Choice]:
    """Return the choices in a file: what was chosen for -> the choice."""
    text = Path(path).read_text() if path and Path(path).exists() else "{}"
    try:
        return {key: Choice(*each) for key, each in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"AutoBackend(plan={path!r})",
            why=f"the file holds no choices that this version has written ({error})",
            fix="delete it, or name another file",
        ) from None
