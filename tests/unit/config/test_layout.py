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
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout, compute_layout
from parallelize.config.options import ALL_GPUS
from parallelize.errors import ConfigError
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Backend

CPU = Hardware()
FOUR = Hardware("cuda", 4)
MAC = Hardware("mps", 1)


@dataclass(frozen=True, kw_only=True)
class Threads(Backend):
    """Like dp: one process drives all devices of its node, several nodes use ddp, and Apex is not supported."""

    name = "threads"
    process_per = "node"
    max_nodes = 1
    multi_node_fallback = "ddp"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    def engine(self, inner, *, world, devices):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PerNode(Threads):
    """Like ddp2: one process drives all devices of its node, on any number of nodes."""

    name = "pernode"
    max_nodes = None
    multi_node_fallback = None
    device_types = frozenset({"cuda"})


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
        ({}, FOUR, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": 1}, FOUR, None, ["cuda:0"]),
        ({"gpus": 2}, FOUR, None, ["cuda:0", "cuda:1"]),
        ({"gpus": [3, 1]}, FOUR, None, ["cuda:3", "cuda:1"]),
        ({"gpus": "auto"}, FOUR, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": "auto"}, CPU, None, ["cpu"]),
        ({"gpus": "auto", "processes": 3}, FOUR, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": "auto", "processes": 3}, CPU, None, ["cpu"] * 3),
        ({"gpus": "auto", "processes": 3}, FOUR, launched(4), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": "auto", "processes": 3}, CPU, launched(3), ["cpu"] * 3),
        ({"gpus": "auto", "processes": 3, "backend": Threads()}, FOUR, None, ["cuda:0 cuda:1 cuda:2 cuda:3"]),
        ({"gpus": 0}, FOUR, None, ["cpu"]),
        ({"gpus": 0, "processes": 2}, FOUR, None, ["cpu"] * 2),
        ({"processes": 2}, FOUR, None, ["cpu"] * 2),
        ({"backend": Threads()}, FOUR, None, ["cuda:0 cuda:1 cuda:2 cuda:3"]),
        ({"backend": Threads(), "gpus": [2, 0]}, FOUR, None, ["cuda:2 cuda:0"]),
        ({"backend": Threads()}, CPU, None, ["cpu"]),
        ({}, MAC, None, ["mps:0"]),
        ({"backend": Threads()}, MAC, None, ["mps:0"]),
        # Started by a launcher: its numbers apply where the request leaves them open.
        ({}, CPU, launched(2), ["cpu"] * 2),
        ({}, FOUR, launched(2), ["cuda:0", "cuda:1"]),
        ({}, FOUR, launched(4), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"gpus": 2}, FOUR, launched(2), ["cuda:0", "cuda:1"]),
        ({"gpus": [1, 3]}, FOUR, launched(2, nodes=2), ["cuda:1", "cuda:3"]),
        ({"gpus": 0}, FOUR, launched(3), ["cpu"] * 3),
        ({"backend": PerNode()}, FOUR, launched(1, nodes=2), ["cuda:0 cuda:1 cuda:2 cuda:3"]),
        # srun --gpus-per-task=1: each task sees one GPU, as index 0.
        ({}, Hardware("cuda", 1), launched(4), ["cuda:0"] * 4),
        ({"gpus": 4}, Hardware("cuda", 1), launched(4), ["cuda:0"] * 4),
        ({"gpus": "auto"}, Hardware("cuda", 1), launched(4), ["cuda:0"] * 4),
        ({"gpus": [2, 3]}, Hardware("cuda", 1), launched(2), ["cuda:0"] * 2),
    ],
)
def test_devices(options, machine, world, expected):
    """Each local rank has the devices that follow from the request, the machine and the launcher."""
    assert devices(compute_layout(Config.parse(**options), machine, world)) == expected


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
            "this process sees 4 GPU(s), numbered from 0; the first that is missing: 7",
            "use gpus=4, or check CUDA_VISIBLE_DEVICES, or Slurm's --gpus-per-node",
        ),
        (
            {"gpus": [3]},
            Hardware("cuda", 1),
            launched(1),
            "gpus=[3]",
            "this process sees 1 GPU(s), numbered from 0; the first that is missing: 3",
            "use gpus=1, or check CUDA_VISIBLE_DEVICES, or Slurm's --gpus-per-node",
        ),
        (
            {"gpus": 8},
            FOUR,
            None,
            "gpus=8",
            "this process sees 4 GPU(s), numbered from 0; the first that is missing: 4",
            "use gpus=4, or check CUDA_VISIBLE_DEVICES, or Slurm's --gpus-per-node",
        ),
        (
            {"gpus": 2},
            FOUR,
            launched(4),
            "processes per node: 2 asked for, 4 started",
            "a launcher has started this process as rank 0 of 4, with 4 on this node",
            "start 2 per node (Slurm: --ntasks-per-node=2), or use gpus=4",
        ),
        (
            {"processes": 8},
            CPU,
            launched(4),
            "processes per node: 8 asked for, 4 started",
            "a launcher has started this process as rank 0 of 4, with 4 on this node",
            "start 8 per node (Slurm: --ntasks-per-node=8), or use processes=4",
        ),
        (
            {"gpus": 2},
            Hardware("cuda", 1),
            launched(4),
            "processes per node: 2 asked for, 4 started",
            "a launcher has started this process as rank 0 of 4, with 4 on this node",
            "start 2 per node (Slurm: --ntasks-per-node=2), or use gpus=4",
        ),
        (
            {"num_nodes": 3},
            FOUR,
            launched(4, nodes=2, rank=5, local_rank=1, node_rank=1),
            "nodes: 3 asked for, 2 started",
            "a launcher has started this process as rank 5 of 8, on node 1",
            "start it on 3 node(s) (Slurm: --nodes=3), or omit num_nodes=",
        ),
        (
            {"backend": Threads()},
            FOUR,
            launched(2),
            "processes per node: 1 asked for, 2 started",
            "a launcher has started this process as rank 0 of 2, with 2 on this node",
            "start 1 per node (Slurm: --ntasks-per-node=1), or use backend='",
        ),
        (
            {},
            Hardware("cuda", 2),
            launched(4),
            "4 processes on this node, 2 GPU(s)",
            "a launcher has started more processes here than there are GPUs, and each needs its own",
            "start 2 per node, or use gpus=0 to run on the CPU",
        ),
        (
            {"backend": Threads(), "gpus": "auto", "processes": 2},
            CPU,
            None,
            "backend='threads' with processes=2",
            "threads drives all devices of a node from one process",
            "use processes=1, or backend='",
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
            "torch has no collectives on mps, so only one process can run there",
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
            "its collectives support: cuda",
            "omit it (the default depends on the device), or use 'gloo'",
        ),
        (
            {"process_group_backend": "cpu:gloo"},
            FOUR,
            None,
            "process_group_backend='cpu:gloo' on cuda",
            "its collectives support: cpu",
            "omit it (the default depends on the device), or use 'gloo'",
        ),
    ],
)
def test_refused(options, machine, world, what, why, fix):
    """A request that does not fit the machine or the launcher is refused, with both numbers and the fix."""
    (fault,) = faults_of(options, machine, world)
    assert (fault.what, fault.why) == (what, why)
    assert fault.fix.startswith(fix)


def test_only_what_helps_is_offered():
    """Of the backends those with a process per device; the CPU only if the backend runs there."""
    (fault,) = faults_of({"backend": Threads()}, FOUR, launched(2))
    assert "'ddp'" in fault.fix
    assert "'dp'" not in fault.fix
    (fault,) = faults_of({"backend": PerNode()}, Hardware("xpu", 1))
    assert "processes=1" not in fault.fix


def test_amp_on_an_unsupported_device_type():
    """A device type that a precision engine does not declare is refused."""
    (fault,) = faults_of({"amp": True}, MAC)
    assert fault.what == "amp='O1' on mps"
    assert fault.why == "native computes on mps in: fp32"
    assert fault.fix == "use another amp_engine, or amp=False on mps"


def test_every_fault_is_named():
    """One error lists the mismatches with the machine and with the launcher."""
    whats = [fault.what for fault in faults_of({"gpus": 8, "num_nodes": 3}, FOUR, launched(4))]
    assert whats == ["gpus=8", "processes per node: 8 asked for, 4 started", "nodes: 3 asked for, 1 started"]


def test_a_missing_gpu_is_the_only_fault():
    """A request with missing GPUs is not also checked for the CPU."""
    (fault,) = faults_of({"gpus": 4, "amp": "fp16", "process_group_backend": "nccl"}, CPU)
    assert fault.what == "gpus=4"


@pytest.mark.parametrize("world", [None, launched(4, nodes=2)])
def test_multi_node_fallback(world):
    """On too many nodes, the declared fallback is used, with a warning that can be silenced as it describes."""
    options = {"backend": Threads(), "gpus": 4} | ({} if world else {"num_nodes": 2})
    layout = compute_layout(Config.parse(**options), FOUR, world)
    assert layout.config.backend == registry.find("backends", "ddp")()
    assert layout.warnings == (
        "backend='threads' runs on at most 1 node(s): num_nodes=2 uses 'ddp'. Use backend='ddp' to silence this.",
    )
    assert devices(layout) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert not compute_layout(Config.parse(**{**options, "backend": "ddp"}), FOUR, world).warnings


def test_too_many_nodes_without_a_fallback():
    """Without a fallback, too many nodes of a launcher are refused, as too many requested nodes are."""
    backend = Threads()
    object.__setattr__(backend, "multi_node_fallback", None)
    (fault,) = faults_of({"backend": backend}, FOUR, launched(1, nodes=2))
    assert fault.what == "backend='threads' with num_nodes=2"
    assert fault.fix.startswith("use num_nodes=1, or backend='")


def test_auto_without_gpus():
    """On a machine without GPUs, gpus='auto' runs on the CPU, with a warning that can be silenced as it describes."""
    layout = compute_layout(Config.parse(gpus="auto"), CPU)
    assert layout.warnings == ("gpus='auto' finds no GPU here: running on the CPU. Use processes=1 to silence this.",)
    assert not compute_layout(Config.parse(processes=1), CPU).warnings
    assert not compute_layout(Config.parse(gpus="auto", processes=1), CPU).warnings
    assert not compute_layout(Config.parse(), CPU).warnings


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
    layout = compute_layout(Config.parse(backend=OnXPUs(), gpus=[3, 1]), Hardware("xpu", 4))
    assert devices(layout) == devices(layout.renumbered()) == ["xpu:3", "xpu:1"]


@dataclass(frozen=True, kw_only=True)
class OnXPUs(PerNode):
    name = "on_xpus"
    process_per = "device"
    device_types = frozenset({"xpu"})


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
    layout = compute_layout(Config.parse(backend=backend), FOUR)
    assert layout.devices == tuple(tuple(torch.device("cuda", each) for each in pair) for pair in ((0, 1), (2, 3)))
    assert layout.local_world_size == 2
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


@pytest.mark.parametrize(("rank", "local_rank", "node_rank", "local_world_size"), [(0, 0, 0, 2), (2, 0, 1, 1)])
def test_unequal_nodes(rank, local_rank, node_rank, local_world_size):
    """On nodes of different sizes the world size is the launcher's, and each node has its own devices."""
    world = World(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=3,
        local_world_size=local_world_size,
        num_nodes=2,
    )
    layout = compute_layout(Config.parse(num_nodes=2), FOUR, world)
    assert (layout.world_size, layout.num_nodes, layout.local_world_size) == (3, 2, local_world_size)
    assert len(layout.devices) == local_world_size


# The support table of early PyTorch Lightning: 1 GPU; 1 GPU 16-bit; dp; ddp; ddp 16-bit; several nodes are ddp.


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
def test_configurations_of_early_lightning(options, expected):
    """Every configuration in early Lightning's support table is accepted."""
    assert devices(compute_layout(Config.parse(**options), FOUR)) == expected


known = {name: registry.find("backends", name) for name in registry.names("backends")}


@pytest.mark.skipif("dp" not in known, reason="no dp backend")
def test_dp():
    """dp is one process, without Apex, and becomes ddp on several nodes."""
    layout = compute_layout(Config.parse(backend="dp", gpus=2, amp=True), FOUR)
    assert devices(layout) == ["cuda:0 cuda:1"]
    assert compute_layout(Config.parse(backend="dp", gpus=2, num_nodes=2), FOUR).config.backend.name == "ddp"
    if "apex" in registry.names("precision"):
        with pytest.raises(ConfigError) as caught:
            Config.parse(backend="dp", gpus=2, amp=True, amp_engine="apex")
        (fault,) = caught.value.faults
        assert fault.what == "backend='dp' with amp_engine='apex' and amp='O2'"
        assert fault.fix.startswith("use amp_engine='native', or backend='ddp'")


@pytest.mark.skipif("ddp2" not in known, reason="no ddp2 backend")
def test_ddp2():
    """ddp2 is one process per node, and refuses levels and engines that it does not declare."""
    assert devices(compute_layout(Config.parse(backend="ddp2", gpus=2, num_nodes=4), FOUR)) == ["cuda:0 cuda:1"]
    for engine, levels in known["ddp2"].amp.items():
        for level in set(LEVELS) - levels:
            with pytest.raises(ConfigError) as caught:
                Config.parse(backend="ddp2", gpus=2, amp=level, amp_engine=engine)
            assert f"backend='ddp2' with amp_engine={engine!r} and amp={level!r}" in [
                fault.what for fault in caught.value.faults
            ]
    for engine in set(registry.names("precision")) - set(known["ddp2"].amp):
        with pytest.raises(ConfigError) as caught:
            Config.parse(backend="ddp2", gpus=2, amp=True, amp_engine=engine)
        assert f"backend='ddp2' with amp_engine={engine!r}" in str(caught.value)


backend_values = st.sampled_from([*known, Threads(), PerNode()])


@given(option_sets(), backend_values, hardware, st.none() | worlds())
def test_any_request_anywhere(options, backend, machine, world):
    """A request either gives a layout on existing devices, or is refused with all reasons."""
    faults, layout = (), None
    try:
        config = Config.parse(**{**options, "backend": backend})
        layout = compute_layout(config, machine, world)
    except ConfigError as error:
        faults = error.faults
    assert all(fault.what and fault.why and fault.fix for fault in faults)
    if layout is not None:
        check(layout, config, machine, world)


def check(layout: Layout, config: Config, machine: Hardware, world: World | None) -> None:
    """Assert the invariants of every layout."""
    if config.gpus == ALL_GPUS and config.processes is not None:  # all GPUs, or else these processes
        config = config.changed(**({"gpus": None} if layout.device_type == "cpu" else {"processes": None}))
    assert len(layout.devices) == layout.local_world_size >= 1
    assert all(layout.devices)
    assert {device.type for driven in layout.devices for device in driven} == {layout.device_type}
    assert layout.device_type in ("cpu", machine.device_type)
    assert all(index < machine.count for index in layout.indices)
    assert bool(layout.warnings) == (
        layout.config != config
        or (config.gpus == ALL_GPUS and machine.count == 0)
        or (isinstance(config.gpus, tuple) and len(set(config.gpus)) < len(config.gpus))
    )
    if config.num_nodes is not None:
        assert layout.num_nodes == config.num_nodes
    if world is None:
        assert layout.world_size == layout.num_nodes * layout.local_world_size
    else:
        assert (layout.world_size, layout.num_nodes) == (world.world_size, world.num_nodes)
        assert layout.local_world_size == world.local_world_size > world.local_rank
    renumbered = layout.renumbered()
    assert renumbered.indices == tuple(range(len(layout.indices)))
    assert renumbered.renumbered() == renumbered
    assert dataclasses.replace(renumbered, config=layout.config, devices=layout.devices) == layout
    for before, after in zip(layout.devices, renumbered.devices, strict=True):
        if layout.device_type == "cpu":
            assert after == before
        else:
            assert [layout.indices[device.index] for device in after] == [device.index for device in before]
            assert all(isinstance(device, torch.device) for device in after)


@pytest.mark.parametrize("gpus", [[1, 0], [2, 3], [3, 1], [1, 1], [2, 0, 2]])
def test_a_block_in_a_worker_finds_the_devices_of_the_worker(gpus: list[int]) -> None:
    """A block with options of its own reads the request again, in a process that sees only the requested GPUs."""
    config = Config.parse(gpus=gpus, process_group_backend="gloo")  # NCCL refuses two ranks on one GPU
    inside = compute_layout(config, Hardware("cuda", 4)).renumbered()
    world = World(rank=0, local_rank=0, world_size=len(gpus), local_world_size=len(gpus))
    again = compute_layout(inside.config.changed(amp="bf16"), Hardware("cuda", len(set(gpus))), world)
    assert again.devices == inside.devices
