"""What was measured of a model: one row per event of its forward."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Event", "Profile", "Spot"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call of an atom (a submodule that is placed as a whole), with what the model does until the next one.

    Seconds are for a micro-batch of b samples: `fixed + per_sample * b`. What is fixed does not shrink with the
    micro-batch: Python, launches of kernels, weights read from memory.

    Args:
        atom: the submodule's name in the model.
        forward_fixed_s: see above.
        forward_per_sample_s: see above.
        backward_fixed_s: see above.
        backward_per_sample_s: see above.
        parameter_bytes: of parameters and buffers that no earlier event has used.
        saved_bytes: per sample, kept for backward.
        input_bytes: per sample, what crosses if a stage begins here: all that recomputing has to keep.
    """

    atom: str
    forward_fixed_s: float
    forward_per_sample_s: float
    backward_fixed_s: float
    backward_per_sample_s: float
    parameter_bytes: int
    saved_bytes: float
    input_bytes: float

    def forward_s(self, samples: float) -> float:
        """Seconds of forward for so many samples."""
        return self.forward_fixed_s + self.forward_per_sample_s * samples

    def backward_s(self, samples: float) -> float:
        """Seconds of backward for so many samples."""
        return self.backward_fixed_s + self.backward_per_sample_s * samples


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on its first batch.

    Args:
        events: in the order in which they happen.
        samples: of the batch.
        unsplit_s: forward and backward of the whole batch, without this backend; None: no device holds the model.
        trained_share: bytes of parameters that are trained, of all parameters.
        least_samples: the smallest micro-batch that was measured.
    """

    events: tuple[Event, ...]
    samples: int
    unsplit_s: float | None = None
    trained_share: float = 1.0
    least_samples: int = 1


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One device.

    Args:
        device: torch's name of it.
        cap_bytes: what it may hold.
        speed: of computing; the device on which the profile was made has 1.
        bytes_per_s: how fast tensors arrive from the device before.
    """

    device: str
    cap_bytes: float
    speed: float = 1.0
    bytes_per_s: float = 1e10
