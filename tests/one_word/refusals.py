"""What does not run, or ends with other weights, under a backend: declared, so that the tests keep it true."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIFFERENCES", "REFUSALS", "Refusal"]


@dataclass(frozen=True)
class Refusal:
    """An error that a program is expected to end with: a part of its message, and why it cannot be otherwise.

    Args:
        words: regular expression that the message matches.
        reason: why the program cannot run.
    """

    words: str
    reason: str


_SHARDED = ("fsdp", "hsdp", "offloaded")

_GRAD = Refusal(
    r"torch\.autograd\.grad of sharded parameters",
    "the gradients of autograd.grad are those of one rank's batch, and are not cut into shards",
)
_WRITES = Refusal(
    r"forward has written to encoder_k\.conv\.weight",
    "the forward computes with gathered copies of the shards, so that what it writes is lost",
)
_SHARED = Refusal(
    r"encoder\.0\.weight of Autoencoder, which another model of the block shares",
    "a parameter is gathered with one model only",
)

# program, world -> error
REFUSALS: dict[tuple[str, str], Refusal] = {
    **{("maml", world): _GRAD for world in _SHARDED},
    ("moco", "fsdp"): _WRITES,
    ("moco", "hsdp"): _WRITES,
    **{("tied_autoencoder", world): _SHARED for world in ("auto", *_SHARDED)},
}

# program, world -> why its weights are not those of the reference
DIFFERENCES: dict[tuple[str, str], str] = {
    ("ddpm", "balanced"): "each micro-batch draws its own time steps and noise",
    ("shampoo", "balanced"): "its inverse roots of eigenvalues near zero amplify rounding",
}
