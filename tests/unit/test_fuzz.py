"""Fuzz tests of all parsers: random environments, host lists and files give a value or a ConfigError."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import environments
from torch import nn

from parallelize import ConfigError, checkpoints
from parallelize.cluster.environment import detect, detect_node, first_host, tasks_per_node
from parallelize.cluster.world import Node, World

numbers = st.integers(-2, 9).map(str) | st.integers().map(str)


@settings(max_examples=500)
@given(environments)
def test_any_environment(environ):
    """Random launcher variables give a consistent World, None, or a ConfigError with all its parts; none is changed."""
    faults, before = [], dict(environ)
    for function, kind in ((detect, World), (detect_node, Node)):
        try:
            found = function(environ)
        except ConfigError as exc:
            faults += exc.faults
        else:
            assert found is None or isinstance(found, kind)
            if isinstance(found, World):
                assert 0 <= found.rank < found.world_size
                assert 0 <= found.local_rank < found.local_world_size <= found.world_size
                assert 0 < found.master_port < 65536 or found.world_size == 1
    assert all(each.what and each.why and each.fix for each in faults)
    assert environ == before


@pytest.mark.parametrize(
    "text",
    ["n[0-999999999999]", "n" * 10**5, "n[" + "1," * 10**5 + "1]", "n[1-2]" * 10**5 + "[", "[" * 10**5, "9" * 10**5],
    ids=lambda text: text[:6],
)
def test_long_host_lists_are_parsed_in_linear_time(text):
    """A list is never expanded, and no regular expression backtracks."""
    started = time.process_time()
    for each in (text, f"1(x{text[:9]})," * 10**4):
        first_host(each)
        tasks_per_node(each)
    assert time.process_time() - started < 5


@settings(max_examples=200)
@given(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), numbers.map("{}min".format))
)
def test_any_save_schedule(tmp_path_factory, every):
    """Random values of `checkpoints(every=)` give a schedule or a ConfigError."""
    folder = tmp_path_factory.mktemp("runs")
    with contextlib.suppress(ConfigError), checkpoints(folder, every=every, model=nn.Linear(1, 1)) as saved:
        saved.step()
