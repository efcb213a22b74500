"""Collectives that exchange Python objects between the ranks.

Unpickling runs code, and a process that is no rank may have connected to the ranks: no pickle of
such a stranger may be loaded. An exchange is two collectives:

    1   each rank sends a header: the size of its message, and 16 random bytes
    2   each rank sends its message, or rank 0 alone does

    message     an HMAC-SHA256 of 32 bytes, and the content
    content     a letter (see `_Letter`), and a plain value, a pickle, or why neither can be sent

The HMAC covers the headers of all ranks, the sender's rank and the content, under the key of the
run (see `run/run_key.py`). The headers show that the message is not copied from an earlier
exchange: this rank has just drawn random bytes for its header. The sender's rank shows that it is
not copied from another rank. No message is read before all messages are verified.

Ranks that others have started on several hosts have no key. They exchange plain values only, which
are read without running code (see `plain_values.py`).
"""

from __future__ import annotations

import enum
import hmac
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallelize.agreement.plain_values import NotPlain, decoded, encoded
from parallelize.errors import ConfigError, SyncError
from parallelize.run.run_key import message_device, run_key

_CPU = torch.device("cpu")
_MAC_BYTES = 32
_LEAST_BYTES = _MAC_BYTES + 1
"""Size of the smallest message: the HMAC and a letter."""
_HEADER = struct.Struct("<q16s")


class _Letter(bytes, enum.Enum):
    """The first byte of a content, which says how to read the rest."""

    PLAIN = b"v"
    PICKLE = b"p"
    FAILURE = b"f"


@dataclass(frozen=True)
class _Content:
    """The content of a message that was verified.

    Args:
        sender: rank that has sent the message.
        letter: the first byte.
        body: the other bytes.
    """

    sender: int
    letter: bytes
    body: bytes


def gather_objects(
    value: Any,
    *,
    group: Any = None,
    device: torch.device = _CPU,
    dump: Callable[[Any], bytes] = pickle.dumps,
    load: Callable[[bytes], Any] = pickle.loads,
) -> list[Any]:
    """Return the value of each rank, in rank order; a collective: every rank must call it.

    Plain values (see `plain_values.encoded`) are sent as JSON and bytes of tensors, all other
    values as pickles.

    Args:
        value: what this rank sends.
        group: a group of all ranks; None: the default group.
        device: where received tensors are put that were on the sender's accelerator. It is for
            tensors of plain values: where tensors of a pickle are put is decided by `load`.
        dump: pickles a value that is not plain.
        load: unpickles what `dump` has returned on another rank of this run. It gets no other
            bytes.

    Raises:
        ConfigError: on every rank: a value is not plain, and the run has no key.
        SyncError: a message was not sent by a rank of this run, or `dump` has raised an error on
            another rank.
        Exception: `dump` has raised it on this rank.
    """
    exchange = _Exchange(group, value, dump)
    messages = exchange.messages_of_all_ranks()
    senders = range(len(messages))
    values = exchange.read(senders, messages, device, load)
    # The other ranks get copies; this rank returns its value as it is.
    values[exchange.rank] = value
    return values


def broadcast_object(
    value: Any,
    *,
    group: Any = None,
    device: torch.device = _CPU,
    dump: Callable[[Any], bytes] = pickle.dumps,
    load: Callable[[bytes], Any] = pickle.loads,
) -> Any:
    """Return rank 0's value on every rank; a collective. It raises the errors of `gather_objects`.

    Args:
        value: what rank 0 sends. The values of the other ranks are ignored.
        group: as for `gather_objects`.
        device: as for `gather_objects`.
        dump: as for `gather_objects`.
        load: as for `gather_objects`.
    """
    is_sender = dist.get_rank() == 0
    exchange = _Exchange(group, value if is_sender else None, dump)
    message = exchange.message_of_rank_0()
    (received,) = exchange.read([0], [message], device, load)
    return value if is_sender else received


class _Exchange:
    """One exchange of messages between all ranks.

    The constructor is a collective, which exchanges the headers. One of the two functions for
    messages follows, and then `read`.

    Args:
        group: a group of all ranks; None: the default group.
        value: what this rank sends.
        dump: pickles a value that is not plain.

    Attributes:
        rank: the rank of this process.
    """

    def __init__(self, group: Any, value: Any, dump: Callable[[Any], bytes]) -> None:
        self.rank = dist.get_rank()
        self._group = group
        self._device = message_device(group)
        self._key = run_key()
        self._error_of_dump: Exception | None = None
        self._content = self._content_of(value, dump)
        self._headers = self._exchanged_headers()
        self._sizes = self._sizes_of_messages()

    def _content_of(self, value: Any, dump: Callable[[Any], bytes]) -> bytes:
        """Return this rank's content.

        It raises nothing, because the other ranks already wait for a message. If the value cannot
        be sent, the content is the reason, and all ranks raise an error in `read`.
        """
        try:
            return _Letter.PLAIN + encoded(value)
        except NotPlain as exc:
            reason = str(exc)
        if self._key is None:
            return _Letter.FAILURE + f"{type(value).__name__}: {reason}".encode()
        try:
            return _Letter.PICKLE + dump(value)
        except Exception as exc:  # noqa: BLE001 - raised in `read`, when the message was sent
            self._error_of_dump = exc
            return _Letter.FAILURE + f"{type(exc).__name__}: {exc}".encode()

    def _exchanged_headers(self) -> list[bytes]:
        """Exchange the headers, and return the headers of all ranks, in rank order."""
        header = _HEADER.pack(_MAC_BYTES + len(self._content), os.urandom(16))
        headers = self._gathered(header)
        # A stranger could return this rank's header of an earlier exchange, and then its messages.
        headers[self.rank] = header
        return headers

    def _sizes_of_messages(self) -> list[int]:
        """Return the size of each rank's message, as its header says.

        Headers are not verified. Without the check, a stranger could make this rank allocate any
        amount of memory.

        Raises:
            SyncError: a message is smaller than any message, or larger than its share of memory.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes = []
        for sender, header in enumerate(self._headers):
            size, _random_bytes = _HEADER.unpack(header)
            if not _LEAST_BYTES <= size <= memory // len(self._headers):
                fault = f"it would have {size} bytes, of {memory} bytes of memory for all ranks"
                raise _not_authentic_error(sender, fault)
            sizes.append(size)
        return sizes

    def messages_of_all_ranks(self) -> list[bytes]:
        """Send this rank's message, and return the messages of all ranks, in rank order."""
        # A collective sends equally many bytes for every rank.
        largest = max(self._sizes)
        padded_messages = self._gathered(self._message().ljust(largest, b"\0"))
        messages = []
        for message, size in zip(padded_messages, self._sizes, strict=True):
            messages.append(message[:size])
        return messages

    def message_of_rank_0(self) -> bytes:
        """Return rank 0's message, which rank 0 sends and the other ranks receive."""
        # The other ranks receive it in place of as many zeros.
        message = self._message() if self.rank == 0 else bytes(self._sizes[0])
        tensor = self._tensor_of(message)
        dist.broadcast(tensor, src=0, group=self._group)
        return _bytes_of(tensor)

    def _gathered(self, message: bytes) -> list[bytes]:
        """Gather the messages of all ranks, which must be equally long, in rank order."""
        sent = self._tensor_of(message)
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(received, sent, group=self._group)
        return [_bytes_of(tensor) for tensor in received]

    def _message(self) -> bytes:
        """Return this rank's message: the HMAC, and the content."""
        return self._mac(self.rank, self._content) + self._content

    def _mac(self, sender: int, content: bytes) -> bytes:
        """Return the HMAC of a content.

        Without a key of the run, it is made with an empty key: the layout of messages stays the
        same, and no rank checks the HMAC.
        """
        authenticator = hmac.new(self._key or b"", digestmod="sha256")
        authenticator.update(b"parallelize exchange")
        for header in self._headers:
            authenticator.update(header)
        authenticator.update(struct.pack("<q", sender))
        authenticator.update(content)
        return authenticator.digest()

    def read(
        self,
        senders: Sequence[int],
        messages: Sequence[bytes],
        device: torch.device,
        load: Callable[[bytes], Any],
    ) -> list[Any]:
        """Return the values of the messages, and None for a message of this rank.

        All messages are verified before one is read. It raises the errors of `gather_objects`.

        Args:
            senders: for each message, the rank that has sent it.
            messages: the messages.
            device: as for `gather_objects`.
            load: as for `gather_objects`.
        """
        if self._error_of_dump is not None:
            raise self._error_of_dump
        contents = []
        for sender, message in zip(senders, messages, strict=True):
            contents.append(self._verified(sender, message))
        for content in contents:
            if content.letter == _Letter.FAILURE:
                reason = content.body.decode(errors="replace")
                raise _cannot_send_error(content.sender, reason, has_key=self._key is not None)
        return [self._value_of(content, device, load) for content in contents]

    def _verified(self, sender: int, message: bytes) -> _Content:
        """Return the content of a message.

        Raises:
            SyncError: the run has a key, and the sender does not have it.
        """
        mac, content = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if self._key is not None and not hmac.compare_digest(mac, self._mac(sender, content)):
            raise _not_authentic_error(sender, "its HMAC is not one under this run's key")
        return _Content(sender, content[:1], content[1:])

    def _value_of(
        self, content: _Content, device: torch.device, load: Callable[[bytes], Any]
    ) -> Any:
        """Return the value of a verified message; None if this rank has sent it.

        Without a key, nothing is verified, so that no pickle is loaded.
        """
        if content.sender == self.rank:
            return None
        if content.letter == _Letter.PLAIN:
            return _plain_value(content, device)
        if content.letter == _Letter.PICKLE and self._key is not None:
            return load(content.body)
        raise _not_authentic_error(content.sender, "it is a pickle, and this run has no key")

    def _tensor_of(self, message: bytes) -> torch.Tensor:
        """Return a message as a uint8 tensor on a device from which the group can send it."""
        return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the message in a uint8 tensor, as bytes."""
    return tensor.cpu().numpy().tobytes()


def _plain_value(content: _Content, device: torch.device) -> Any:
    """Return the plain value of a content, with tensors of accelerators on a device.

    Raises:
        SyncError: the body is no plain value, so that no rank can have sent it.
    """
    try:
        return decoded(content.body, device=device)
    except NotPlain as exc:
        raise _not_authentic_error(content.sender, f"it is no plain value: {exc}") from None


def _not_authentic_error(sender: int, fault: str) -> SyncError:
    """Return the error for a message that a stranger has sent in the name of a rank."""
    return SyncError(
        f"the message of rank {sender} was not sent by this run, and is not read",
        why=f"{fault}; a process that is no rank may have connected to the ranks",
        fix="keep strangers off the network of the ranks; set PARALLELIZE_KEY to the same secret "
        "text on all nodes",
    )


def _cannot_send_error(sender: int, reason: str, *, has_key: bool) -> ConfigError | SyncError:
    """Return the error for a rank that has sent a reason in place of a value.

    With a key, `dump` has raised an error there. Without a key, the value is not plain.
    """
    if has_key:
        return SyncError(
            f"rank {sender} cannot send its value: {reason}",
            why="ranks exchange their values here",
            fix=f"see the error of rank {sender}",
            is_secondary=True,
        )
    return ConfigError(
        f"rank {sender} would send a pickle: {reason}",
        why="ranks on several hosts have no common secret, and a pickle of a stranger could run "
        "code",
        fix="set PARALLELIZE_KEY to the same secret text on all nodes, such as that of `openssl "
        "rand -hex 32`; or return numbers, strings, tensors and lists, tuples and dicts of them",
    )
