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


_FUNCTIONAL = Refusal(
    r"torch\.func\.functional_call of Sine under fsdp",
    "the forward computes with shards that fully_shard has gathered, and not with tensors that are given for them",
)
_SHARED = Refusal(
    r"encoder\.0\.weight of Autoencoder, which another model of the block shares",
    "a parameter is gathered with one model only",
)

# program, world -> error
REFUSALS: dict[tuple[str, str], Refusal] = {
    ("maml", "fsdp"): _FUNCTIONAL,
    ("maml", "hsdp"): _FUNCTIONAL,
    ("tied_autoencoder", "fsdp"): _SHARED,
    ("tied_autoencoder", "hsdp"): _SHARED,
}

# program, world -> why its weights are not those of the reference
DIFFERENCES: dict[tuple[str, str], str] = {
    ("ddpm", "balanced"): "each micro-batch draws its own time steps and noise",
    ("shampoo", "balanced"): "its inverse roots of eigenvalues near zero amplify rounding",
}
