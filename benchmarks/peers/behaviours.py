"""Expected behaviours, each checked by a program for any of the libraries, which raises AssertionError if it fails.

Workers write their results to files, because not every library returns values.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from libraries import LIBRARIES, Library
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

sys.path.append(str(Path(__file__).parents[2] / "tests" / "ssh"))

from sshd import Hosts

__all__ = ["BEHAVIOURS", "Behaviour"]


SLEEP_S = 60.0  # how long rank 1 sleeps after rank 0 has failed, unless the launcher ends it


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One row of the table.

    Args:
        expectation: one sentence.
        check: raises AssertionError if the expectation does not hold.
        test: the test of this repository that checks it for this library.
        needs: attributes of Library that the check uses besides `call`.
    """

    expectation: str
    check: Callable[[str], None]
    test: str
    needs: tuple[str, ...] = ()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.tag = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(96))


# In the workers


def _write_result(folder: str, value: Any) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(folder, f"{rank}.json").write_text(json.dumps(value))


def _results(library: str, worker: Callable[..., None], processes: int = 2) -> list[Any]:
    """Run a worker function on every rank, and return the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        LIBRARIES[library].call(processes, worker, library, folder)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def _iterated(library: Library, loader: DataLoader) -> list[int]:
    assert library.loader is not None
    return [int(index) for batch in library.loader(loader) for index in batch]


def _model_surface(library: str, folder: str) -> None:
    model = Net()
    with LIBRARIES[library].model(model, torch.optim.SGD(model.parameters(), lr=0.1)) as (wrapped, _):
        same_class = isinstance(wrapped, Net)
        has_attribute = getattr(wrapped, "tag", None) == "mine"
        same_keys = list(wrapped.state_dict()) == list(Net().state_dict())
    _write_result(folder, [same_class, has_attribute, same_keys])


def _bypass(library: str, folder: str) -> None:
    torch.manual_seed(0)
    model = Net()
    refused = ""
    with LIBRARIES[library].model(model, torch.optim.SGD(model.parameters(), lr=0.1)) as (wrapped, optimizer):
        inner = getattr(wrapped, "module", wrapped)
        inner.encoder(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        try:
            optimizer.step()
        except Exception as error:  # noqa: BLE001 - every library refuses in its own way
            refused = type(error).__name__
    _write_result(folder, [refused, [round(each, 6) for each in model.encoder.weight.flatten().tolist()]])


def _world_size(_library: str, folder: str) -> None:
    _write_result(folder, dist.get_world_size() if dist.is_initialized() else 1)


def _weighted_draws(library: str, folder: str) -> None:
    torch.manual_seed(dist.get_rank())  # as is common for augmentation
    weights = torch.arange(200) % 2  # even numbers are never drawn
    sampler = WeightedRandomSampler(weights.double().tolist(), 80, replacement=False)
    _write_result(folder, _iterated(LIBRARIES[library], DataLoader(Numbers(200), batch_size=8, sampler=sampler)))


def _stream_draws(library: str, folder: str) -> None:
    _write_result(folder, _iterated(LIBRARIES[library], DataLoader(Stream(), batch_size=8)))


def _distributed_draws(library: str, folder: str) -> None:
    sampler = DistributedSampler(Numbers(96), shuffle=False)
    _write_result(folder, _iterated(LIBRARIES[library], DataLoader(Numbers(96), batch_size=8, sampler=sampler)))


def _gathered_results(library: str, folder: str) -> None:
    adapter = LIBRARIES[library]
    loader = adapter.loader(DataLoader(Numbers(101), batch_size=8))
    if library == "parallelize":
        gathered = adapter.gathered(loader, torch.cat(list(loader)))
    else:  # the others gather batch by batch
        gathered = torch.cat([adapter.gathered(loader, batch) for batch in loader])
    _write_result(folder, sorted(int(each) for each in gathered))


def _epoch_orders(library: str, folder: str) -> None:
    loader = LIBRARIES[library].loader(DataLoader(Numbers(96), batch_size=8, shuffle=True))
    next(iter(loader))  # takes only the first batch
    _write_result(folder, [[int(index) for batch in loader for index in batch] for _ in range(2)])


def _value(_library: str, _folder: str) -> torch.Tensor:
    return torch.arange(300_000)


def _fail(_library: str, folder: str) -> None:
    _write_result(folder, os.getpid())
    dist.barrier()
    if dist.get_rank() == 0:
        raise LookupError("the needle is lost")
    time.sleep(SLEEP_S)


def _stop(_library: str, _folder: str) -> None:
    answer = 42 + dist.get_rank()
    if dist.get_rank() == 1:
        breakpoint()
    assert answer


def _address() -> str:
    """Return this host's address, as the connection has it that reached it."""
    return os.environ["SSH_CONNECTION"].split()[2]


# In the caller


def _keeps_the_model(library: str) -> None:
    (same_class, has_attribute, same_keys), *_ = _results(library, _model_surface)
    assert same_class, "another class"
    assert has_attribute, "attributes of the model are gone"
    assert same_keys, "other state_dict keys"


def _never_diverges(library: str) -> None:
    (refused, first), (_, second) = _results(library, _bypass)
    assert not refused, f"is refused: {refused}"
    assert first == second, "the ranks train different weights, silently"


def _returns(library: str) -> None:
    value = LIBRARIES[library].call(2, _value, library, "")
    assert isinstance(value, torch.Tensor), f"returns {type(value).__name__}"
    assert torch.equal(value, torch.arange(300_000)), "another value"


def _is_called_from_a_string(library: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        function = f"import os\ndef train(*_): open(os.path.join({folder!r}, str(os.getpid())), 'w').close()\n"
        program = f"{LIBRARIES[library].snippet}\n{function}call(train)\n"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
        assert len(list(Path(folder).iterdir())) == 2, _exception_name(done.stderr)


def _raises_the_cause(library: str) -> None:
    raised: BaseException | None = None
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            LIBRARIES[library].call(2, _fail, library, folder)
        except BaseException as error:  # noqa: BLE001 - any exception of the library
            raised = error
        took_s = time.monotonic() - began
        sleeper = json.loads(Path(folder, "1.json").read_text())
    assert isinstance(raised, LookupError), f"{type(raised).__name__} in the caller"
    assert "the needle is lost" in str(raised), "without its message"
    assert not psutil.pid_exists(sleeper), "rank 1 is left"
    assert took_s < SLEEP_S / 2, "only when rank 1 has ended by itself"


def _changes_its_world(library: str) -> None:
    seen = [_results(library, _world_size, processes) for processes in (2, 3)]
    assert seen == [[2, 2], [3, 3, 3]], f"worlds of {seen}"


def _keeps_weights(library: str) -> None:
    first, second = _results(library, _weighted_draws)
    drawn = first + second
    assert all(index % 2 for index in drawn), "draws samples of weight 0"
    assert len(set(drawn)) == len(drawn), "the ranks draw the same samples"
    assert len(drawn) == 80, f"{len(drawn)} of 80 samples"


def _shards_a_stream(library: str) -> None:
    drawn = sorted(index for each in _results(library, _stream_draws) for index in each)
    assert drawn == list(range(96)), f"{len(drawn)} samples, {len(set(drawn))} of them different, of 96"


def _shards_once(library: str) -> None:
    drawn = sorted(index for each in _results(library, _distributed_draws) for index in each)
    assert drawn == list(range(96)), f"{len(drawn)} of 96 samples"


def _evaluates_exactly(library: str) -> None:
    first, *_ = _results(library, _gathered_results)
    assert first == list(range(101)), f"{len(first)} results for 101 samples"


def _shuffles_each_epoch(library: str) -> None:
    orders = _results(library, _epoch_orders)
    assert all(one != other for one, other in orders), "every epoch has the same order"
    for epoch in range(2):
        drawn = sorted(index for each in orders for index in each[epoch])
        assert drawn == list(range(96)), f"{len(set(drawn))} of 96 samples in an epoch"


def _stops_in_a_rank(library: str) -> None:
    """Run a program on a terminal, and type at the prompt of pdb as a user does."""
    program = f"import behaviours\nbehaviours.LIBRARIES[{library!r}].call(2, behaviours._stop, {library!r}, '')"
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        shown, typed = "", False
        with contextlib.suppress(OSError):  # the terminal is closed
            while select.select([ours], [], [], SLEEP_S)[0] and (text := os.read(ours, 4096).decode(errors="replace")):
                shown += text
                if not typed and "(Pdb" in shown:
                    os.write(ours, b"answer\ncontinue\n")
                    typed = True
        os.close(ours)
        process.kill()
    assert typed, "no prompt"
    assert "\n43" in shown.replace("\r", ""), "a prompt that cannot be answered"
    assert process.wait() == 0, "the call ends with an error"


def _reaches_hosts(library: str) -> None:
    """Call a function on two hosts, each a real sshd on an address of this machine."""
    on_hosts = LIBRARIES[library].on_hosts
    assert on_hosts is not None
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.wait()
            assert on_hosts(("gpu1", "gpu2"), hosts.config, _address) == ["127.0.0.1", "127.0.0.2"], "other hosts"
        finally:
            hosts.close()


def _exception_name(text: str) -> str:
    """Return the type of the exception at the end of a traceback."""
    last = (text.strip().splitlines() or ["nothing was run"])[-1]
    return f"fails: {last.partition(':')[0].rpartition('.')[2]}"


BEHAVIOURS = {
    "model": Behaviour(
        expectation="the model keeps its class, attributes and `state_dict` keys",
        check=_keeps_the_model,
        needs=("model",),
        test="tests/worlds/test_model_in_place.py::test_a_block_leaves_the_model_to_the_user",
    ),
    "bypass": Behaviour(
        expectation="`model.encoder(x)` trains alike on all ranks",
        check=_never_diverges,
        needs=("model",),
        test="tests/worlds/test_averaging.py::test_every_program_equals_one_process",
    ),
    "value": Behaviour(
        expectation="a call returns the function's value, a tensor of 2 MB",
        check=_returns,
        test="tests/worlds/test_launch_values.py::test_a_hundred_megabytes_there_and_back",
    ),
    "string": Behaviour(
        expectation="a function of `python -c` can be called",
        check=_is_called_from_a_string,
        test="tests/worlds/test_launch_anywhere.py::test_a_script_without_name_main",
    ),
    "cause": Behaviour(
        expectation="what rank 0 raises is raised in the caller at once, and nothing is left",
        check=_raises_the_cause,
        test="tests/worlds/test_launch_failure.py::test_one_exception_says_which_rank_failed_and_how",
    ),
    "worlds": Behaviour(
        expectation="a second call may have another number of processes",
        check=_changes_its_world,
        test="tests/worlds/test_launch_again.py::test_calls_with_different_numbers_of_processes",
    ),
    "weighted": Behaviour(
        expectation="a weighted sampler draws once for all ranks, however they are seeded",
        check=_keeps_weights,
        needs=("loader",),
        test="tests/unit/data/test_every_sample.py::test_all_ranks_together_read_what_the_tail_says",
    ),
    "stream": Behaviour(
        expectation="an `IterableDataset` is divided, each sample once",
        check=_shards_a_stream,
        needs=("loader",),
        test="tests/unit/data/test_streams.py::test_samples_of_iterable_datasets",
    ),
    "divided": Behaviour(
        expectation="a loader with a `DistributedSampler` is not divided twice",
        check=_shards_once,
        needs=("loader",),
        test="tests/unit/data/test_every_sample.py::test_a_pre_sharded_loader_is_read_as_its_sampler_says",
    ),
    "evaluation": Behaviour(
        expectation="gathered results: one per sample, of 101 samples",
        check=_evaluates_exactly,
        needs=("loader", "gathered"),
        test="tests/worlds/test_data_training.py::test_results_come_back_in_dataset_order",
    ),
    "epochs": Behaviour(
        expectation="epochs are shuffled anew without `set_epoch`",
        check=_shuffles_each_epoch,
        needs=("loader",),
        test="tests/unit/data/test_shard_loader.py::test_each_iterator_is_the_next_epoch",
    ),
    "debugger": Behaviour(
        expectation="`breakpoint()` in rank 1 stops at a prompt on the caller's terminal",
        check=_stops_in_a_rank,
        test="tests/worlds/test_debugger.py::test_ranks_are_debugged_one_after_the_other",
    ),
    "hosts": Behaviour(
        expectation="a call runs on two hosts, by the names that `ssh` has for them",
        check=_reaches_hosts,
        needs=("on_hosts",),
        test="tests/ssh/test_hosts.py::test_a_call_runs_on_both_hosts_as_in_one_process",
    ),
}
