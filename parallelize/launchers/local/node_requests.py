"""What must be the same on all nodes of a call: the function, and arguments that JSON has."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import inspect
import json
import re
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from parallelize.call.task import Task
from parallelize.errors import ConfigError
from parallelize.launchers.local.one_node import new_stamp

_SHOWN_CHARACTERS = 80
_DIGEST_CHARACTERS = 16


class Request(NamedTuple):
    """What a node says of its call.

    Args:
        host: name of the node's host.
        stamp: a name for the call, by its time. All nodes use node 0's.
        parts: the text of each part of the call, by name; of a long text the beginning, and a
            digest.
    """

    host: str
    stamp: str
    parts: dict[str, str]

    @classmethod
    def of(cls, task: Task, key: str) -> Request:
        """Return the request of a call.

        Args:
            task: the call.
            key: the secret of the nodes; "": they have none.
        """
        parts = {name: _shown(text) for name, text in _texts_of(task)}
        parts["PARALLELIZE_KEY"] = "not set"
        if key:
            # Nobody can guess the key by this, if it is one of `openssl rand -hex 32`.
            digest = hmac.digest(key.encode(), b"parallelize: nodes of a call", "sha256").hex()
            parts["PARALLELIZE_KEY"] = f"one with the digest {digest[:_DIGEST_CHARACTERS]}"
        return cls(socket.gethostname(), new_stamp(), parts)

    @classmethod
    def of_json(cls, value: Any) -> Request:
        """Return the request that another node has sent.

        Raises:
            ValueError: it is none.
            TypeError: the same.
        """
        host, stamp, parts = value
        # ValueError or TypeError: this is no object of JSON, whose keys are texts.
        parts = dict(parts)
        if set(map(type, [host, stamp, *parts.values()])) != {str}:
            raise ValueError("a request of a node has other values than texts")
        # A folder of logs gets this name: a stranger's must not lead elsewhere.
        if not re.fullmatch(r"[\d-]+", stamp):
            raise ValueError("the stamp of a node's call has other characters than digits")
        return cls(host, stamp, parts)


def _shown(text: str) -> str:
    """Return a text as it is compared and shown: a long one is cut, and has a digest."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return f"{text[:_SHOWN_CHARACTERS]} ... (digest {digest[:_DIGEST_CHARACTERS]})"


def _texts_of(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the parts of a call that can be compared, by name."""
    layout = task.layout
    nodes = f"{layout.num_nodes} nodes x {layout.local_world_size} processes"
    yield "the call", f"{task.name}, {nodes}"
    # A function of a notebook has no source, nor has a callable that is no function.
    with contextlib.suppress(OSError, TypeError):
        yield "the source of the function", inspect.getsource(inspect.unwrap(task.function))
    for name, value in (*enumerate(task.args), *task.kwargs.items()):
        # The value is none that JSON has.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            yield f"argument {name!r}", json.dumps(value)


def require_equal(requests: Mapping[int, Request]) -> None:
    """Require that all nodes make the same call.

    Args:
        requests: the requests, by node.

    Raises:
        ConfigError: a part of the call differs.
    """
    names = dict[str, None]()
    for request in requests.values():
        names.update(dict.fromkeys(request.parts))
    for name in names:
        _require_equal_part(name, requests)


def _require_equal_part(name: str, requests: Mapping[int, Request]) -> None:
    texts = set[str]()
    shown = []
    for node, request in sorted(requests.items()):
        text = request.parts.get(name, "none")
        texts.add(text)
        shown.append(f"node {node} ({request.host}): {text}")
    if len(texts) > 1:
        raise ConfigError(
            f"{name} differs between the nodes",
            why="; ".join(shown),
            fix="start the same script with the same options on every node; draw random values in "
            "the function, or with a seed",
        )


def texts_on_absent(
    present: Mapping[int, Request], num_nodes: int, timeout: timedelta
) -> list[str]:
    """Return what is wrong, why, and the fix, for nodes that have not joined in time.

    Args:
        present: the requests of the nodes that have joined.
        num_nodes: number of nodes of the call.
        timeout: how long was waited.
    """
    hosts = []
    missing = []
    for node in range(num_nodes):
        if node in present:
            hosts.append(f"node {node} from {present[node].host}")
        else:
            missing.append(str(node))
    fault = (
        f"{len(hosts)} of {num_nodes} nodes joined within {timeout.total_seconds():g} s: "
        f"{', '.join(hosts)}"
    )
    reason = (
        f"node {', '.join(missing)} is missing: it was not started, or its call has failed, or it "
        "cannot reach MASTER_ADDR:MASTER_PORT"
    )
    fix = "start the script on every node, or correct num_nodes; timeout= allows more time"
    return [fault, reason, fix]
