"""Reading of Slurm's compressed lists of hosts and task counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import hostlists

from parallelize.cluster.environment import first_host, tasks_per_node


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("a[01-03,7]b,c", "a01b"),
        ("rack[1-2]-node[3-4],b", "rack1-node3"),
        ("b,n[1-2]", "b"),
        ("[007-009]", "007"),
        ("gpu-a100.cluster[12]", "gpu-a100.cluster12"),
    ],
)
def test_first_host(nodelist, first):
    """The first host keeps its leading zeros, and every bracket counts."""
    assert first_host(nodelist) == first


@given(hostlists())
def test_first_of_any_list(hosts):
    """The first host of a compressed list is the first one of the expanded list."""
    assert first_host(hosts.text) == hosts.names[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_tasks_per_node(runs):
    """A compressed list gives the same counts as the expanded one."""
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else f"{count}" for count, repeat in runs)
    assert tasks_per_node(text) == [count for count, repeat in runs for _ in range(repeat)]
