"""Runs the programs under each backend: nothing but `backend=` and the number of processes differs."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from one_word import gans, generative, language, learning, optimizers, self_supervised, vision
from torch import Tensor

from parallelize import BalancedBackend, FSDPBackend, all_reduce, distributed

__all__ = ["PROGRAMS", "WORLDS", "Outcome", "World", "outcome"]

Program = Callable[[], Mapping[str, Tensor]]

# Programs of one group run in one world, one after the other.
GROUPS: tuple[tuple[Program, ...], ...] = tuple(
    tuple(module.PROGRAMS) for module in (vision, language, gans, self_supervised, generative, optimizers, learning)
)
PROGRAMS: dict[str, Program] = {program.__name__: program for group in GROUPS for program in group}

# Options of @distributed beside the backend, the same everywhere.
OPTIONS: dict[str, dict[str, Any]] = {"amp_bf16": {"amp": "bf16"}}

# Each batch is split, whatever is faster; where batch norm would normalize half a batch, none is.
SPLIT = BalancedBackend(devices=("cpu", "cpu"), microbatches=2)
NORMALIZED = dataclasses.replace(SPLIT, microbatches=1)
BACKENDS: dict[tuple[str, str], Any] = {
    (name, "balanced"): NORMALIZED
    for name in (
        "averaged_model",
        "averaged_model_before",
        "dcgan",
        "ema_deepcopy",
        "ema_shadow",
        "imagenet",
        "layerwise_lr",
        "swa",
    )
}

# Shards over two ranks, with two replicas.
HYBRID = FSDPBackend(shard_over=2)

# Every module is gathered by itself, and kept gathered for backward; shards are in CPU memory.
OFFLOADED = FSDPBackend(blocks=1, reshard_after_forward=False, cpu_offload=True)


@dataclass(frozen=True)
class World:
    """A backend and a number of processes; `reference`: the world that ends with the same weights."""

    backend: Any
    processes: int
    reference: str | None = None


WORLDS: dict[str, World] = {
    "ddp": World("ddp", 2),
    "fsdp": World("fsdp", 2, reference="ddp"),
    "offloaded": World(OFFLOADED, 2, reference="ddp"),
    "ddp of 4": World("ddp", 4),
    "hsdp": World(HYBRID, 4, reference="ddp of 4"),
    "auto": World("auto", 2, reference="ddp"),
    "plain": World("ddp", 1),
    "balanced": World(SPLIT, 1, reference="plain"),
}


@dataclass(frozen=True)
class Outcome:
    """What a program returned on rank 0, or the error that ended it on any rank."""

    tensors: Mapping[str, Tensor]
    error: str | None = None


def outcome(name: str, world: str) -> Outcome:
    """Run the program, with others of its group, unless it has been run in this world."""
    return _outcomes(world, next(group for group in GROUPS if PROGRAMS[name] in group))[name]


@functools.cache
def _outcomes(world: str, group: tuple[Program, ...]) -> Mapping[str, Outcome]:
    """Return what each program of the group does in `world`: after an error the others continue in a new world."""
    outcomes: dict[str, Outcome] = {}
    by_options: dict[str, list[Program]] = {}
    for program in group:
        by_options.setdefault(str(_options(world, program)), []).append(program)
    for programs in by_options.values():
        remaining, options = programs, _options(world, programs[0])
        while remaining:
            outcomes.update(_run(world, remaining, options))
            remaining = [program for program in remaining if program.__name__ not in outcomes]
    return outcomes


def _options(world: str, program: Program) -> dict[str, Any]:
    name = program.__name__
    return {"backend": BACKENDS.get((name, world), WORLDS[world].backend), **OPTIONS.get(name, {})}


def _run(world: str, programs: list[Program], options: dict[str, Any]) -> Mapping[str, Outcome]:
    """Run programs in one world, up to the first error; if the world itself ends, the first program alone."""
    run = distributed(processes=WORLDS[world].processes, **options)(_run_until_error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ranks = run.all_ranks(programs)
    except Exception as error:  # a deadlock or a crash: the world has ended
        if len(programs) == 1:
            return {programs[0].__name__: Outcome({}, f"{type(error).__name__}: {error}")}
        return _run(world, programs[:1], options)
    failed = {name: each for rank in reversed(ranks) for name, each in rank.items() if each.error is not None}
    return {**ranks[0], **failed}


def _run_until_error(programs: list[Program]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for program in programs:
        error = None
        try:
            tensors = program()
        except Exception as raised:
            tensors, error = {}, f"{type(raised).__name__}: {raised}"
        outcomes[program.__name__] = Outcome(tensors, error)
        if all_reduce(torch.tensor(float(error is not None)), "mean") > 0:
            break
    return outcomes
