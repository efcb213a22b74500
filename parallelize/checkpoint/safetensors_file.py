"""Checkpoints whose weights are a safetensors file, with the rest beside it.

    last.safetensors             the weights, as Hugging Face reads them; written last, and names the other file
    last.<digest>.pt             everything else, as save() writes it

A run killed at any moment leaves the old pair or the new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.atomic_write import replace_file
from parallelize.checkpoint.checksum import damaged_error
from parallelize.errors import ConfigError, MissingDependencyError, ParallelizeError

__all__ = ["check_request", "read_weights", "write_weights"]

_REST = "parallelize"  # key of the metadata


def check_request(path: Path, form: Any, objects: Mapping[str, Any]) -> None:
    """Raise unless `save(path, format=form, **objects)` can be done."""
    if form != "safetensors":
        raise ConfigError(f"format={form!r}", why="it is not a known format", fix='use "torch" or "safetensors"')
    num_models = sum(isinstance(each, nn.Module) for each in objects.values())
    if path.suffix != ".safetensors" or num_models != 1:
        raise ConfigError(
            f"save({str(path)!r}, format='safetensors') with {num_models} models",
            why="a file of safetensors holds the weights of one model",
            fix="save('last.safetensors', format='safetensors', model=model, ...): one model per file",
        )
    _package()


def write_weights(path: Path, content: Mapping[str, Any], write: Callable[[Path], object]) -> None:
    """Write the weights to `path`, and beside it what `write` writes: the content, from which they are removed."""
    objects = content["_parallelize"]["objects"]
    name = next(name for name, each in objects.items() if each["kind"] == "model")
    state, weights = content[name], {}
    tied: dict[str, str] = {}
    names: dict[Any, str] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        first = names.setdefault((value.data_ptr(), value.shape, value.stride(), value.numel() or key), key)
        if first == key:
            # A file of safetensors may not hold one storage twice.
            weights[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        tied[key] = first
        state[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    rest = path.with_name(f"{path.stem}.{content['_parallelize']['digest'][:12]}.pt")
    replace_file(rest, write)
    record = {"model": name, "file": rest.name, "names": tied}
    metadata = {"format": "pt", _REST: json.dumps(record)}  # Hugging Face requires the first
    replace_file(path, lambda temporary: _package().torch.save_file(weights, temporary, metadata))
    for each in path.parent.glob(f"{path.stem}.*.pt"):
        if each != rest and re.fullmatch(r"[0-9a-f]{12}", each.name[len(path.stem) + 1 : -3]):
            each.unlink()


def read_weights(path: Path, load: Callable[[Path], dict[Any, Any]]) -> dict[Any, Any]:
    """Return the content, or the weights alone in a file of another program; `load` reads a file of torch.save."""
    if not path.is_file():
        return load(path)  # raises the error
    try:
        with _package().safe_open(path, framework="pt") as file:
            weights: dict[Any, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            record = json.loads((file.metadata() or {}).get(_REST, "{}"))
        if not record:
            return weights
        content = load(path.with_name(Path(record["file"]).name))
        for key, first in record["names"].items():
            content[record["model"]][key] = weights[first]
    except ParallelizeError as exc:
        raise damaged_error(path, f"the file beside it cannot be read: {exc.faults[0].what}") from exc
    except Exception as exc:  # safetensors may raise anything on random bytes
        raise damaged_error(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc
    return content


def _package() -> Any:
    try:
        import safetensors.torch
    except ImportError as exc:
        raise MissingDependencyError(
            "safetensors is not installed",
            why="files of weights that end in .safetensors are read and written with it",
            fix="pip install 'parallelize[safetensors]'",
        ) from exc
    return safetensors
