"""Parsing of Slurm's compressed lists of hosts and task counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import hostlists

from parallelize.cluster.hostlist import first_host, tasks_on
from parallelize.errors import ConfigError


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("a[01-03,7]b,c", "a01b"),
        ("rack[1-2]-node[3-4],b", "rack1-node3"),
        ("x[1-2]y[3-4]", "x1y3"),
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


@pytest.mark.parametrize(
    "nodelist", ["n[1-", "n[", "n]", "n[]", "n[a]", "a,,b", ",a", "", "n[1-2", "a b", "n[1-2,]", "a,n[1-"]
)
def test_refuses_malformed_lists(nodelist):
    """A malformed host list is refused, and the error shows it."""
    with pytest.raises(ConfigError) as caught:
        first_host(nodelist)
    (fault,) = caught.value.faults
    assert fault.what == f"SLURM_STEP_NODELIST={nodelist!r}"
    assert fault.why == "Slurm writes hosts as 'rack[1-2]-node[3-4],b'"
    assert fault.fix == "let srun set it, or export MASTER_ADDR"


@pytest.mark.parametrize(
    ("counts", "node", "found"),
    [
        ("2", 0, (2, 1)),
        ("2(x3),1", 0, (2, 4)),
        ("2(x3),1", 2, (2, 4)),
        ("2(x3),1", 3, (1, 4)),
        ("2(x3),1", 4, (0, 4)),
        ("1,8(x2)", 1, (8, 3)),
        ("2(x99999)", 5, (2, 99999)),
    ],
)
def test_tasks_on(counts, node, found):
    """Returns the tasks on a node and the number of nodes; a node past the end has no tasks."""
    assert tasks_on(node, counts) == found


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 20))
def test_tasks_on_any_node(runs, node):
    """A compressed list gives the same counts as the expanded one."""
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else f"{count}" for count, repeat in runs)
    full = [count for count, repeat in runs for _ in range(repeat)]
    assert tasks_on(node, text) == (full[node] if node < len(full) else 0, len(full))


@pytest.mark.parametrize("counts", ["", "x", "2(3)", "2(x)", "2,,1", "-1", "2 (x2)"])
def test_refuses_malformed_counts(counts):
    """Malformed counts are refused, and the error shows them."""
    with pytest.raises(ConfigError) as caught:
        tasks_on(0, counts)
    (fault,) = caught.value.faults
    assert fault.what == f"SLURM_STEP_TASKS_PER_NODE={counts!r}"
    assert (fault.why, fault.fix) == ("Slurm writes counts as '2(x3),1'", "let srun set it")
