"""Reading of Slurm's compressed lists of hosts and task counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import hostlists

from parallelize.cluster.environment import first_host, tasks_per_node


@given(hostlists())
def test_first_of_any_list(hosts):
    """The first host of a compressed list is the first one of the expanded list."""
    assert first_host(hosts.text) == hosts.names[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_tasks_per_node(runs):
    """A compressed list gives the same counts as the expanded one."""
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else f"{count}" for count, repeat in runs)
    assert tasks_per_node(text) == [count for count, repeat in runs for _ in range(repeat)]
