"""How the state of one object is taken for a checkpoint, compared with the object, and loaded.

    save    describe() and current_state()
    load    take(...)                   keeps what the checkpoint has, and returns the faults
            replace_state(...)          in a folder: with values in place of meta tensors
            prepare(...)                copies the tensors, which may fail for lack of memory
            set()                       changes the object; nothing above does

All objects of a call are taken, filled and prepared before the first one is set.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from parallelize.checkpoint.matching import unlike_entries
from parallelize.checkpoint.safe_types import is_dtensor
from parallelize.errors import Fault
from parallelize.run.containers import map_leaves
from parallelize.torch_patches.module_tensors import is_dtensor as is_users_dtensor

Named = Mapping[str, Any]
"""Objects, or what belongs to them, by the names that the user gives them in a call."""


class ObjectKind(enum.StrEnum):
    """What an object is, as far as a checkpoint treats it in another way; written in the record."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    OBJECT = "state_dict"
    """Any other object with `state_dict` and `load_state_dict`, such as a scheduler or a loader."""

    VALUE = "value"
    """A number, string or tensor, or a container of these."""


class StateHandler:
    """Takes, compares and loads the state of one object.

    This class itself handles plain values, which are saved and never loaded into anything.

    Args:
        obj: the object.
        name: its name in the call, for errors.

    Attributes:
        state: the state to load, from `take` on.
        details: what `describe` returned when the state was saved; {} before `take`, and for a file
            of another program.
        is_strict: whether a model must have exactly the weights of the state.
    """

    kind: ClassVar[ObjectKind] = ObjectKind.VALUE

    def __init__(self, obj: Any, name: str) -> None:
        self.obj = obj
        self.name = name
        self.state: Any = None
        self.details: Named = {}
        self.is_strict = True

    def current_state(self) -> Any:
        """Return the state of the object, which shares tensors with it."""
        return self.obj

    def describe(self) -> dict[str, Any]:
        """Return what the record says of the object, to compare it at load."""
        return {"kind": self.kind.value, "class": type(self.obj).__name__}

    def take(self, state: Any, details: Named, *, strict: bool = True) -> list[Fault]:
        """Keep a state to load, and return its faults: where it does not fit the object.

        Args:
            state: the state in the checkpoint.
            details: as for the attribute.
            strict: as for the attribute `is_strict`.
        """
        self.state = state
        self.details = details
        self.is_strict = strict
        own_class = type(self.obj).__name__
        if self.kind == ObjectKind.VALUE:
            return [
                Fault(
                    f"{self.name}={self.obj!r:.80}",
                    why="load() restores objects, not values",
                    fix=f"read it from the result of load(): load(path)[{self.name!r}]",
                )
            ]
        kind_of_state = self._kind_of_state()
        if kind_of_state == self.kind:
            differences = self.differences()
        else:
            differences = [
                f"its kind is '{self.kind}', where the checkpoint holds a {kind_of_state}"
            ]
        why = (
            f"the checkpoint was saved from something else than this {own_class}, or from one "
            "constructed differently"
        )
        fix = (
            f"construct the {own_class} as it was when it was saved, under the same name, or omit "
            f"{self.name}=; strict=False loads the parameters of a model that it has in common "
            "with the checkpoint"
        )
        faults = []
        for difference in differences:
            what = f"{self.name}={own_class}(...): {difference}"
            faults.append(Fault(what, why=why, fix=fix))
        return faults

    def _kind_of_state(self) -> str:
        """Return the kind of the state that was taken, or its type if it is no state of the kind.

        A file of another program does not say of what kind its states are.
        """
        is_mapping = isinstance(self.state, Mapping)
        kind: str = self.details.get("kind", "")
        if not kind:
            if not is_mapping:
                return ObjectKind.VALUE
            return self.kind
        if kind == self.kind and kind != ObjectKind.OBJECT and not is_mapping:
            return type(self.state).__name__
        return kind

    def differences(self) -> list[str]:
        """Return where the state that was taken does not fit the object."""
        return []

    def shard_targets(self) -> dict[int, Any]:
        """Return the DTensor that each value of the state is loaded into, by the value's id."""
        return {}

    def prepare(self, *, is_mapped: bool) -> None:
        """Copy all tensors of the state, and take this rank's shards of them.

        Args:
            is_mapped: whether they are in a memory-mapped file. Such a tensor would keep the file
                open, and be read in training. Others are of this state alone.
        """
        target_by_id = self.shard_targets()
        late_ids = self._ids_copied_in_set()

        def prepared(leaf: Any) -> Any:
            target = target_by_id.get(id(leaf))
            if target is not None:
                return shard_for(target, leaf)
            if is_mapped and id(leaf) not in late_ids:
                return clone_tensor(leaf)
            return leaf

        self.state = map_leaves(prepared, self.state, once=True)

    def _ids_copied_in_set(self) -> set[int]:
        """Return the ids of the values of the state that `set` copies."""
        return set()

    def set(self) -> None:
        """Set the state of the object, after `prepare`."""
        self.obj.load_state_dict(self.state)


class ObjectHandler(StateHandler):
    """Handles an object with `state_dict` and `load_state_dict`."""

    kind = ObjectKind.OBJECT

    @override
    def current_state(self) -> Any:
        return self.obj.state_dict()

    @override
    def differences(self) -> list[str]:
        own_class = type(self.obj)
        # A loader of this library has both methods, and raises an error of its own.
        if hasattr(own_class, "check_position") and hasattr(own_class, "load_rank_state"):
            self.obj.check_position(self.state)
        if own_class.load_state_dict.__module__.startswith("torch."):
            return unlike_entries(self.obj.state_dict(), self.state)
        return []


def clone_tensor(value: Any) -> Any:
    """Return a copy of a tensor; any other value as it is."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value


def shard_for(target: Any, value: Any) -> Any:
    """Return this rank's shard of a value, as a tensor that may be loaded into a DTensor.

    Args:
        target: the DTensor, or the tensor that stands for it.
        value: the full tensor; or, from a folder, this rank's shard, which was read as such.
    """
    # The import takes half a second, and is needed only with shards.
    from parallelize.backends.fsdp.calls import stand_for
    from parallelize.backends.fsdp.full_tensors import registry_of
    from parallelize.backends.fsdp.shards import shard_like

    shard = value
    if not is_dtensor(value):
        shard = shard_like(value, target)
    # A model that is tensor parallel already has DTensors, for which no tensor stands.
    if is_users_dtensor(target):
        return shard
    return stand_for(shard, registry_of(target))
