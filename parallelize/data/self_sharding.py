"""Recognition of datasets and iterables that shard themselves over the processes: by library, attributes and code."""

from __future__ import annotations

import hashlib
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe, Sampler
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from parallelize.cluster.world import World
from parallelize.data.loader_options import Divides
from parallelize.data.sharded_loader import ShardedLoader
from parallelize.errors import ConfigError
from parallelize.runtime import context

__all__ = [
    "number_of_shards",
    "own_sharding",
    "samplers_in",
    "sharding_queries",
    "shards_itself",
    "shuffle_fingerprint",
]

# Attributes for a sampler's number of shards; torch, Lightning and timm use the first, Accelerate the second,
# and Megatron and DeepSpeed "data_parallel_size".
_NUM_SHARDS_ATTRIBUTES = (
    "num_replicas",
    "num_processes",
    "num_shards",
    "world_size",
    "data_parallel_size",
    "_num_replicas",
    "_world_size",
)
_RANK_ATTRIBUTE = re.compile(
    r".*rank|_?((cur|current|my|this|own)_?)?(shard|process|replica)(_?(id|idx|index|no|num|number))?"
)

# Functions, classes and variables that code uses to shard by process. A constructor often queries the rank for other
# reasons, such as a download by rank 0, so there only the world size counts.
_WORLD_SIZE_NAMES = frozenset(
    {"get_world_size", "world_size", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
)
_RANK_NAMES = frozenset(
    {
        "DistributedSampler",
        "get_rank",
        "rank",
        "RANK",
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "shard_loader",
    }
)
_OWN_FUNCTIONS = {context.rank: "rank", context.world_size: "world_size"}  # these names are attributes, too

# Packages whose code is not searched: they query the rank for other reasons, or are recognized by class.
_KNOWN_PACKAGES = sys.stdlib_module_names | frozenset(
    {"datasets", "ffcv", "litdata", "nvidia", "parallelize", "streaming", "torch", "torchdata", "webdataset"}
)

_MAX_DEPTH, _MAX_ITEMS = 5, 32


def own_sharding(data: Any, world: World) -> tuple[Any, Divides | None]:
    """Return the data, sharded by its own library if possible, and how it shards itself; None: not that we know.

    Raises:
        ConfigError: the data may shard itself: its code uses the rank or the world size, or it holds the world size; or
            its library sees another world size.
    """
    if _is_named(data, "datasets", "IterableDataset") and not shards_itself(data):
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(data, rank=world.rank, world_size=world.world_size), "processes"
    if shards_itself(data):
        for holder, attribute in (  # the world size that a library saw when the dataset was made, if it is known
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
        return data, "processes"
    if world.world_size > 1:
        for part in _parts(data):
            evidence = _evidence(part, data, world.world_size)
            if evidence:
                name = type(data).__name__
                raise ConfigError(
                    f"the iterable {name} may shard itself over the processes: {evidence}",
                    why="if it does, sharding it again would skip samples; if it does not, every process would iterate "
                    "all samples",
                    fix=f"use shard_loader(loader, divides='processes') if {name} shards its data over the processes, "
                    "or divides='nothing' if every process iterates all of it",
                )
    return data, None


def number_of_shards(sampler: Any) -> tuple[str, int] | None:
    """Return the attribute with a sampler's number of shards, and that number; None if it has the samples of all."""
    for name in _NUM_SHARDS_ATTRIBUTES:
        size = getattr(sampler, name, None)
        # If nothing tells a rank, num_shards may be a number of files.
        if isinstance(size, int) and (name != "num_shards" or _has_rank(sampler) or _queries(sampler)):
            return name, size
    return None


def sharding_queries(sampler: Any) -> list[str]:
    """Return the names with which a sampler's code queries the rank and the world size; empty unless it has both.

    Code that queries the rank only may write a log on rank 0.
    """
    used = _queries(sampler)
    has_both = used & _WORLD_SIZE_NAMES and (used & _RANK_NAMES or _has_rank(sampler))
    return sorted(used) if has_both or "DistributedSampler" in used else []


def samplers_in(sampler: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield a sampler, then those that it holds."""
    yield sampler
    held = list(getattr(sampler, "__dict__", {}).values())
    held += [item for each in held if isinstance(each, (list, tuple)) for item in each[:_MAX_ITEMS]]
    held += [getattr(sampler, "sampler", None)]
    for each in {id(each): each for each in held if isinstance(each, Sampler)}.values() if depth else ():
        yield from samplers_in(each, depth - 1)


def _has_rank(sampler: Any) -> bool:
    attributes = getattr(sampler, "__dict__", {}).items()
    return any(_RANK_ATTRIBUTE.fullmatch(key) and isinstance(value, int) for key, value in attributes)


def shuffle_fingerprint(data: Any) -> str:
    """Return a hash of the generators that shuffle a stream of Hugging Face's datasets; "" if none does."""
    generators = [vars(part).get("generator") for part in _parts(data) if hasattr(part, "__dict__")]
    states = [repr(each.bit_generator.state) for each in generators if hasattr(each, "bit_generator")]
    return hashlib.blake2b("".join(states).encode(), digest_size=4).hexdigest() if states else ""


def _is_named(data: Any, package: str, *suffixes: str) -> bool:
    """Return whether a class of the data is defined in a package and has a name with one of the suffixes."""
    return any(_package_of(each) == package and each.__name__.endswith(suffixes) for each in type(data).__mro__)


def shards_itself(data: Any) -> bool:
    """Return whether data is of a library, or split by one, that shards it over the processes."""
    if issubclass(type(data), ShardedLoader):  # inside of another iterable
        return True
    if _is_named(data, "ffcv", "Loader"):
        return bool(getattr(data, "distributed", False))
    if isinstance(data, IterDataPipe):
        return any(hasattr(each, "apply_sharding") for each in get_all_graph_pipes(traverse_dps(data)))
    if _is_named(data, "webdataset", "DataPipeline"):
        stages = [stage for each in _parts(data) for stage in getattr(each, "pipeline", ())]
        names = {getattr(stage, "__name__", type(stage).__name__) for stage in stages}
        return not names.isdisjoint({"split_by_node", "ResampledShards", "ResampledShardList"})
    if _is_named(data, "datasets", "IterableDataset"):
        return getattr(data, "_distributed", None) is not None
    return any(_is_named(data, package, "StreamingDataset") for package in ("litdata", "streaming"))


def _parts(data: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield the data, then the datasets, samplers, loaders and functions that it holds."""
    yield data
    if depth == 0:
        return
    children: Iterable[Any] = getattr(data, "__dict__", {}).values()
    if isinstance(data, types.FunctionType):
        children = (cell.cell_contents for cell in data.__closure__ or () if cell != types.CellType())  # not empty
    elif isinstance(data, types.GeneratorType) and data.gi_frame is not None:
        children = data.gi_frame.f_locals.values()
    elif isinstance(data, (zip, enumerate, map, filter)):
        children = data.__reduce__()[1]
    elif isinstance(data, (list, tuple)):
        children = data[:_MAX_ITEMS]
    # Functions that torch's classes hold, such as a worker_init_fn, query the rank for other reasons.
    functions = () if _package_of(type(data)) == "torch" else (types.FunctionType,)
    for child in list(children)[:_MAX_ITEMS]:
        is_iterable = hasattr(type(child), "__iter__") and type(child).__module__ != "builtins"
        is_data = is_iterable and not hasattr(child, "__array__")
        if is_data or isinstance(child, (list, tuple, types.GeneratorType, zip, enumerate, map, filter, *functions)):
            yield from _parts(child, depth - 1)


def _evidence(part: Any, data: Any, world_size: int) -> str:
    """Return why a part of the data may shard it over the processes, as a clause; "" if nothing indicates that."""
    if part is not data and shards_itself(part):
        return f"it contains a {type(part).__name__}, which shards itself"
    if type(part).__module__.startswith("nvidia.dali"):
        return "the readers of its pipeline may have num_shards="
    names = (*_NUM_SHARDS_ATTRIBUTES, "world", "num_nodes") if part is data else ("num_replicas", "world_size")
    for name in names:
        size = getattr(part, name, None) if part is data else getattr(part, "__dict__", {}).get(name)
        if type(size) is int and size == world_size:
            return f"it has {name}={size}" if part is data else f"its {type(part).__name__} has {name}={size}"
    used = sorted(_queries(part))
    return f"its code uses {' and '.join(used)}" if used else ""


def _queries(part: Any) -> set[str]:
    """Return the names with which the code that iterates a part queries the rank or the world size."""
    owner = type(part)
    iterating = [part, getattr(owner, "__iter__", None), getattr(owner, "__next__", None)]
    return _names_used([owner.__init__], owner) & _WORLD_SIZE_NAMES | _names_used(iterating, owner)


def _names_used(pending: list[Any], owner: type) -> set[str]:
    """Return the names that functions, and the methods and near functions that these name, use to query the process."""
    found: set[str] = set()
    seen = set()
    while pending:
        code, namespace = _code_of(pending.pop())
        if code is None or code in seen:
            continue
        seen.add(code)
        codes = [code]
        for each in codes:  # those of nested functions, too
            codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
        texts = {text for each in codes for text in each.co_consts if isinstance(text, str) and text.isupper()}
        # The value is a module also for one that the code imports by a dotted name.
        named = {name: namespace.get(name, sys.modules.get(name)) for each in codes for name in each.co_names}
        modules = [value for value in named.values() if isinstance(value, types.ModuleType)]
        # The names of this package are not in it before their first use.
        spaces = [namespace, *(vars(context if each is sys.modules["parallelize"] else each) for each in modules)]
        values = [space[name] for space in spaces for name in named if name in space]
        found |= (named.keys() - {*_OWN_FUNCTIONS.values()} | texts) & (_WORLD_SIZE_NAMES | _RANK_NAMES)
        found |= {own for function, own in _OWN_FUNCTIONS.items() if any(each is function for each in values)}
        pending += [getattr(owner, name) for name in named if hasattr(owner, name)]
        package = str(namespace.get("__name__")).partition(".")[0]
        pending += [each for each in values if _package_of(each) == package]
    return found


def _code_of(function: Any) -> tuple[types.CodeType | None, dict[str, Any]]:
    """Return the code and the globals of a function, property or generator of the user; None for any other object."""
    if isinstance(function, types.GeneratorType) and function.gi_frame is not None:
        return function.gi_code, function.gi_frame.f_globals
    function = getattr(function, "fget", getattr(function, "__func__", function))
    if isinstance(function, types.FunctionType) and _package_of(function) not in _KNOWN_PACKAGES:
        return function.__code__, function.__globals__
    return None, {}


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]
