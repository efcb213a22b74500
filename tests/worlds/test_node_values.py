"""What comes back from a call on two hosts, with and without a common secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port
from worlds.two_hosts import Host, two_hosts

pytestmark = pytest.mark.slow

SCRIPT = """
import json, random, sys, threading
import torch
from parallelize import distributed, parallel_model, rank

what = sys.argv[1]

class Own:
    pass

@distributed(processes=2, num_nodes=2, timeout=60)
def train(model, optimizer):
    with parallel_model(model):
        model(torch.ones(1, 1) * rank()).sum().backward()
        optimizer.step()
    random.random(), torch.rand(1)
    if what == "lock" and rank() == 0:
        return threading.Lock()
    return Own() if what == "object" else {"rank": rank(), "weight": model.weight.detach().clone()}

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Linear(1, 1, bias=False)
model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
result = {}
try:
    value = train(model, optimizer)
    result["value"] = type(value).__name__ if what == "object" else [value["rank"], value["weight"].item()]
    result["weight"] = model.weight.item()
    result["trainable"] = [parameter.requires_grad for parameter in model.parameters()]
    result["steps"] = optimizer.state[model.weight]["step"].item()
    result["next"] = [random.random(), torch.rand(1).item()]
    if what == "all":
        result["all"] = [[value["rank"], value["weight"].item()] for value in train.all_ranks(model, optimizer)]
except Exception as error:
    result["error"] = type(error).__name__
    result["text"] = str(error)
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def call_on(hosts: tuple[Host, Host], folder: Path, what: str, key: str = "") -> list[dict[str, Any]]:
    """Return the result on each host; they share no folder of temporary files, as two machines."""
    script, temporary = folder / "script.py", folder / "temporary"
    script.write_text(SCRIPT)
    temporary.mkdir()
    own_folder = f'mount -t tmpfs none {temporary}; exec "$@"'
    variables = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(free_port()), "TMPDIR": str(temporary)}
    if key:
        variables["PARALLELIZE_KEY"] = key
    started = [
        subprocess.Popen(
            host.command("sh", "-c", own_folder, "sh", sys.executable, str(script), what),
            env={**os.environ, **variables, "NODE_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, host in enumerate(hosts)
    ]
    found = []
    for process in started:
        out, err = process.communicate(timeout=400)
        assert out.strip(), err
        found.append(json.loads(out.strip().splitlines()[-1]))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", ["", "a secret"], ids=["without a key", "with one"])
def test_values_weights_and_random_states_come_back_on_each_host(
    hosts: tuple[Host, Host], tmp_path: Path, key: str
) -> None:
    """Without a key, too: they are tensors, numbers and texts. A frozen parameter stays frozen."""
    first, second = call_on(hosts, tmp_path, "all", key)
    assert first == second
    assert first["value"] == [0, first["weight"]]
    assert first["weight"] == pytest.approx(-0.5)
    assert (first["trainable"], first["steps"]) == ([True, False], 1.0)
    assert [rank for rank, _ in first["all"]] == [0, 1, 2, 3]


@pytest.mark.timeout(600)
def test_an_object_comes_back_on_each_host_with_a_key(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """It is a pickle, which the key verifies."""
    assert [each["value"] for each in call_on(hosts, tmp_path, "object", "a secret")] == ["Own"] * 2


@pytest.mark.timeout(600)
def test_an_object_comes_back_on_node_0_only_without_a_key(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """What was trained is not lost; the other node says what to do."""
    first, second = call_on(hosts, tmp_path, "object")
    assert first["value"] == "Own"
    assert (second["error"], "PARALLELIZE_KEY" in second["text"]) == ("ConfigError", True), second


@pytest.mark.timeout(600)
def test_a_value_that_cannot_be_pickled_is_one_error(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The same on both hosts."""
    for result in call_on(hosts, tmp_path, "lock"):
        assert (result["error"], "the returned value cannot be pickled" in result["text"]) == ("WorkerError", True), (
            result["text"]
        )
