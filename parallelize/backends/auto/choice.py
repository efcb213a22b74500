"""The candidates of backend="auto", what each needs, and the choice of the first that fits.

They stand in the order of what they send in a step:

    candidate              a rank holds, beside what forward saves      a step sends
    ddp                    everything                                   2 gradients
    fsdp, stays gathered   1/n, and all parameters gathered             parameters, gradients
    fsdp in each node      1/m, and two units gathered                  in a node: 2 parameters and
                                                                        gradients; between nodes:
                                                                        2/m gradients
    fsdp                   1/n, and two units gathered                  2 parameters, gradients

n is the number of ranks, and m that of each node. No second is measured, and no candidate is run:
the choice is the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelize.backends.auto.model_bytes import ModelBytes
from parallelize.errors import ConfigError
from parallelize.run.startup_summary import size_text


@dataclass(frozen=True, eq=False)
class Candidate:
    """An engine with its options.

    Args:
        engine: name of the backend.
        options: options of the backend.
        holds: what each rank holds, for users.
        sends: what a step sends, for users.
    """

    engine: str
    options: Mapping[str, Any]
    holds: str
    sends: str

    def __str__(self) -> str:
        text = self.engine
        for name, value in self.options.items():
            text += f" {name}={value!r}"
        return text


DDP = Candidate(
    "ddp",
    {},
    holds="parameters + gradients + optimizer state + saved",
    sends="2 x gradients",
)
_FSDP_GATHERED = Candidate(
    "fsdp",
    {"reshard_after_forward": False},
    holds="(parameters + gradients + optimizer state) / n + parameters + saved",
    sends="parameters + gradients",
)
_FSDP_IN_NODE = Candidate(
    "fsdp",
    {"shard_over": "node"},
    holds="(parameters + gradients + optimizer state) / m + two blocks + saved",
    sends="2 x parameters + gradients in a node of m ranks, 2 x gradients / m between nodes",
)
_FSDP = Candidate(
    "fsdp",
    {},
    holds="(parameters + gradients + optimizer state) / n + two blocks + saved",
    sends="2 x parameters + gradients",
)


def rule() -> str:
    """Return the rule of the choice, for users who have not run the model yet."""
    lines = ["the first of these that leaves a tenth of the memory free on each of the n ranks:"]
    for candidate in (DDP, _FSDP_GATHERED, _FSDP_IN_NODE, _FSDP):
        lines += [f"{candidate}: holds {candidate.holds}; sends {candidate.sends}"]
    return "\n".join([*lines, "saved: for backward, as the first forward with gradients counts it"])


def needed_bytes(model: ModelBytes, *, ranks: int, ranks_of_node: int) -> dict[Candidate, float]:
    """Return what a device needs under each candidate, in the order of what they send.

    Args:
        model: bytes of all ranks: the least memory, and the most of the rest.
        ranks: number of ranks.
        ranks_of_node: number of ranks on each node; 1: the nodes have different numbers.

    Returns:
        Bytes; infinity: they are not known, and there are too many of them.
    """
    needed = {DDP: _needed_by_ddp(model, ranks)}
    if ranks > 1:
        needed[_FSDP_GATHERED] = _needed_if_gathered(model, ranks)
        if 1 < ranks_of_node < ranks:
            needed[_FSDP_IN_NODE] = _needed_by_fsdp(model, ranks_of_node)
        needed[_FSDP] = _needed_by_fsdp(model, ranks)
    return needed


def _needed_by_ddp(model: ModelBytes, ranks: int) -> float:
    copies = 1
    # Gradients are copied to messages. On an accelerator, a step of an optimizer copies them, too.
    if ranks > 1 or model.is_on_accelerator:
        copies = 2
    in_step = max(model.backward, copies * model.gradients)
    return model.parameters + model.optimizer_state + in_step


def _needed_if_gathered(model: ModelBytes, shards: int) -> float:
    """Return the bytes under fsdp that gathers all parameters for forward and backward."""
    in_backward = model.parameters + _in_backward_of_fsdp(model, model.saved)
    return _needed_sharded(model, shards, in_backward)


def _needed_by_fsdp(model: ModelBytes, shards: int) -> float:
    """Return the bytes under fsdp that gathers a unit while it gathers the next one."""
    gathered = model.outside_units + 2 * model.largest_unit
    # Backward frees what is saved while shards of gradients come.
    held = max(model.saved, model.gradients / shards)
    return _needed_sharded(model, shards, gathered + _in_backward_of_fsdp(model, held))


def _in_backward_of_fsdp(model: ModelBytes, held: float) -> float:
    """Return what is held in backward, the gradients of one unit, and the message that has them."""
    in_units = held + 2 * max(model.outside_units, model.largest_unit)
    # A model that is one unit holds no more than under ddp.
    return min(in_units, model.backward)


def _needed_sharded(model: ModelBytes, shards: int, in_backward: float) -> float:
    at_end = model.gradients / shards + model.restored
    return (model.parameters + model.optimizer_state) / shards + max(in_backward, at_end)


def choose(name: str, model: ModelBytes, needed: Mapping[Candidate, float]) -> Candidate:
    """Return the first candidate that fits.

    Args:
        name: name of the model's class.
        model: its bytes.
        needed: what each candidate needs.

    Raises:
        ConfigError: none fits.
    """
    for candidate, size in needed.items():
        # Less, because the usable memory may be infinite: it is not always known.
        if size < model.usable:
            return candidate
    nearest = min(needed, key=lambda candidate: needed[candidate])
    raise ConfigError(
        f"{name} fits no engine of backend='auto'; the nearest is {nearest}, which needs "
        f"{_size(needed[nearest])} on a device",
        why=f"nine tenths of a device's memory are {size_text(model.usable)}; of the whole model, "
        f"parameters take {_size(model.parameters)}, gradients {_size(model.gradients)}, "
        f"optimizer state {_size(model.optimizer_state)}, and what is saved for backward "
        f"{_size(model.saved)}",
        fix="make the optimizer before the block, else two tensors per parameter count; save less "
        "for backward, by a smaller batch or torch.utils.checkpoint in the model; or use more "
        "devices, FSDPBackend(cpu_offload=True), or backend='balanced', which divides the model "
        "over the devices of one process",
    )


def reason(
    name: str, model: ModelBytes, needed: Mapping[Candidate, float], chosen: Candidate
) -> str:
    """Return one line that says why a candidate was chosen; arguments as for `choose`."""
    sizes = [f"{candidate} {_size(size)}" for candidate, size in needed.items()]
    usable = "memory of unknown size"
    if math.isfinite(model.usable):
        usable = f"{size_text(model.usable)} of a device"
    line = (
        f"{name}: backend='auto' has chosen {chosen}, the first of these that fits into {usable}: "
        f"{', '.join(sizes)}"
    )
    if math.isinf(model.backward):
        line += f" (not all that forward saves is counted: {model.why_unmeasured})"
    return line


def _size(size: float) -> str:
    if math.isinf(size):
        return "more than a device has"
    return size_text(size)
