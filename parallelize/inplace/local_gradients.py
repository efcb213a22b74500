"""A gradient that is one rank's own: no other has a part in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.errors import SyncError

__all__ = ["BYPASSED", "UNFINISHED", "UNSENT", "Own"]

BYPASSED = "it was computed from this rank's batch alone: a submodule or a method other than forward was called, the \
model was used functionally, or backward ran once more than the model"
UNSENT = "it was accumulated under no_sync, and no backward outside of no_sync has averaged it since"
UNFINISHED = "the backward that brought it gave other parameters none, and averaging has waited for those in vain"

_FIXES = {
    BYPASSED: "call the model itself; name other methods, as in parallel_model(model, methods=['encode']); for "
    "several forwards call backward once, on the sum of their losses",
    UNSENT: "run forward and backward of the last micro-batch outside of no_sync, with every parameter in use",
    UNFINISHED: "use backend=DDPBackend(find_unused_parameters=True), or call zero_grad before the next backward",
}


@dataclass(frozen=True)
class Own:
    """A gradient that no other rank has a part in.

    Args:
        parameter: whose gradient it is.
        name: the parameter's, with its model's.
        why: one of the reasons above.
    """

    parameter: torch.Tensor
    name: str
    why: str

    @property
    def matters(self) -> bool:
        """Whether there is anything in it, which an optimizer would step on."""
        gradient = self.parameter.grad
        if gradient is None:
            return False
        return bool((gradient._values() if gradient.is_sparse else gradient).count_nonzero())

    def refusal(self) -> SyncError:
        """What an optimizer is told that would step on it."""
        return SyncError(
            f"the gradient of {self.name} is not averaged over the ranks", why=self.why, fix=_FIXES[self.why]
        )
