"""Recognition of datasets and iterables that shard themselves over the processes: by library, attributes and code."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from parallelize.cluster.world import World
from parallelize.data.loader_options import Divides
from parallelize.errors import ConfigError
from parallelize.runtime import context

__all__ = ["NUM_SHARDS_ATTRIBUTES", "is_loader_of_batches", "own_sharding", "shuffle_fingerprint"]

# Attributes for a sampler's number of shards; torch, Lightning and timm use the first, Accelerate the second.
NUM_SHARDS_ATTRIBUTES = ("num_replicas", "num_processes", "num_shards", "world_size", "_num_replicas", "_world_size")

# Functions, classes and variables that code uses to shard by process. A constructor often queries the rank for other
# reasons, such as a download by rank 0, so there only the world size counts.
_WORLD_SIZE_NAMES = ("get_world_size", "world_size", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK_NAMES = ("DistributedSampler", "get_rank", "rank", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_QUERIES = {*_WORLD_SIZE_NAMES, *_RANK_NAMES}
_OWN_FUNCTIONS = {context.rank: "rank", context.world_size: "world_size"}

# Packages whose code is not searched: they query the rank for other reasons, or are recognized by class.
_KNOWN_PACKAGES = frozenset(
    {
        *("builtins", "parallelize", "torch"),
        *("datasets", "ffcv", "litdata", "nvidia", "streaming", "torchdata", "webdataset"),
    }
)

_MAX_DEPTH, _MAX_ITEMS = 5, 32


def own_sharding(data: Any, world: World) -> tuple[Any, Divides | None]:
    """Return the data, sharded by its own library if possible, and how it shards itself; None: not that we know.

    Streams of Hugging Face's datasets are split by split_dataset_by_node. WebDataset with split_by_node or resampled
    shards, Mosaic's StreamingDataset, litdata's, torch's data pipes with a sharding filter, and FFCV's Loader with
    distributed=True shard themselves.

    Args:
        data: an iterable dataset, or an iterable of batches.
        world: rank and world size of this process.

    Raises:
        ConfigError: the data may shard itself: its code uses the rank or the world size, or it holds the world size; or
            its library sees another world size.
    """
    if _is_named(data, "datasets", "IterableDataset"):
        return _split_by_node(data, world)
    if _shards_itself(data):
        _check_seen_world_size(data, world)
        return data, "processes"
    if world.world_size > 1:
        for part in _parts(data):
            evidence = _evidence(part, data, world.world_size)
            if evidence:
                raise _ambiguous_sharding_error(data, evidence)
    return data, None


def shuffle_fingerprint(data: Any) -> str:
    """Return a hash of the generators that shuffle a stream of Hugging Face's datasets; "" if none does."""
    generators = [vars(part).get("generator") for part in _parts(data) if hasattr(part, "__dict__")]
    states = [repr(each.bit_generator.state) for each in generators if hasattr(each, "bit_generator")]
    return hashlib.blake2b("".join(states).encode(), digest_size=4).hexdigest() if states else ""


def is_loader_of_batches(data: Any) -> bool:
    """Return whether a dataset is a loader: WebDataset's WebLoader is a pipeline, which starts with a DataLoader."""
    pipeline = getattr(data, "pipeline", None)
    return isinstance(pipeline, list) and any(isinstance(stage, DataLoader) for stage in pipeline)


def _is_named(data: Any, package: str, *suffixes: str) -> bool:
    """Return whether a class of the data is defined in a package and has a name with one of the suffixes."""
    return any(
        each.__module__.partition(".")[0] == package and each.__name__.endswith(suffixes) for each in type(data).__mro__
    )


def _shards_itself(data: Any) -> bool:
    if _is_named(data, "streaming", "StreamingDataset") or _is_named(data, "litdata", "StreamingDataset"):
        return True
    if _is_named(data, "ffcv", "Loader"):
        return bool(getattr(data, "distributed", False))
    if isinstance(data, IterDataPipe):
        return any(hasattr(each, "apply_sharding") for each in get_all_graph_pipes(traverse_dps(data)))
    if _is_named(data, "webdataset", "DataPipeline"):
        stages = [stage for each in _parts(data) for stage in getattr(each, "pipeline", ())]
        names = {getattr(stage, "__name__", type(stage).__name__) for stage in stages}
        return not names.isdisjoint({"split_by_node", "ResampledShards", "ResampledShardList"})
    return _is_named(data, "datasets", "IterableDataset") and getattr(data, "_distributed", None) is not None


def _split_by_node(data: Any, world: World) -> tuple[Any, Divides]:
    from datasets.distributed import split_dataset_by_node

    if getattr(data, "_distributed", None) is None:
        return split_dataset_by_node(data, rank=world.rank, world_size=world.world_size), "processes"
    _check_seen_world_size(data, world)
    return data, "processes"


def _check_seen_world_size(data: Any, world: World) -> None:
    """Check the world size that a library saw when the dataset was made, if it is known."""
    for holder, attribute in (
        ("_distributed", "world_size"),  # Hugging Face's datasets
        ("distributed_env", "world_size"),  # litdata
        ("_unique_rank_world", "num_ranks"),  # Mosaic Streaming
    ):
        size = getattr(getattr(data, holder, None), attribute, world.world_size)
        if size != world.world_size:
            raise ConfigError(
                f"{type(data).__name__} was sharded over {size} processes, in a world of {world.world_size}",
                why="some samples would be repeated, or left out",
                fix="make the dataset inside the decorated function, in the processes that iterate it",
            )


def _parts(data: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield the data, then the datasets, samplers, loaders and functions that it holds."""
    yield data
    if depth == 0:
        return
    children: Iterable[Any] = getattr(data, "__dict__", {}).values()
    if isinstance(data, types.FunctionType):
        children = (cell.cell_contents for cell in data.__closure__ or ())
    elif isinstance(data, types.GeneratorType) and data.gi_frame is not None:
        children = data.gi_frame.f_locals.values()
    elif isinstance(data, (list, tuple)):
        children = data[:_MAX_ITEMS]
    for child in list(children)[:_MAX_ITEMS]:
        is_iterable = hasattr(type(child), "__iter__") and type(child).__module__ != "builtins"
        is_data = is_iterable and not hasattr(child, "__array__")
        if is_data or isinstance(child, (list, tuple, types.FunctionType, types.GeneratorType)):
            yield from _parts(child, depth - 1)


def _evidence(part: Any, data: Any, world_size: int) -> str:
    """Return why a part of the data may shard it over the processes, as a clause; "" if nothing indicates that."""
    if part is not data and _shards_itself(part):
        return f"it contains a {type(part).__name__}, which shards itself"
    if type(part).__module__.startswith("nvidia.dali"):
        return "the readers of its pipeline may have num_shards="
    names = (*NUM_SHARDS_ATTRIBUTES, "world", "num_nodes") if part is data else ("num_replicas", "world_size")
    for name in names:
        size = getattr(part, name, None)
        if type(size) is int and size == world_size:
            return f"it has {name}={size}" if part is data else f"its {type(part).__name__} has {name}={size}"
    used = sorted(set(_queries(part)))
    return f"its code uses {' and '.join(used)}" if used else ""


def _queries(part: Any) -> Iterator[str]:
    """Yield the names with which the code that iterates a part queries the rank or the world size."""
    if isinstance(part, types.GeneratorType) and part.gi_frame is not None:
        yield from _Code(part.gi_code, part.gi_frame.f_globals, None).queries()
    elif isinstance(part, types.FunctionType):
        yield from _Code(part.__code__, part.__globals__, None).queries()
    owner = type(part)
    for name in ("__iter__", "__next__", "__init__"):
        code = _Code.of(getattr(owner, name, None), owner)
        if code is not None:
            found = code.queries()
            yield from (each for each in found if name != "__init__" or each in _WORLD_SIZE_NAMES)


@dataclass(frozen=True)
class _Code:
    """Code of the user, with the namespaces in which its names are looked up.

    Args:
        code: the code object.
        namespace: the module's globals.
        owner: the class of the method, or None.
    """

    code: types.CodeType
    namespace: dict[str, Any]
    owner: type | None

    @classmethod
    def of(cls, function: Any, owner: type | None) -> _Code | None:
        """Return the code of a function, method or property; None if it is not that of the user."""
        function = getattr(getattr(function, "fget", function), "__func__", getattr(function, "fget", function))
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        if not isinstance(function, types.FunctionType) or package in _KNOWN_PACKAGES | sys.stdlib_module_names:
            return None
        return cls(function.__code__, function.__globals__, owner)

    def queries(self) -> set[str]:
        """Return the names with which this code, and the methods and functions that it names, query the process."""
        found: set[str] = set()
        pending, seen = [self], set()
        while pending:
            current = pending.pop()
            if current.code in seen:
                continue
            seen.add(current.code)
            constants = current.code.co_consts
            pending += [
                _Code(each, current.namespace, current.owner) for each in constants if isinstance(each, types.CodeType)
            ]
            names = current.code.co_names
            found |= {each for each in constants if isinstance(each, str) and each.isupper()} & _QUERIES
            found |= {each for each in names if each not in _OWN_FUNCTIONS.values()} & _QUERIES
            modules = [value for value in map(current.lookup, names) if isinstance(value, types.ModuleType)]
            for name in names:
                values = [current.lookup(name), *(vars(module).get(name) for module in modules)]
                found |= {own for function, own in _OWN_FUNCTIONS.items() if any(each is function for each in values)}
                pending += filter(None, [current.named(name)])
        return found

    def lookup(self, name: str) -> Any:
        """Return a global variable or an imported module; None if there is neither."""
        return self.namespace.get(name, sys.modules.get(name))

    def named(self, name: str) -> _Code | None:
        """Return the code of the method, or the function of the same package, with a name."""
        method = _Code.of(getattr(self.owner, name, None), self.owner)
        if method is not None:
            return method
        function = self.namespace.get(name)
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        is_near = package == str(self.namespace.get("__name__")).partition(".")[0]
        return _Code.of(function, None) if is_near else None


def _ambiguous_sharding_error(data: object, evidence: str) -> ConfigError:
    name = type(data).__name__
    return ConfigError(
        f"the iterable {name} may shard itself over the processes: {evidence}",
        why="if it does, sharding it again would skip samples; if it does not, every process would iterate all samples",
        fix=f"use shard_loader(loader, divides='processes') if {name} shards its data over the processes, or "
        "divides='nothing' if every process iterates all of it",
    )
