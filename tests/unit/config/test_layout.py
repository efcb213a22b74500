"""Which processes run where, for every request on every machine in every world."""

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

from parallelize.cluster.devices import Gpus, Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout, lay_out
from parallelize.errors import ConfigError
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Backend

CPU = Hardware()
FOUR = Hardware("cuda", 4)
MAC = Hardware("mps", 1)


@dataclass(frozen=True, kw_only=True)
class Threads(Backend):
    """As dp: one process drives all devices of its node; on more nodes ddp takes over; no Apex."""

    name = "threads"
    process_per = "node"
    max_nodes = 1
    single_node_of = "ddp"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    def engine(self, inner, *, world, devices):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PerNode(Threads):
    """As ddp2: one process drives all devices of its node, on any number of nodes."""

    name = "pernode"
    max_nodes = None
    single_node_of = None
    device_types = frozenset({"cuda"})


def placed(local_world_size, *, nodes=1, **changes):
    """A process that a launcher has placed on equal nodes."""
    size = local_world_size * nodes
    return World(**{"world_size": size, "local_world_size": local_world_size, "num_nodes": nodes, **changes})


def devices(layout):
    """The devices of a layout as text, by local rank."""
    return [" ".join(map(str, driven)) for driven in layout.devices]


def faults_of(options, machine, world=None):
    """The faults of a request on a machine."""
    with pytest.raises(ConfigError) as caught:
        lay_out(Config.parse(**options), machine, world)
    return caught.value.faults


@pytest.mark.parametrize(
    ("options", "machine", "world", "expected"),
    [
        # Nobody has placed this process: the request decides.
        ({}, CPU, None, ["cpu"]),
        ({"processes": 3}, CPU, None, ["cpu"] * 3),
        ({}, FOUR, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": 1}, FOUR, None, ["cuda:0"]),
        ({"gpus": 2}, FOUR, None, ["cuda:0", "cuda:1"]),
        ({"gpus": [3, 1]}, FOUR, None, ["cuda:3", "cuda:1"]),
        ({"gpus": "auto"}, FOUR, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": "auto"}, CPU, None, ["cpu"]),
        ({"gpus": 0}, FOUR, None, ["cpu"]),
        ({"gpus": 0, "processes": 2}, FOUR, None, ["cpu"] * 2),
        ({"processes": 2}, FOUR, None, ["cpu"] * 2),
        ({"backend": Threads()}, FOUR, None, ["cuda:0 cuda:1 cuda:2 cuda:3"]),
        ({"backend": Threads(), "gpus": [2, 0]}, FOUR, None, ["cuda:2 cuda:0"]),
        ({"backend": Threads()}, CPU, None, ["cpu"]),
        ({}, MAC, None, ["mps:0"]),
        ({"backend": Threads()}, MAC, None, ["mps:0"]),
        # A launcher has placed this process: it decides what the request leaves open.
        ({}, CPU, placed(2), ["cpu"] * 2),
        ({}, FOUR, placed(2), ["cuda:0", "cuda:1"]),
        ({"gpus": 2}, FOUR, placed(2), ["cuda:0", "cuda:1"]),
        ({"gpus": [1, 3]}, FOUR, placed(2, nodes=2), ["cuda:1", "cuda:3"]),
        ({"gpus": 0}, FOUR, placed(3), ["cpu"] * 3),
        ({"backend": PerNode()}, FOUR, placed(1, nodes=2), ["cuda:0 cuda:1 cuda:2 cuda:3"]),
        # srun --gpus-per-task=1: each task sees one GPU, as number 0.
        ({}, Hardware("cuda", 1), placed(4), ["cuda:0"] * 4),
        ({"gpus": 4}, Hardware("cuda", 1), placed(4), ["cuda:0"] * 4),
        ({"gpus": "auto"}, Hardware("cuda", 1), placed(4), ["cuda:0"] * 4),
        ({"gpus": [2, 3]}, Hardware("cuda", 1), placed(2), ["cuda:0"] * 2),
    ],
)
def test_devices(options, machine, world, expected):
    """Each local rank drives the devices that the request, the machine and the world mean together."""
    assert devices(lay_out(Config.parse(**options), machine, world)) == expected


@pytest.mark.parametrize(
    ("options", "machine", "world", "what", "why", "fix"),
    [
        (
            {"gpus": 4},
            CPU,
            None,
            "gpus=4",
            "this machine has no GPU that torch can use",
            "use processes=2 to run on the CPU",
        ),
        (
            {"gpus": [0, 7, 9]},
            FOUR,
            None,
            "gpus=[0, 7, 9]",
            "this process sees 4 GPU(s), numbered from 0; there is no 7, 9",
            "use gpus=4, or check CUDA_VISIBLE_DEVICES",
        ),
        (
            {"gpus": 8},
            FOUR,
            None,
            "gpus=8",
            "this process sees 4 GPU(s), numbered from 0; there is no 4 to 7",
            "use gpus=4, or check CUDA_VISIBLE_DEVICES",
        ),
        (
            {"gpus": 2},
            FOUR,
            placed(4),
            "processes per node: 2 asked for, 4 started",
            "a launcher has placed this process as rank 0 of 4, with 4 on this node",
            "start 2 per node, or use gpus=4",
        ),
        (
            {"processes": 8},
            CPU,
            placed(4),
            "processes per node: 8 asked for, 4 started",
            "a launcher has placed this process as rank 0 of 4, with 4 on this node",
            "start 8 per node, or use processes=4",
        ),
        (
            {"gpus": 2},
            Hardware("cuda", 1),
            placed(4),
            "processes per node: 2 asked for, 4 started",
            "a launcher has placed this process as rank 0 of 4, with 4 on this node",
            "start 2 per node, or use gpus=4",
        ),
        (
            {"num_nodes": 3},
            FOUR,
            placed(4, nodes=2, rank=5, local_rank=1, node_rank=1),
            "nodes: 3 asked for, 2 started",
            "a launcher has placed this process as rank 5 of 8, on node 1",
            "start it on 3 node(s), or leave num_nodes= out",
        ),
        (
            {"backend": Threads()},
            FOUR,
            placed(2),
            "processes per node: 1 asked for, 2 started",
            "a launcher has placed this process as rank 0 of 2, with 2 on this node",
            "start 1 per node, or use backend='",
        ),
        (
            {},
            Hardware("cuda", 2),
            placed(4),
            "4 processes on this node, 2 GPU(s)",
            "a launcher has placed more processes here than there are GPUs, and each needs its own",
            "start 2 per node, or use gpus=0 to run on the CPU",
        ),
        (
            {"backend": PerNode()},
            CPU,
            None,
            "backend='pernode' on cpu",
            "it runs on: cuda",
            "use backend='",
        ),
        (
            {},
            Hardware("xpu", 1),
            None,
            "backend='ddp' on xpu",
            "it runs on: cpu, cuda",
            "use processes=1 to run on the CPU",
        ),
        (
            {"num_nodes": 2},
            MAC,
            None,
            "2 processes on mps",
            "torch has no collectives on mps: one process runs there alone",
            "use processes=2 to run on the CPU",
        ),
        (
            {"amp": "fp16"},
            CPU,
            None,
            "amp='fp16' on cpu",
            "native computes on cpu in: bf16",
            "use amp='bf16', or amp=False on cpu",
        ),
        (
            {"process_group_backend": "nccl"},
            CPU,
            None,
            "process_group_backend='nccl' on cpu",
            "it carries tensors of: cuda",
            "leave it out (the device decides), or use 'gloo'",
        ),
        (
            {"process_group_backend": "cpu:gloo"},
            FOUR,
            None,
            "process_group_backend='cpu:gloo' on cuda",
            "it carries tensors of: cpu",
            "leave it out (the device decides), or use 'gloo'",
        ),
    ],
)
def test_refused(options, machine, world, what, why, fix):
    """What does not fit the machine or the world is refused, with both numbers and the fix."""
    (fault,) = faults_of(options, machine, world)
    assert (fault.what, fault.why) == (what, why)
    assert fault.fix.startswith(fix)


def test_amp_where_the_engine_does_not_run():
    """A device type that a precision engine does not declare is refused."""
    (fault,) = faults_of({"amp": True}, MAC)
    assert fault.what == "amp_engine='native' on mps"
    assert fault.why.startswith("it runs on: ")
    assert fault.fix == "use amp=False on mps, or another amp_engine"


def test_every_fault_is_named():
    """One error holds what does not fit the machine and what does not fit the world."""
    whats = [fault.what for fault in faults_of({"gpus": 8, "num_nodes": 3}, FOUR, placed(4))]
    assert whats == ["gpus=8", "processes per node: 8 asked for, 4 started", "nodes: 3 asked for, 1 started"]


def test_a_missing_gpu_is_the_only_fault():
    """Where the GPUs are missing, what the CPU could not do instead is not counted against the request."""
    (fault,) = faults_of({"gpus": 4, "amp": "fp16", "process_group_backend": "nccl"}, CPU)
    assert fault.what == "gpus=4"


@pytest.mark.parametrize("world", [None, placed(4, nodes=2)])
def test_more_nodes_than_the_backend_spans(world):
    """More nodes turn a backend into the one it declares; a warning says what was done and what silences it."""
    options = {"backend": Threads(), "gpus": 4} | ({} if world else {"num_nodes": 2})
    layout = lay_out(Config.parse(**options), FOUR, world)
    assert layout.config.backend == registry.get("backends", "ddp")()
    assert layout.warnings == (
        "backend='threads' cannot leave its node: num_nodes=2 runs under 'ddp'. Say backend='ddp' to silence this.",
    )
    assert devices(layout) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert not lay_out(Config.parse(**{**options, "backend": "ddp"}), FOUR, world).warnings


def test_more_nodes_than_a_backend_without_a_successor_spans():
    """Where no other backend takes over, a launcher's nodes are refused as the request's own are."""
    backend = Threads()
    object.__setattr__(backend, "single_node_of", None)
    (fault,) = faults_of({"backend": backend}, FOUR, placed(1, nodes=2))
    assert fault.what == "backend='threads' with num_nodes=2"
    assert fault.fix.startswith("use num_nodes=1, or backend='")


def test_auto_without_gpus():
    """gpus='auto' is whatever there is: without any it runs on the CPU, says so, and says what silences it."""
    layout = lay_out(Config.parse(gpus="auto"), CPU)
    assert layout.warnings == ("gpus='auto' finds no GPU here: running on the CPU. Say processes=1 to silence this.",)
    assert not lay_out(Config.parse(processes=1), CPU).warnings
    assert not lay_out(Config.parse(), CPU).warnings


def test_shared_gpus():
    """Ranks that share a GPU, for tests, are warned about, and masked to one visible device."""
    layout = lay_out(Config.parse(gpus=[2, 2], process_group_backend="gloo"), FOUR)
    assert layout.warnings == ("gpus=[2, 2] shares a GPU between ranks: good for tests, not for speed.",)
    assert devices(layout) == ["cuda:2", "cuda:2"]
    assert layout.indices == (2,)
    assert devices(layout.masked()) == ["cuda:0", "cuda:0"]


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
    """Collectives are carried as asked, else by device; CPU tensors always have a carrier then."""
    assert lay_out(Config.parse(**options), machine).process_group_backend == backend


@pytest.mark.parametrize(("rank", "local_rank", "node_rank", "local_world_size"), [(0, 0, 0, 2), (2, 0, 1, 1)])
def test_unequal_nodes(rank, local_rank, node_rank, local_world_size):
    """On nodes of different sizes the world's size is the launcher's, and each node drives its own devices."""
    world = World(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=3,
        local_world_size=local_world_size,
        num_nodes=2,
    )
    layout = lay_out(Config.parse(num_nodes=2), FOUR, world)
    assert (layout.world_size, layout.num_nodes, layout.local_world_size) == (3, 2, local_world_size)
    assert len(layout.devices) == local_world_size


# What the seeds promise, in their words: 1 GPU; 1 GPU 16-bit; dp; ddp; ddp 16-bit; several nodes are ddp.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpus": [0]}, ["cuda:0"]),
        ({"gpus": [0], "amp": True}, ["cuda:0"]),
        ({"gpus": [0], "amp": "O2"}, ["cuda:0"]),
        ({"gpus": [0, 1], "backend": Threads()}, ["cuda:0 cuda:1"]),
        ({"gpus": [0, 1], "backend": "ddp"}, ["cuda:0", "cuda:1"]),
        ({"gpus": [0, 1], "backend": "ddp", "amp": True}, ["cuda:0", "cuda:1"]),
        ({"gpus": 4, "backend": "ddp", "num_nodes": 4}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": 4, "backend": PerNode(), "num_nodes": 4}, ["cuda:0 cuda:1 cuda:2 cuda:3"]),
    ],
)
def test_seed_era_support(options, expected):
    """Every configuration that the seeds' table supports is accepted."""
    assert devices(lay_out(Config.parse(**options), FOUR)) == expected


known = {name: registry.get("backends", name) for name in registry.names("backends")}


@pytest.mark.skipif("dp" not in known, reason="no dp backend")
def test_dp():
    """The seeds' dp: one process, no Apex, and ddp on several nodes."""
    layout = lay_out(Config.parse(backend="dp", gpus=2, amp=True), FOUR)
    assert devices(layout) == ["cuda:0 cuda:1"]
    assert lay_out(Config.parse(backend="dp", gpus=2, num_nodes=2), FOUR).config.backend.name == "ddp"
    if "apex" in registry.names("precision"):
        with pytest.raises(ConfigError) as caught:
            Config.parse(backend="dp", gpus=2, amp=True, amp_engine="apex")
        (fault,) = caught.value.faults
        assert fault.what == "backend='dp' with amp_engine='apex'"
        assert fault.fix.startswith("use amp_engine='native', or backend='ddp'")


@pytest.mark.skipif("ddp2" not in known, reason="no ddp2 backend")
def test_ddp2():
    """The seeds' ddp2: one process per node; a level or an engine that it does not declare is refused."""
    assert devices(lay_out(Config.parse(backend="ddp2", gpus=2, num_nodes=4), FOUR)) == ["cuda:0 cuda:1"]
    for engine, levels in known["ddp2"].amp.items():
        for level in set(LEVELS) - levels:
            with pytest.raises(ConfigError) as caught:
                Config.parse(backend="ddp2", gpus=2, amp=level, amp_engine=engine)
            assert f"backend='ddp2' with amp={level!r}" in [fault.what for fault in caught.value.faults]
    for engine in set(registry.names("precision")) - set(known["ddp2"].amp):
        with pytest.raises(ConfigError) as caught:
            Config.parse(backend="ddp2", gpus=2, amp=True, amp_engine=engine)
        assert f"backend='ddp2' with amp_engine={engine!r}" in [fault.what for fault in caught.value.faults]


backend_values = st.sampled_from([*known, Threads(), PerNode()])


@given(option_sets(), backend_values, hardware, st.none() | worlds())
def test_any_request_anywhere(options, backend, machine, world):
    """A request either fits, with one place per process on devices that are there, or is refused with every reason."""
    faults, layout = (), None
    try:
        config = Config.parse(**{**options, "backend": backend})
        layout = lay_out(config, machine, world)
    except ConfigError as error:
        faults = error.faults
    assert all(fault.what and fault.why and fault.fix for fault in faults)
    if layout is not None:
        check(layout, config, machine, world)


def check(layout: Layout, config: Config, machine: Hardware, world: World | None) -> None:
    """What holds for every layout."""
    assert len(layout.devices) == layout.local_world_size >= 1
    assert all(layout.devices)
    assert {device.type for driven in layout.devices for device in driven} == {layout.device_type}
    assert layout.device_type in ("cpu", machine.device_type)
    assert all(index < machine.count for index in layout.indices)
    assert bool(layout.warnings) == (
        layout.config != config
        or (config.gpus == Gpus.ALL and machine.count == 0)
        or (config.gpus is not None and config.gpus.has_duplicates)
    )
    if config.num_nodes is not None:
        assert layout.num_nodes == config.num_nodes
    if world is None:
        assert layout.world_size == layout.num_nodes * layout.local_world_size
    else:
        assert (layout.world_size, layout.num_nodes) == (world.world_size, world.num_nodes)
        assert layout.local_world_size == world.local_world_size > world.local_rank
    masked = layout.masked()
    assert masked.indices == tuple(range(len(layout.indices)))
    assert masked.masked() == masked
    assert dataclasses.replace(masked, devices=layout.devices) == layout
    for before, after in zip(layout.devices, masked.devices, strict=True):
        if layout.device_type == "cpu":
            assert after == before
        else:
            assert [layout.indices[device.index] for device in after] == [device.index for device in before]
            assert all(isinstance(device, torch.device) for device in after)
