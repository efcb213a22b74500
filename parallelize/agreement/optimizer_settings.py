"""Have the optimizers of a block the same numbers on all ranks?

A setting is a number of a param group: its learning rate, weight decay, momentum. Gradients are
averaged, so that optimizers with equal settings make equal steps. A scheduler that is fed with a
rank's own metric, such as ReduceLROnPlateau, gives each rank another rate. Under ddp the copies of
the model drift apart. Under fsdp each rank steps its own rows of the parameters: no two ranks have
the same tensor, by which the different rates could be noticed.

    each step               the scheduled settings are noted if they have changed
    a comparison            one digest of all settings, and of all noted changes: 8 bytes
    if the digest differs   the ranks send their settings, and their noted changes

The noted changes show rates that were different and are equal again, as those of ranks that reach a
plateau one after the other.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from parallelize.agreement.fingerprint import digest
from parallelize.agreement.gather import gather_objects
from parallelize.errors import SyncError

_MOST_OPTIMIZERS = 16
"""Optimizers of a block that are kept: those that have stepped last."""

_MOST_CHANGES = 100
"""Changes of an optimizer that are kept: the latest ones."""

_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""Settings that schedules change. The other settings are read at a comparison only."""

_Values = tuple[float | tuple[float, ...], ...]
"""The scheduled settings of all groups of an optimizer, one group after the other."""


class _Setting(NamedTuple):
    """Where a setting is found.

    Args:
        number: number of the optimizer, in the order of their first steps in the block.
        optimizer: name of the optimizer's type.
        group: number of the param group.
        name: key in the param group, such as "lr".
    """

    number: int
    optimizer: str
    group: int
    name: str


class _Change(NamedTuple):
    """A change of scheduled settings.

    Args:
        step: number of the optimizer's first step with these values, from 1.
        values: the settings from then on.
    """

    step: int
    values: _Values


@dataclass
class _Stepped:
    """What is kept of an optimizer that has stepped, without a reference to the optimizer.

    Attributes:
        optimizer: name of its type.
        groups: its param groups.
        steps: number of its steps.
        settings: the objects of its scheduled settings in the latest step.
        has_tensors: whether a scheduled setting is a tensor, which may change in place.
        values: the numbers of the scheduled settings; None: before the first step.
        history: a hash of all changes of `values`. It is equal on ranks with the same changes,
            because Python hashes numbers, unlike texts, alike in all processes.
        changes: the latest changes, for the message.
    """

    optimizer: str
    groups: list[dict[str, Any]]
    steps: int = 0
    settings: list[Any] = field(default_factory=list)
    has_tensors: bool = False
    values: _Values | None = None
    history: int = 0
    changes: deque[_Change] = field(default_factory=lambda: deque(maxlen=_MOST_CHANGES))

    def note_step(self, groups: list[dict[str, Any]]) -> None:
        """Note a step, and the scheduled settings if they have changed since the step before.

        In most steps the settings are the same objects as before, and no number is read. Only a
        tensor can be the same object and have another number.

        Args:
            groups: the param groups of the optimizer.
        """
        # Loading a state into an optimizer replaces its list of groups.
        self.groups = groups
        self.steps += 1
        settings: list[Any] = []
        for group in groups:
            settings += map(group.get, _SCHEDULED)
        are_equally_many = len(settings) == len(self.settings)
        if not are_equally_many or not all(map(operator.is_, settings, self.settings)):
            self.settings = settings
            self.has_tensors = any(map(torch.is_tensor, settings))
        elif not self.has_tensors:
            return
        values = tuple(map(_value_of, settings))
        if values != self.values:
            self.values = values
            self.history = hash((self.history, self.steps, values))
            self.changes.append(_Change(self.steps, values))


class _Report(NamedTuple):
    """What a rank sends if settings differ, of types that need no pickle.

    Args:
        settings: the fields of a `_Setting` -> the setting as text.
        histories: number of an optimizer -> the hash of its changes, and the latest changes.
    """

    settings: dict[tuple[int, str, int, str], str]
    histories: dict[int, tuple[int, list[tuple[int, _Values]]]]


class OptimizerSettings:
    """The settings of the optimizers that have stepped in a block.

    The param groups of the optimizers that stepped last are kept, and not the optimizers: a
    function in the block may make an optimizer, whose moments are large, and free it before the
    block ends. Which groups are kept depends on the steps alone: all ranks keep the same ones.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._added = 0
        self._latest: OrderedDict[int, _Stepped] = OrderedDict()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of an optimizer; called before each step, it does not wait for a device."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._added
            self._added += 1
        stepped = self._latest.get(number)
        if stepped is None:
            stepped = _Stepped(type(optimizer).__name__, optimizer.param_groups)
            self._latest[number] = stepped
        stepped.note_step(optimizer.param_groups)
        self._latest.move_to_end(number)
        if len(self._latest) > _MOST_OPTIMIZERS:
            self._latest.popitem(last=False)

    def digest(self) -> torch.Tensor:
        """Return the digest of the settings and their changes: 0-dim, int64, on the CPU.

        If it is equal on all ranks, the settings are equal, and were equal in all steps.
        """
        report = self._report()
        return digest(repr((sorted(report.settings.items()), sorted(report.histories.items()))))

    def require_equal(self, when: str) -> None:
        """Compare the settings of each rank with rank 0's; a collective.

        It is called if a digest differs. It may return all the same: a setting that only some ranks
        have is not compared, because these ranks alone may train something else, too.

        Args:
            when: the comparison, such as "at the end of the block", for the message.

        Raises:
            SyncError: a setting differs, or differed in an earlier step.
        """
        reports = [_Report(*sent) for sent in gather_objects(tuple(self._report()))]
        report_of_rank_0 = reports[0]
        for rank, report in enumerate(reports):
            for key, value in report_of_rank_0.settings.items():
                # A rank without the setting counts as equal.
                value_of_rank = report.settings.get(key, value)
                if value_of_rank != value:
                    setting = _Setting(*key)
                    raise _differing_error(setting, value, f"{value_of_rank} on rank {rank}", when)
            for number, (history, changes) in report_of_rank_0.histories.items():
                history_of_rank, changes_of_rank = report.histories.get(number, (history, changes))
                if history_of_rank != history:
                    raise self._changed_apart_error(number, changes, changes_of_rank, rank)

    def _report(self) -> _Report:
        """Return the settings of this rank as they are now, and their noted changes.

        Settings that are tensors on a device are read, which waits for the device. Comparisons of
        parameters do so, too.
        """
        report = _Report({}, {})
        for number, stepped in self._latest.items():
            changes = [(change.step, change.values) for change in stepped.changes]
            report.histories[number] = stepped.history, changes
            for index, group in enumerate(stepped.groups):
                for name, text in _texts_of(group).items():
                    report.settings[number, stepped.optimizer, index, name] = text
        return report

    def _changed_apart_error(
        self,
        number: int,
        changes_of_rank_0: list[tuple[int, _Values]],
        changes: list[tuple[int, _Values]],
        rank: int,
    ) -> SyncError:
        """Return the error for settings that differed in an earlier step, and are equal again.

        It names the first step in which the kept changes differ. If there is none, the difference
        was earlier.

        Args:
            number: number of the optimizer.
            changes_of_rank_0: the latest changes on rank 0.
            changes: the latest changes on the other rank.
            rank: the other rank.
        """
        # A rank that differs from none of the two may not have the optimizer.
        stepped = self._latest.get(number)
        optimizer = stepped.optimizer if stepped is not None else f"optimizer {number}"
        steps = [step for step, _values in (*changes_of_rank_0, *changes)]
        for step in sorted(steps):
            pairs = zip(
                _values_at(changes_of_rank_0, step), _values_at(changes, step), strict=False
            )
            for index, (value_of_rank_0, value) in enumerate(pairs):
                if value != value_of_rank_0:
                    # The values of a step are those of one group after the other.
                    group, place = divmod(index, len(_SCHEDULED))
                    setting = _Setting(number, optimizer, group, _SCHEDULED[place])
                    text = f"{value} on rank {rank}"
                    return _differing_error(setting, value_of_rank_0, text, f"at its step {step}")
        setting = _Setting(number, optimizer, 0, "lr or another setting")
        return _differing_error(setting, "other values", f"than on rank {rank}", "in early steps")


def _values_at(changes: list[tuple[int, _Values]], step: int) -> _Values:
    """Return the scheduled settings in a step; () if the changes up to it are not kept any more.

    Args:
        changes: steps, in ascending order, with the values from each on.
        step: number of the step.
    """
    values_at_step: _Values = ()
    for changed_at, values in changes:
        if changed_at <= step:
            values_at_step = values
    return values_at_step


def _value_of(setting: Any) -> float | tuple[float, ...]:
    """Return the number of a setting, or the numbers of a tuple, such as betas."""
    if isinstance(setting, tuple):
        return tuple(map(_number_of, setting))
    return _number_of(setting)


def _number_of(setting: Any) -> float:
    """Return a setting as a float; 0.0 for a tensor on a device, or what is no number.

    Reading a tensor on a device would wait for the device at every step: it is read by `_text_of`,
    at a comparison.
    """
    if isinstance(setting, torch.Tensor):
        is_readable = setting.device.type == "cpu" and setting.numel() == 1
        setting = setting.item() if is_readable else 0.0
    if not isinstance(setting, (int, float)):
        return 0.0
    # The hash of a NaN is one of the object, and it is not equal to itself.
    return 0.0 if math.isnan(setting) else float(setting)


def _texts_of(group: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a param group as texts, by their names.

    Values that are no numbers, such as a name that the user has given the group, are left out.
    """
    texts = {}
    for name, setting in group.items():
        text = None if name == "params" else _text_of(setting)
        if text is not None:
            texts[str(name)] = text
    return texts


def _text_of(setting: Any) -> str | None:
    """Return a number, or a list of numbers, as text without rounding; None for anything else."""
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


def _differing_error(
    setting: _Setting, value_of_rank_0: Any, text_of_rank: str, when: str
) -> SyncError:
    """Return the error for a setting that is, or was, not equal on two ranks.

    Args:
        setting: the setting.
        value_of_rank_0: its value on rank 0.
        text_of_rank: the other value and its rank, such as "0.1 on rank 2".
        when: the comparison or the step, such as "at its step 5".
    """
    return SyncError(
        f"{setting.name} of group {setting.group} of {setting.optimizer}: {value_of_rank_0} on "
        f"rank 0, {text_of_rank}, {when}",
        why="each rank makes other steps with the same gradients, as with a scheduler that is fed "
        "with a rank's own metric (ReduceLROnPlateau)",
        fix="compute it from numbers that are equal on all ranks: "
        "scheduler.step(parallelize.all_reduce(metric, 'mean'))",
    )
