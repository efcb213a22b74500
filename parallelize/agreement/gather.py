"""Python objects of all ranks. No stranger's bytes are unpickled.

    1   each rank sends a header: the size of its message, and 16 random bytes
    2   each rank sends its message

    message     an HMAC-SHA256, and the content
    content     a letter, and what it says: a plain value, a pickle, or why there is none

The HMAC is of the headers of all ranks, the sender's rank and the content, under the key of the
run. A rank that has drawn its random bytes now knows by it that the message answers them. It is not
one of an earlier exchange, and not one of another rank. A message is loaded when all are verified.
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
_HEADER = struct.Struct("<q16s")


class _Letter(bytes, enum.Enum):
    """The first byte of a content."""

    PLAIN = b"v"
    PICKLE = b"p"
    FAILURE = b"f"


@dataclass(frozen=True)
class _Content:
    """The content of a message that was verified."""

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

    Plain values (see `plain_values.encoded`) are sent as JSON and bytes of tensors, others as
    pickles.

    Args:
        value: of this rank.
        group: a group of all ranks; None: the default group.
        device: gets tensors that were on an accelerator; those in a pickle are for `load`.
        dump: pickles a value that is not plain.
        load: unpickles it on the other ranks. It is called for nothing but what `dump` has returned
            on a rank of this run.

    Raises:
        ConfigError: on every rank: a value is not plain, and the run has no key.
        SyncError: a message was not sent by a rank of this run, or another rank cannot send its
            value.
        Exception: what `dump` has raised on this rank.
    """
    exchange = _Exchange(group, value, dump)
    messages = exchange.messages_of_all_ranks()
    values = exchange.read(range(len(messages)), messages, device, load)
    values[exchange.rank] = value
    return values


def broadcast_object(
    value: Any,
    *,
    device: torch.device = _CPU,
    dump: Callable[[Any], bytes] = pickle.dumps,
    load: Callable[[bytes], Any] = pickle.loads,
) -> Any:
    """Return rank 0's value on every rank; a collective. Errors are those of `gather_objects`.

    Args:
        value: what rank 0 sends; other ranks' values are not looked at.
        device: as for `gather_objects`.
        dump: as for `gather_objects`.
        load: as for `gather_objects`.
    """
    is_sender = dist.get_rank() == 0
    exchange = _Exchange(None, value if is_sender else None, dump)
    message = exchange.message_of_rank_0()
    (received,) = exchange.read([0], [message], device, load)
    return value if is_sender else received


class _Exchange:
    """One exchange of messages between the ranks of a group. The constructor exchanges headers.

    Args:
        group: a group of all ranks; None: the default group.
        value: of this rank.
        dump: pickles a value that is not plain.

    Attributes:
        rank: rank of this process.
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

        If the value cannot be sent, the content says so, and all ranks raise an error: the others
        wait for a message.
        """
        try:
            return _Letter.PLAIN + encoded(value)
        except NotPlain as exc:
            reason = str(exc)
        if self._key is None:
            return _Letter.FAILURE + f"{type(value).__name__}: {reason}".encode()
        try:
            return _Letter.PICKLE + dump(value)
        except Exception as exc:  # noqa: BLE001 - raised in `read`, when the other ranks know
            self._error_of_dump = exc
            return _Letter.FAILURE + f"{type(exc).__name__}: {exc}".encode()

    def _exchanged_headers(self) -> list[bytes]:
        """Return the headers of all ranks."""
        header = _HEADER.pack(_MAC_BYTES + len(self._content), os.urandom(16))
        headers = self._gathered(header)
        # A stranger could return other bytes in place of those that this rank has drawn.
        headers[self.rank] = header
        return headers

    def _sizes_of_messages(self) -> list[int]:
        """Return the sizes of all ranks' messages, which this machine can hold.

        Raises:
            SyncError: it cannot.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes = []
        for sender, header in enumerate(self._headers):
            size, _random_bytes = _HEADER.unpack(header)
            if not _LEAST_BYTES <= size <= memory // len(self._headers):
                fault = f"it would have {size} bytes, of {memory} bytes of memory for all ranks"
                raise _not_authentic(sender, fault)
            sizes.append(size)
        return sizes

    def messages_of_all_ranks(self) -> list[bytes]:
        """Send this rank's message; return those of all ranks."""
        largest = max(self._sizes)
        padded_messages = self._gathered(self._message().ljust(largest, b"\0"))
        messages = []
        for message, size in zip(padded_messages, self._sizes, strict=True):
            messages.append(message[:size])
        return messages

    def message_of_rank_0(self) -> bytes:
        """Send rank 0's message, or receive it."""
        message = self._message() if self.rank == 0 else bytes(self._sizes[0])
        tensor = self._tensor_of(message)
        dist.broadcast(tensor, src=0, group=self._group)
        return _bytes_of(tensor)

    def _gathered(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, which have one size."""
        sent = self._tensor_of(message)
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(received, sent, group=self._group)
        return [_bytes_of(tensor) for tensor in received]

    def _message(self) -> bytes:
        """Return the message of this rank."""
        return self._mac(self.rank, self._content) + self._content

    def _mac(self, sender: int, content: bytes) -> bytes:
        """Return the HMAC of a content; without a key, one that nobody looks at."""
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
        """Return the values of the messages, and None for this rank's message.

        Nothing is loaded before all messages are verified.
        """
        if self._error_of_dump is not None:
            raise self._error_of_dump
        contents = []
        for sender, message in zip(senders, messages, strict=True):
            contents.append(self._verified(sender, message))
        for content in contents:
            if content.letter == _Letter.FAILURE:
                reason = content.body.decode(errors="replace")
                raise _cannot_send(content.sender, reason, has_key=self._key is not None)
        return [self._value_of(content, device, load) for content in contents]

    def _verified(self, sender: int, message: bytes) -> _Content:
        """Return the content of a message, if its sender has the key of the run."""
        mac, content = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if self._key is not None and not hmac.compare_digest(mac, self._mac(sender, content)):
            raise _not_authentic(sender, "its HMAC is not one under this run's key")
        return _Content(sender, content[:1], content[1:])

    def _value_of(
        self, content: _Content, device: torch.device, load: Callable[[bytes], Any]
    ) -> Any:
        """Return the value of a verified message; without a key, nothing is unpickled."""
        if content.sender == self.rank:
            return None
        if content.letter == _Letter.PLAIN:
            return _plain_value(content, device)
        if content.letter == _Letter.PICKLE and self._key is not None:
            return load(content.body)
        raise _not_authentic(content.sender, "it is a pickle, and this run has no key")

    def _tensor_of(self, message: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _plain_value(content: _Content, device: torch.device) -> Any:
    try:
        return decoded(content.body, device=device)
    except NotPlain as exc:
        raise _not_authentic(content.sender, f"it is no plain value: {exc}") from None


def _not_authentic(sender: int, fault: str) -> SyncError:
    return SyncError(
        f"the message of rank {sender} was not sent by this run, and is not read",
        why=f"{fault}; a process that is no rank may have connected to the ranks",
        fix="keep strangers off the network of the ranks; set PARALLELIZE_KEY to the same secret "
        "text on all nodes",
    )


def _cannot_send(sender: int, reason: str, *, has_key: bool) -> ConfigError | SyncError:
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
