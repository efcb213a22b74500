"""Objects that want to be told the number of the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Epochs"]


class Epochs:
    """Tells samplers and datasets the epoch, and sees when the user has told them another.

    Args:
        listeners: those among them that have `set_epoch` are told.
    """

    def __init__(self, listeners: Iterable[Any]) -> None:
        unique = {id(each): each for each in listeners}
        self._listeners = [each for each in unique.values() if callable(getattr(each, "set_epoch", None))]
        self._told = self._heard()

    def chosen(self) -> int | None:
        """The epoch that the user has told one of them since; None: she has not."""
        for told, heard in zip(self._told, self._heard(), strict=True):
            if heard is not None and heard != told:
                return heard
        return None

    def tell(self, epoch: int) -> None:
        """Tell all of them."""
        for each in self._listeners:
            each.set_epoch(epoch)
        self._told = self._heard()

    def _heard(self) -> list[int | None]:
        epochs = (getattr(each, "epoch", None) for each in self._listeners)
        return [epoch if isinstance(epoch, int) else None for epoch in epochs]
