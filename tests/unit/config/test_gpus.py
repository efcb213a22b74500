"""Values of `gpus=`."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import valid_gpus

from parallelize.config.config import Config
from parallelize.config.options import ALL_GPUS, gpus_text
from parallelize.errors import ConfigError


def parsed(value):
    """Return the parsed value of `gpus=`."""
    return Config.parse(gpus=value, process_group_backend="gloo").gpus


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (0, 0),
        (1, 1),
        (4, 4),
        ("4", 4),
        (" 4 ", 4),
        ("0", 0),
        (-1, ALL_GPUS),
        ("-1", ALL_GPUS),
        ("auto", ALL_GPUS),
        ([0], (0,)),
        ([2, 0], (2, 0)),
        ((1, 2), (1, 2)),
        (range(2), (0, 1)),
        ("0,2", (0, 2)),
        ("0, 2", (0, 2)),
        ("3,", (3,)),
        ([0, 0], (0, 0)),
        ([], 0),
    ],
)
def test_grammar(value, meaning):
    """Each form of `gpus` is parsed into the documented meaning."""
    assert parsed(value) == meaning


@pytest.mark.parametrize(
    "value",
    [True, 1.0, {0, 1}, b"01", -2, 10**30, "-2", "two", "", "0,,1", "²", "9" * 5000, [0, -1, True], [1, 1.0, "1"]],
)
def test_refused(value):
    """An invalid value is refused; the error has the value, the reason and the accepted forms."""
    with pytest.raises(ConfigError) as caught:
        parsed(value)
    (fault,) = caught.value.faults
    assert fault.what == f"gpus={value!r}"
    assert fault.why == "it is neither a number of GPUs nor a list of their indices, from 0"
    assert fault.fix.startswith("use an int (how many), a list of indices, -1 or 'auto' (all)")


@given(valid_gpus)
def test_printing_and_parsing_round_trip(value):
    """A parsed value is parsed into itself, and messages show it as Python code with the same meaning."""
    meaning = parsed(value)
    assert parsed(meaning) == meaning
    name, _, written = gpus_text(meaning).partition("=")
    assert (name, parsed(eval(written))) == ("gpus", meaning)
