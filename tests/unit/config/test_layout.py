"""Processes and devices of a request, by hardware and launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import hardware, option_sets, worlds

from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.cluster.devices import MASKS, Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.config.options import ALL_GPUS
from parallelize.errors import ConfigError
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Backend

CPU = Hardware()
FOUR = Hardware("cuda", 4)


MAC = Hardware("mps", 1)
ONE = Hardware("cuda", 1)  # as each task of srun --gpus-per-task=1 sees it
ALL = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
TWO = Hardware("cuda", 2)
XPU = Hardware("xpu", 4)
PER_NODE = "processes per node:"
AUTO = {"gpus": "auto", "processes": 3}
DP, DDP2 = {"backend": "dp"}, {"backend": "ddp2"}  # one process drives all devices of its node


@dataclass(frozen=True, kw_only=True)
class OnGPUs(Backend):
    """Needs GPUs, drives all of a node from one process, and runs on one node only."""

    name = "on_gpus"
    process_per = "node"
    max_nodes = 1
    device_types = frozenset({"cuda"})
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    def engine(self, inner, *, world, devices):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OnXPUs(OnGPUs):
    name = "on_xpus"
    process_per = "device"
    device_types = frozenset({"xpu"})


def launched(local_world_size, *, nodes=1, **changes):
    """Return the World of a process that a launcher has started, on nodes of equal size."""
    size = local_world_size * nodes
    return World(**{"world_size": size, "local_world_size": local_world_size, "num_nodes": nodes, **changes})


def devices(layout):
    """Return the devices of a layout as text, by local rank."""
    return [" ".join(map(str, driven)) for driven in layout.devices]


def faults_of(options, machine, world=None):
    """Return the faults of a request on a machine."""
    with pytest.raises(ConfigError) as caught:
        compute_layout(Config.parse(**options), machine, world)
    return caught.value.faults


@pytest.mark.parametrize(
    ("options", "machine", "world", "expected"),
    [
        # No launcher: only the request and the machine matter.
        ({}, CPU, None, ["cpu"]),
        ({"processes": 3}, CPU, None, ["cpu"] * 3),
        ({}, FOUR, None, ALL),
        ({"gpus": 2}, FOUR, None, ["cuda:0", "cuda:1"]),
        ({"gpus": [3, 1]}, FOUR, None, ["cuda:3", "cuda:1"]),
        ({"gpus": "auto"}, FOUR, None, ALL),
        ({"gpus": "auto"}, CPU, None, ["cpu"]),
        (AUTO, FOUR, None, ALL),
        (AUTO, CPU, None, ["cpu"] * 3),
        (AUTO, FOUR, launched(4), ALL),
        (AUTO, CPU, launched(3), ["cpu"] * 3),
        (AUTO | DP, FOUR, None, [" ".join(ALL)]),
        ({"gpus": 0}, FOUR, None, ["cpu"]),
        ({"gpus": 0, "processes": 2}, FOUR, None, ["cpu"] * 2),
        ({"processes": 2}, FOUR, None, ["cpu"] * 2),
        (DP, FOUR, None, [" ".join(ALL)]),
        (DP | {"gpus": [2, 0]}, FOUR, None, ["cuda:2 cuda:0"]),
        (DP, CPU, None, ["cpu"]),
        ({}, MAC, None, ["mps:0"]),
        (DP, MAC, None, ["mps:0"]),
        (DDP2 | {"gpus": 2, "num_nodes": 4}, FOUR, None, ["cuda:0 cuda:1"]),
        # Started by a launcher: its numbers apply where the request leaves them open.
        ({}, CPU, launched(2), ["cpu"] * 2),
        ({}, FOUR, launched(2), ["cuda:0", "cuda:1"]),
        ({"gpus": 2}, FOUR, launched(2), ["cuda:0", "cuda:1"]),
        ({"gpus": [1, 3]}, FOUR, launched(2, nodes=2), ["cuda:1", "cuda:3"]),
        ({"gpus": 0}, FOUR, launched(3), ["cpu"] * 3),
        (DDP2, FOUR, launched(1, nodes=2), [" ".join(ALL)]),
        ({}, ONE, launched(4), ["cuda:0"] * 4),
        ({"gpus": 4}, ONE, launched(4), ["cuda:0"] * 4),
        ({"gpus": "auto"}, ONE, launched(4), ["cuda:0"] * 4),
        ({"gpus": [2, 3]}, ONE, launched(2), ["cuda:0"] * 2),
    ],
)
def test_devices(options, machine, world, expected):
    """Each local rank has the devices that follow from the request, the machine and the launcher."""
    assert devices(compute_layout(Config.parse(**options), machine, world)) == expected


@pytest.mark.parametrize(
    ("options", "machine", "world", "what", "why", "fix"),
    [
        ({"gpus": 4}, CPU, None, "gpus=4", "this machine has no GPU", "use processes=2 to run on the CPU"),
        ({"gpus": [0, 7, 9]}, FOUR, None, "gpus=[0, 7, 9]", "the first that is missing: 7", "use gpus=4"),
        ({"gpus": [3]}, ONE, launched(1), "gpus=[3]", "this process sees 1 GPU(s)", "use gpus=1"),
        ({"gpus": 8}, FOUR, None, "gpus=8", "the first that is missing: 4", "or check CUDA_VISIBLE"),
        ({"gpus": 2}, FOUR, launched(4), f"{PER_NODE} 2 asked for, 4 started", "with 4 on this node", "start 2 per"),
        ({"processes": 8}, CPU, launched(4), f"{PER_NODE} 8 asked for, 4 started", "rank 0 of 4", "or use processes=4"),
        ({"gpus": 2}, ONE, launched(4), f"{PER_NODE} 2 asked for, 4 started", "rank 0 of 4", "or use gpus=4"),
        (DP, FOUR, launched(2), f"{PER_NODE} 1 asked for, 2 started", "rank 0 of 2", "use backend='auto' or 'ddp'"),
        (
            {"num_nodes": 3},
            FOUR,
            launched(4, nodes=2, rank=5, local_rank=1, node_rank=1),
            "nodes: 3 asked for, 2 started",
            "rank 5 of 8, on node 1",
            "start it on 3 node(s) (Slurm: --nodes=3), or omit num_nodes=",
        ),
        ({}, TWO, launched(4), "4 processes on this node, 2 GPU(s)", "more processes here than", "start 2 per node"),
        (AUTO | DP, CPU, None, "backend='dp' with processes=3", "one process", "use processes=1, or backend="),
        ({"backend": OnGPUs()}, CPU, None, "backend='on_gpus' on cpu", "it runs on: cuda", "use backend='"),
        ({"backend": OnGPUs()}, XPU, None, "backend='on_gpus' on xpu", "it runs on: cuda", "use a backend of your own"),
        ({"num_nodes": 2}, MAC, None, "2 processes on mps", "torch has no collectives on mps", "use processes=2"),
        ({"amp": "fp16"}, CPU, None, "amp='fp16' on cpu", "native computes on cpu in: bf16", "use amp='bf16'"),
        ({"amp": True}, MAC, None, "amp='O1' on mps", "native computes on mps in: fp32", "use another amp_engine"),
        ({"process_group_backend": "nccl"}, CPU, None, "process_group_backend='nccl' on cpu", ": cuda", "'gloo'"),
        (
            {"process_group_backend": "cpu:gloo"},
            FOUR,
            None,
            "process_group_backend='cpu:gloo' on cuda",
            ": cpu",
            "omit",
        ),
        # Without a fallback, too many nodes of a launcher are refused, as too many requested nodes are.
        (
            {"backend": OnGPUs()},
            FOUR,
            launched(1, nodes=2),
            "backend='on_gpus' with num_nodes=2",
            "at most 1 node",
            "use num_nodes=1, or backend='",
        ),
        # A request with missing GPUs is not also checked for the CPU.
        ({"gpus": 4, "amp": "fp16", "process_group_backend": "nccl"}, CPU, None, "gpus=4", "no GPU", "use processes=2"),
    ],
)
def test_refused(options, machine, world, what, why, fix):
    """A request that does not fit the machine or the launcher is refused, with both numbers and the fix."""
    (fault,) = faults_of(options, machine, world)
    assert fault.what == what
    assert why in fault.why
    assert fix in fault.fix


def test_every_fault_is_named():
    """One error lists the mismatches with the machine and with the launcher."""
    whats = [fault.what for fault in faults_of({"gpus": 8, "num_nodes": 3}, FOUR, launched(4))]
    assert whats == ["gpus=8", "processes per node: 8 asked for, 4 started", "nodes: 3 asked for, 1 started"]


@pytest.mark.parametrize("world", [None, launched(4, nodes=2)])
def test_multi_node_fallback(world):
    """On too many nodes, the declared fallback is used, with a warning that can be silenced as it describes."""
    options = {"gpus": 4} | ({} if world else {"num_nodes": 2})
    layout = compute_layout(Config.parse(**options, backend="dp"), FOUR, world)
    assert layout.config.backend == registry.find("backends", "ddp")()
    assert layout.warnings == (
        "backend='dp' runs on at most 1 node(s): num_nodes=2 uses 'ddp'. Use backend='ddp' to silence this.",
    )
    assert devices(layout) == ALL
    assert not compute_layout(Config.parse(**options, backend="ddp"), FOUR, world).warnings


def test_auto_without_gpus():
    """On a machine without GPUs, gpus='auto' runs on the CPU, with a warning that can be silenced as it describes."""
    layout = compute_layout(Config.parse(gpus="auto"), CPU)
    assert layout.warnings == ("gpus='auto' finds no GPU here: running on the CPU. Use processes=1 to silence this.",)
    for options in ({"processes": 1}, {"gpus": "auto", "processes": 1}, {}):
        assert not compute_layout(Config.parse(**options), CPU).warnings


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "dp"},
        {"backend": "ddp2", "num_nodes": 2},
        {"backend": "dp", "process_group_backend": "nccl"},
        {"process_group_backend": "cpu:gloo,cuda:gloo"},
    ],
)
def test_a_gpu_named_twice_without_nccl_between_ranks_of_it(options):
    """NCCL refuses two ranks on one GPU: one process that drives it twice, or another library, is no fault."""
    layout = compute_layout(Config.parse(**options, gpus=[2, 2]), FOUR)
    assert [str(each) for driven in layout.devices for each in driven] == ["cuda:2", "cuda:2"]


def test_devices_without_a_mask_keep_their_indices():
    """No variable hides XPUs from workers, which therefore see those of the caller, under the same indices."""
    layout = compute_layout(Config.parse(backend=OnXPUs(), gpus=[3, 1]), XPU)
    assert devices(layout) == devices(layout.renumbered()) == ["xpu:3", "xpu:1"]


@pytest.mark.parametrize("kind", ["xpu", "hpu"])
@pytest.mark.parametrize("backend", registry.names("backends"))
def test_an_unsupported_accelerator_is_named(kind, backend):
    """The error says which devices the backend supports; the CPU beside the accelerator can be used."""
    (fault,) = faults_of({"backend": backend}, Hardware(kind, 2))
    assert fault.what == f"backend={backend!r} on {kind}"
    assert fault.why == "it runs on: cpu, cuda"
    assert fault.fix == "use processes=1 to run on the CPU"
    assert devices(compute_layout(Config.parse(backend=backend, processes=1), Hardware(kind, 2))) == ["cpu"]


def test_devices_that_the_backend_names():
    """Without gpus=, a process drives only these, and workers that see only these get their names there."""
    backend = BalancedBackend(devices=("cuda:3", "cpu", "cuda:1"))
    layout = compute_layout(Config.parse(backend=backend), FOUR)
    assert layout.devices == ((torch.device("cuda:1"), torch.device("cuda:3")),)
    renumbered = layout.renumbered()
    assert renumbered.config.backend.devices == ("cuda:1", "cpu", "cuda:0")
    assert renumbered.renumbered() == renumbered
    chosen = compute_layout(Config.parse(backend=backend, gpus=[2, 3]), FOUR)
    assert chosen.devices == ((torch.device("cuda:2"), torch.device("cuda:3")),)
    assert compute_layout(Config.parse(backend=BalancedBackend(devices=("cpu",))), FOUR).indices == (0, 1, 2, 3)


def test_devices_of_each_process():
    """devices_per_process= makes as many processes as fit; devices that are left over are refused."""
    backend = BalancedBackend(devices_per_process=2)
    assert devices(compute_layout(Config.parse(backend=backend), FOUR)) == ["cuda:0 cuda:1", "cuda:2 cuda:3"]
    (fault,) = faults_of({"backend": backend, "gpus": 3}, FOUR)
    assert fault.what == "devices_per_process=2 with 3 devices"
    assert compute_layout(Config.parse(backend=backend, processes=3), FOUR).local_world_size == 3


def test_shared_gpus():
    """Several ranks on one GPU give a warning, and see a single device."""
    layout = compute_layout(Config.parse(gpus=[2, 2], process_group_backend="gloo"), FOUR)
    assert layout.warnings == ("gpus=[2, 2] names a GPU more than once: useful for tests, but slow.",)
    assert devices(layout) == ["cuda:2", "cuda:2"]
    assert layout.indices == (2,)
    assert devices(layout.renumbered()) == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize(
    ("options", "machine", "backend"),
    [
        ({}, CPU, "gloo"),
        ({}, FOUR, "cpu:gloo,cuda:nccl"),
        ({}, MAC, "gloo"),
        ({"gpus": 0}, FOUR, "gloo"),
        ({"process_group_backend": "gloo"}, FOUR, "gloo"),
        ({"process_group_backend": "nccl"}, FOUR, "nccl"),
    ],
)
def test_process_group_backend(options, machine, backend):
    """The collectives' backend is the requested one, else chosen by device with gloo for CPU tensors."""
    assert compute_layout(Config.parse(**options), machine).process_group_backend == backend


@pytest.mark.parametrize(("rank", "node_rank", "processes"), [(0, 0, 2), (2, 1, 1)])
def test_unequal_nodes(rank, node_rank, processes):
    """On nodes of different sizes the world size is the launcher's, and each node has its own devices."""
    world = World(rank=rank, node_rank=node_rank, world_size=3, local_world_size=processes, num_nodes=2)
    layout = compute_layout(Config.parse(num_nodes=2), FOUR, world)
    assert (layout.world_size, layout.num_nodes, layout.local_world_size) == (3, 2, processes)
    assert devices(layout) == ALL[:processes]


backend_values = st.sampled_from([*registry.names("backends"), OnGPUs(), OnXPUs()])


@given(option_sets(), backend_values, hardware, st.none() | worlds())
def test_any_request_anywhere(options, backend, machine, world):
    """A request either gives a layout on existing devices, or is refused with all reasons."""
    try:
        config = Config.parse(**options, backend=backend)
        layout = compute_layout(config, machine, world)
    except ConfigError as error:
        for fault in error.faults:
            assert all((fault.what, fault.why, fault.fix))
        return
    if config.gpus == ALL_GPUS and config.processes is not None:  # all GPUs, or else these processes
        config = config.changed(**({"gpus": None} if layout.device_type == "cpu" else {"processes": None}))
    assert all(layout.devices)
    assert {device.type for driven in layout.devices for device in driven} == {layout.device_type}
    assert layout.device_type in ("cpu", machine.device_type)
    assert all(index < machine.count for index in layout.indices)
    assert bool(layout.warnings) == (
        layout.config != config
        or (config.gpus == ALL_GPUS and machine.count == 0)
        or (isinstance(config.gpus, tuple) and len(set(config.gpus)) < len(config.gpus))
    )
    assert layout.num_nodes == (config.num_nodes or layout.num_nodes)
    if world is None:
        assert layout.world_size == layout.num_nodes * layout.local_world_size >= 1
    else:
        assert (layout.world_size, layout.num_nodes) == (world.world_size, world.num_nodes)
        assert layout.local_world_size == world.local_world_size > world.local_rank
    renumbered = layout.renumbered()
    assert renumbered.renumbered() == renumbered
    assert dataclasses.replace(renumbered, config=layout.config, devices=layout.devices) == layout
    if layout.device_type in MASKS:
        assert renumbered.indices == tuple(range(len(layout.indices)))
        for before, after in zip(layout.devices, renumbered.devices, strict=True):
            assert [layout.indices[device.index] for device in after] == [device.index for device in before]
    else:
        assert renumbered == layout


@pytest.mark.parametrize("gpus", [[1, 0], [2, 3], [3, 1], [1, 1], [2, 0, 2]])
def test_a_block_in_a_worker_finds_the_devices_of_the_worker(gpus: list[int]) -> None:
    """A block with options of its own reads the request again, in a process that sees only the requested GPUs."""
    config = Config.parse(gpus=gpus, process_group_backend="gloo")  # NCCL refuses two ranks on one GPU
    inside = compute_layout(config, Hardware("cuda", 4)).renumbered()
    world = World(rank=0, local_rank=0, world_size=len(gpus), local_world_size=len(gpus))
    again = compute_layout(inside.config.changed(amp="bf16"), Hardware("cuda", len(set(gpus))), world)
    assert again.devices == inside.devices
