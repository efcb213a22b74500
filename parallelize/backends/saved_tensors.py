"""Watches what a forward saves for backward, each storage once.

    forward              autograd saves tensors in the nodes of its graph
    ├── on_saved         gets the storage of each tensor that is saved, and its new bytes
    └── the tensor       is dropped, so that a forward of any model needs little memory;
                         with keeps=True it stays, and backward can run

Glossary:

    saved tensor     a tensor that a node of autograd's graph keeps for its backward
    storage          the memory of a tensor; views share it, and so do tensors that are saved twice
    storage key      names a storage, also after its memory was freed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from parallelize.errors import Fault

StorageKey = Hashable
"""Equal for tensors that share a storage. It is not reused for another storage."""

OnSaved = Callable[[StorageKey, int], None]
"""Gets the key of a storage, and its bytes; 0 bytes: it does not count, or no longer."""


class DroppedTensorError(RuntimeError):
    """A tensor was needed that `watch_saved` has dropped: forward itself computes gradients."""


_DROPPED = Fault(
    "backward has reached a forward that has measured the model, and whose graph is dropped",
    why="forward has put outputs into an object or a global variable, which is not put back",
    fix="keep them in attributes of modules, also in lists and dicts; or use backend='ddp'",
)
"""Seen by users if an output of the measured forward has stayed somewhere."""


def storage_key(tensor: torch.Tensor) -> StorageKey:
    """Return the key of a tensor's storage; the tensor must be strided."""
    # The weak reference keeps the address of the storage from being used again: without it, a
    # storage that is made after another one was freed could be taken for that one.
    key: StorageKey = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
    return key


@contextlib.contextmanager
def watch_saved(
    on_saved: OnSaved,
    *,
    uncounted: Iterable[torch.Tensor] = (),
    keeps: bool = False,
) -> Iterator[None]:
    """Call a function for each tensor that autograd saves in the context.

    Args:
        on_saved: gets the bytes of a storage when it is saved for the first time, and 0 afterwards.
        uncounted: tensors whose storages have 0 bytes, such as the parameters of the model.
        keeps: whether saved tensors stay alive, so that the graph can be used; else a backward
            through it, also one inside of the context, raises `DroppedTensorError`.
    """
    seen: set[StorageKey] = set()
    for tensor in uncounted:
        if tensor.layout is torch.strided:
            seen.add(storage_key(tensor))

    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        # Sparse tensors have no storage of their own: autograd saves their parts with them.
        if tensor.layout is torch.strided:
            key = storage_key(tensor)
            new_bytes = 0
            if key not in seen:
                seen.add(key)
                new_bytes = tensor.untyped_storage().nbytes()
            on_saved(key, new_bytes)
        if not keeps:
            return None
        # The tensor itself would make a reference cycle with the node that saves it.
        return tensor.detach()

    def unpack(kept: torch.Tensor | None) -> torch.Tensor:
        if kept is None:
            raise DroppedTensorError(str(_DROPPED))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
