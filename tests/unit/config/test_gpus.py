"""Values of `gpus=`."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import invalid_options, valid_gpus

from parallelize.config.gpus import Gpus, parse_gpus
from parallelize.errors import Fault


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (0, Gpus(count=0)),
        (1, Gpus(count=1)),
        (4, Gpus(count=4)),
        ("4", Gpus(count=4)),
        (" 4 ", Gpus(count=4)),
        ("0", Gpus(count=0)),
        (-1, Gpus.ALL),
        ("-1", Gpus.ALL),
        ("auto", Gpus.ALL),
        ([0], Gpus(indices=(0,))),
        ([2, 0], Gpus(indices=(2, 0))),
        ((1, 2), Gpus(indices=(1, 2))),
        (range(2), Gpus(indices=(0, 1))),
        ("0,2", Gpus(indices=(0, 2))),
        ("0, 2", Gpus(indices=(0, 2))),
        ("3,", Gpus(indices=(3,))),
        ([0, 0], Gpus(indices=(0, 0))),
        ([], Gpus(count=0)),
        (Gpus(count=2), Gpus(count=2)),
    ],
)
def test_grammar(value, meaning):
    """Each form of `gpus` is parsed into the documented meaning."""
    assert parse_gpus(value) == meaning


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "its type bool is not valid"),
        (False, "its type bool is not valid"),
        (1.0, "its type float is not valid"),
        ({0, 1}, "its type set is not valid"),
        (b"01", "its type bytes is not valid"),
        (-2, "-1 is the only negative number with a meaning: all GPUs"),
        (10**30, "it is the number of GPUs per node, and no node has so many"),
        ("-2", "it is neither a number nor a list of indices"),
        ("two", "it is neither a number nor a list of indices"),
        ("", "it is neither a number nor a list of indices"),
        ("0,,1", "it is neither a number nor a list of indices"),
        ("²", "it is neither a number nor a list of indices"),
        ("9" * 5000, "it is neither a number nor a list of indices"),
        ([0, -1, True], "not an index of a GPU (they count from 0): -1, True"),
        ([1, 1.0, "1"], "not an index of a GPU (they count from 0): 1.0, '1'"),
    ],
)
def test_refused(value, why):
    """An invalid value is refused; the error has the value, the reason and the accepted forms."""
    fault = parse_gpus(value)
    assert isinstance(fault, Fault)
    assert fault.what == f"gpus={value!r}"
    assert fault.why == why
    assert fault.fix.startswith("use an int (how many), a list of indices, -1 or 'auto' (all)")


@given(valid_gpus)
def test_printing_and_parsing_round_trip(value):
    """The text of a Gpus is parsed into an equal one."""
    meaning = parse_gpus(value)
    assert isinstance(meaning, Gpus)
    assert parse_gpus(str(meaning)) == meaning
    assert parse_gpus(meaning) == meaning


@given(valid_gpus)
def test_is_shown_as_a_user_writes_it(value):
    """Error messages show `gpus` as Python code with the same meaning."""
    meaning = parse_gpus(value)
    assert isinstance(meaning, Gpus)
    name, _, written = meaning.as_option.partition("=")
    assert name == "gpus"
    assert parse_gpus(eval(written)) == meaning


@given(invalid_options["gpus"])
def test_never_raises(value):
    """An invalid value gives a Fault instead of an exception, so that the other options are checked too."""
    assert isinstance(parse_gpus(value), Fault)


@pytest.mark.parametrize(
    ("gpus", "indices", "missing"),
    [
        (Gpus.ALL, (0, 1), ""),
        (Gpus.NONE, (), ""),
        (Gpus(count=2), (0, 1), ""),
        (Gpus(count=3), (0, 1, 2), "2"),
        (Gpus(count=4), (0, 1, 2, 3), "2 to 3"),
        (Gpus(indices=(1, 0)), (1, 0), ""),
        (Gpus(indices=(5, 1, 9)), (5, 1, 9), "5, 9"),
    ],
)
def test_on_a_node_of_two(gpus, indices, missing):
    """The requested indices on a node, and those that it lacks."""
    assert tuple(gpus.indices_on(2)) == indices
    assert gpus.missing_on(2) == missing
