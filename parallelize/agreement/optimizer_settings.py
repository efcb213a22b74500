"""Have the optimizers of a block the same numbers on all ranks?

A setting is a number of a param group: its learning rate, weight decay, momentum. Gradients are
averaged, so that optimizers with equal settings make equal steps. A scheduler that is fed with a
rank's own metric, such as ReduceLROnPlateau, gives each rank another rate. Under ddp the copies of
the model drift apart. Under fsdp each rank steps its rows at its own rate, and no tensor is there
twice by which it could be noticed.
"""

from __future__ import annotations

import numbers
from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from parallelize.agreement.fingerprint import digest
from parallelize.agreement.gather import gather_objects
from parallelize.errors import SyncError

_MOST_OPTIMIZERS = 16


class _Setting(NamedTuple):
    """Which setting a value is of; plain types, because the ranks send it.

    Args:
        number: of the optimizer, in the order of their first steps in the block.
        optimizer: name of its type.
        group: number of the param group.
        name: the key in the param group.
    """

    number: int
    optimizer: str
    group: int
    name: str


class _Groups(NamedTuple):
    """The param groups of an optimizer, and the name of its type."""

    optimizer: str
    groups: list[dict[str, Any]]


class OptimizerSettings:
    """The settings of the optimizers that have stepped in a block.

    The param groups of those that stepped last are kept, and not the optimizers: a function in the
    block may make an optimizer, whose moments are large, and free it before the block ends. Which
    ones are kept depends on the steps alone, so that it is the same on all ranks.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._added = 0
        self._latest: OrderedDict[int, _Groups] = OrderedDict()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that steps; it is called at every step, and reads no setting."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._added
            self._added += 1
        # Loading a state gives an optimizer another list of groups.
        self._latest[number] = _Groups(type(optimizer).__name__, optimizer.param_groups)
        self._latest.move_to_end(number)
        if len(self._latest) > _MOST_OPTIMIZERS:
            self._latest.popitem(last=False)

    def digest(self) -> torch.Tensor:
        """Return a number that is equal on all ranks if the settings are."""
        settings = self._of_this_rank()
        return digest(repr(sorted(settings.items())))

    def require_equal(self, when: str) -> None:
        """Compare the settings of each rank with rank 0's; a collective.

        One that only some ranks have is not compared: it may belong to what only they do.

        Raises:
            SyncError: one differs.
        """
        settings_by_rank = gather_objects(self._of_this_rank())
        settings_of_rank_0 = settings_by_rank[0]
        for rank, settings in enumerate(settings_by_rank):
            for key, value in settings_of_rank_0.items():
                if settings.get(key, value) != value:
                    raise _differing(_Setting(*key), when, value, rank, settings[key])

    def _of_this_rank(self) -> dict[tuple[int, str, int, str], str]:
        values = {}
        for number, (optimizer, groups) in self._latest.items():
            for index, group in enumerate(groups):
                for name, text in _texts_of(group).items():
                    values[number, optimizer, index, name] = text
        return values


def _texts_of(group: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a param group as texts, by their names."""
    texts = {}
    for name, setting in group.items():
        text = None if name == "params" else _text_of(setting)
        if text is not None:
            texts[str(name)] = text
    return texts


def _text_of(setting: Any) -> str | None:
    """Return a number, or several, as text without rounding; None: it is something else."""
    if isinstance(setting, torch.Tensor):
        # The learning rate of a capturable optimizer is a tensor on the device.
        return repr(setting.item()) if setting.numel() == 1 else None
    if isinstance(setting, numbers.Integral):
        return repr(int(setting))
    if isinstance(setting, numbers.Real):
        return repr(float(setting))
    if isinstance(setting, (list, tuple)):
        texts = [_text_of(part) for part in setting]
        return str(texts) if texts and None not in texts else None
    return None


def _differing(
    setting: _Setting, when: str, value_of_rank_0: str, rank: int, value: str
) -> SyncError:
    return SyncError(
        f"{setting.name} of group {setting.group} of {setting.optimizer}: {value_of_rank_0} on "
        f"rank 0, {value} on rank {rank}, {when}",
        why="each rank makes other steps with the same gradients, as with a scheduler that is fed "
        "with a rank's own metric (ReduceLROnPlateau)",
        fix="compute it from numbers that are equal on all ranks: "
        "scheduler.step(parallelize.all_reduce(metric, 'mean'))",
    )
