"""Leaves of nested containers, listed and mapped."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parallelize.run.containers import leaves, map_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


class Named(list):
    name = "kept"


@dataclass(frozen=True)
class Frozen:
    value: Any
    made: int = field(init=False, default=7)


nested = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner)
    ),
    max_leaves=12,
)


@given(nested)
def test_mapping_the_identity_changes_nothing(value):
    """The result is equal and of the same types."""
    assert map_leaves(lambda leaf: leaf, value) == value
    assert type(map_leaves(lambda leaf: leaf, value)) is type(value)


@given(nested)
def test_leaves_are_what_is_mapped_in_order(value):
    """The leaves of a mapped value are the mapped leaves, in order."""
    assert list(leaves(map_leaves(lambda leaf: [leaf][0] * 2, value))) == [leaf * 2 for leaf in leaves(value)]


def test_the_state_of_a_container_is_kept():
    """Default factories, attributes, and fields that __init__ does not take are kept; immutable mappings work."""
    missing = map_leaves(lambda leaf: leaf + 1, defaultdict(list, a=1))
    assert (missing["a"], missing["b"]) == (2, [])
    named = map_leaves(lambda leaf: leaf + 1, Named([1, 2]))
    assert (named, type(named), named.name) == ([2, 3], Named, "kept")
    assert map_leaves(str, Frozen(1)) == Frozen("1") or map_leaves(str, Frozen(1)).value == "1"
    assert isinstance(map_leaves(str, MappingProxyType({"a": 1})), MappingProxyType)
    assert isinstance(map_leaves(str, UserDict(a=1)), UserDict)


def test_some_containers_are_leaves():
    """A PackedSequence is one, although it is a tuple; `is_leaf` chooses others."""
    packed = pack_sequence([torch.zeros(2)])
    assert list(leaves([packed])) == [packed]
    assert isinstance(map_leaves(lambda leaf: leaf.double(), packed), PackedSequence)
    assert map_leaves(len, {"a": [1, 2]}, is_leaf=lambda each: isinstance(each, list)) == {"a": 2}
