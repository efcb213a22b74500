"""Python objects of all ranks. Nothing is unpickled unless its sender has proved the run's key for this message.

    1  each rank sends the size of its message, and 16 random bytes
    2  each rank sends an HMAC-SHA256, and its message: a plain value, or a pickle

The HMAC is of everybody's sizes and random bytes, the sender's rank and the message. A rank that has drawn its random
bytes now knows by it that the message is an answer to them: not one of an earlier exchange, and not another rank's.
"""

from __future__ import annotations

import hmac
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelize.agreement.plain_values import NotPlain, decoded, encoded
from parallelize.errors import ConfigError, SyncError
from parallelize.run.run_key import message_device, run_key

__all__ = ["broadcast_object", "gather_objects"]

_CPU = torch.device("cpu")
_PLAIN, _PICKLED, _FAILED = b"v", b"p", b"f"
_MAC_BYTES = 32
_LEAST_BYTES = _MAC_BYTES + 1
_HEADER = struct.Struct("<q16s")


def gather_objects(
    value: Any,
    *,
    group: Any = None,
    device: torch.device = _CPU,
    dump: Callable[[Any], bytes] = pickle.dumps,
    load: Callable[[bytes], Any] = pickle.loads,
) -> list[Any]:
    """Return the value of each rank, in rank order; a collective: every rank must call it.

    Plain values (see `plain_values.encoded`) are sent as JSON and bytes of tensors, others as pickles.

    Args:
        value: of this rank.
        group: a group of all ranks; None: the default group.
        device: gets tensors that were on an accelerator; those of other values than plain ones are for `load`.
        dump: pickles a value that is not plain.
        load: unpickles it on the other ranks. It is called for nothing but what `dump` has returned on a rank of this
            run.

    Raises:
        ConfigError: on every rank: a value is not plain, and the run has no key.
        SyncError: a message was not sent by a rank of this run, or another rank cannot send its value.
        Exception: what `dump` has raised on this rank.
    """
    exchange = _Exchange(group, value, dump)
    messages = exchange.of_all()
    found = exchange.read(range(len(messages)), messages, device, load)
    found[exchange.rank] = value
    return found


def broadcast_object(
    value: Any,
    *,
    device: torch.device = _CPU,
    dump: Callable[[Any], bytes] = pickle.dumps,
    load: Callable[[bytes], Any] = pickle.loads,
) -> Any:
    """Return rank 0's value on every rank; a collective. Arguments and errors are those of `gather_objects`.

    Args:
        value: what rank 0 sends; other ranks' values are not looked at.
        device: as for `gather_objects`.
        dump: as for `gather_objects`.
        load: as for `gather_objects`.
    """
    is_sender = dist.get_rank() == 0
    exchange = _Exchange(None, value if is_sender else None, dump)
    (received,) = exchange.read([0], [exchange.of_rank_0()], device, load)
    return value if is_sender else received


class _Exchange:
    """One exchange of messages between the ranks of a group.

    Args:
        group: a group of all ranks; None: the default group.
        value: of this rank.
        dump: pickles a value that is not plain.

    Attributes:
        rank: rank of this process.
    """

    def __init__(self, group: Any, value: Any, dump: Callable[[Any], bytes]) -> None:
        self.rank = dist.get_rank()
        self._group, self._device = group, message_device(group)
        self._key = run_key()
        self._error: Exception | None = None
        self._content = self._content_of(value, dump)
        self._sizes, self._table = self._headers()

    def of_all(self) -> list[bytes]:
        """Return the message of each rank."""
        most = max(self._sizes)
        padded = self._sent().ljust(most, b"\0")
        received = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in self._sizes]
        dist.all_gather(received, self._tensor(padded), group=self._group)
        return [_bytes_of(tensor)[:size] for tensor, size in zip(received, self._sizes, strict=True)]

    def of_rank_0(self) -> bytes:
        """Return the message of rank 0."""
        message = self._sent() if self.rank == 0 else bytes(self._sizes[0])
        tensor = self._tensor(message)
        dist.broadcast(tensor, src=0, group=self._group)
        return _bytes_of(tensor)

    def read(
        self, senders: Sequence[int], messages: Sequence[bytes], device: torch.device, load: Callable[[bytes], Any]
    ) -> list[Any]:
        """Return the values of the messages; None for this rank's own. Nothing is loaded before all are verified."""
        if self._error is not None:
            raise self._error
        contents = []
        for sender, message in zip(senders, messages, strict=True):
            mac, content = message[:_MAC_BYTES], message[_MAC_BYTES:]
            if self._key is not None and not hmac.compare_digest(mac, self._mac(sender, content)):
                raise _not_authentic(sender, "its HMAC is not one under this run's key")
            contents.append((sender, content[:1], content[1:]))
        for sender, kind, content in contents:
            if kind == _FAILED:
                raise _cannot_send(sender, content.decode(errors="replace"), has_key=self._key is not None)
        values: list[Any] = []
        for sender, kind, content in contents:
            if sender == self.rank:
                values.append(None)
            elif kind == _PICKLED and self._key is not None:
                values.append(load(content))
            elif kind == _PLAIN:
                values.append(_plain_value(sender, content, device))
            else:
                raise _not_authentic(sender, "it is a pickle, and this run has no key")
        return values

    def _content_of(self, value: Any, dump: Callable[[Any], bytes]) -> bytes:
        """Return this rank's message. One that cannot be sent is an error on all ranks, which wait for a message."""
        try:
            return _PLAIN + encoded(value)
        except NotPlain as exc:
            reason = str(exc)
        if self._key is None:
            return _FAILED + f"{type(value).__name__}: {reason}".encode()
        try:
            return _PICKLED + dump(value)
        except Exception as exc:  # noqa: BLE001 - raised below, when the other ranks have been told
            self._error = exc
            return _FAILED + f"{type(exc).__name__}: {exc}".encode()

    def _headers(self) -> tuple[list[int], bytes]:
        """Exchange headers; return the sizes of all ranks' messages, and the headers of all as bytes.

        Raises:
            SyncError: the messages are larger than the memory of this machine.
        """
        own = _HEADER.pack(_MAC_BYTES + len(self._content), os.urandom(16))
        received = [torch.empty(len(own), dtype=torch.uint8, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(received, self._tensor(own), group=self._group)
        headers = [_bytes_of(tensor) for tensor in received]
        # Of this rank's own bytes a stranger could return others.
        headers[self.rank] = own
        sizes = [_HEADER.unpack(header)[0] for header in headers]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for sender, size in enumerate(sizes):
            if not _LEAST_BYTES <= size <= memory // len(sizes):
                raise _not_authentic(sender, f"it would have {size} bytes, of {memory} bytes of memory for all ranks")
        return sizes, b"".join(headers)

    def _sent(self) -> bytes:
        return self._mac(self.rank, self._content) + self._content

    def _mac(self, sender: int, content: bytes) -> bytes:
        """Return the HMAC of a sender's message in this exchange; without a key, one that nobody looks at."""
        authenticator = hmac.new(self._key or b"", digestmod="sha256")
        for part in (b"parallelize exchange", self._table, struct.pack("<q", sender), content):
            authenticator.update(part)
        return authenticator.digest()

    def _tensor(self, content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _plain_value(sender: int, content: bytes, device: torch.device) -> Any:
    try:
        return decoded(content, device=device)
    except NotPlain as exc:
        raise _not_authentic(sender, f"it is no plain value: {exc}") from None


def _not_authentic(sender: int, why: str) -> SyncError:
    return SyncError(
        f"the message of rank {sender} was not sent by this run, and is not read",
        why=f"{why}; a process that is no rank may have connected to the ranks",
        fix="keep strangers off the network of the ranks; set PARALLELIZE_KEY to the same secret text on all nodes",
    )


def _cannot_send(sender: int, text: str, *, has_key: bool) -> ConfigError | SyncError:
    if has_key:
        return SyncError(
            f"rank {sender} cannot send its value: {text}",
            why="ranks exchange their values here",
            fix=f"see the error of rank {sender}",
            is_secondary=True,
        )
    return ConfigError(
        f"rank {sender} would send a pickle: {text}",
        why="ranks on several hosts have no common secret, and a pickle of a stranger could run code",
        fix="set PARALLELIZE_KEY to the same secret text on all nodes, such as that of `openssl rand -hex 32`; or "
        "return numbers, strings, tensors and lists, tuples and dicts of them",
    )
