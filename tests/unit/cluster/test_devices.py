"""Which devices a request names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from strategies import invalid_options, valid_gpus

from parallelize.cluster.devices import Gpus, Hardware, compose_mask, parse_gpus, probe
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
    """Each form of `gpus` means what the design says it means."""
    assert parse_gpus(value) == meaning


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "a bool names no devices"),
        (False, "a bool names no devices"),
        (1.0, "a float names no devices"),
        ({0, 1}, "a set names no devices"),
        (b"01", "a bytes names no devices"),
        (-2, "-1 is the only negative number with a meaning: all GPUs"),
        (10**30, "it counts the GPUs of one node, which has fewer"),
        ("-2", "it is neither a number nor a list of indices"),
        ("two", "it is neither a number nor a list of indices"),
        ("", "it is neither a number nor a list of indices"),
        ("0,,1", "it is neither a number nor a list of indices"),
        ("²", "it is neither a number nor a list of indices"),
        ("9" * 5000, "it is neither a number nor a list of indices"),
        ([0, -1, True], "no index of a GPU, those count from 0: -1, True"),
        ([1, 1.0, "1"], "no index of a GPU, those count from 0: 1.0, '1'"),
    ],
)
def test_refused(value, why):
    """What names no devices is refused with the value, the reason and the grammar."""
    fault = parse_gpus(value)
    assert isinstance(fault, Fault)
    assert fault.what == f"gpus={value!r}"
    assert fault.why == why
    assert fault.fix.startswith("use an int (how many), a list of indices, -1 or 'auto' (all)")


@given(valid_gpus)
def test_printing_and_parsing_round_trip(value):
    """What a request prints is read back as the same request."""
    meaning = parse_gpus(value)
    assert isinstance(meaning, Gpus)
    assert parse_gpus(str(meaning)) == meaning
    assert parse_gpus(meaning) == meaning


@given(valid_gpus)
def test_is_shown_as_a_user_writes_it(value):
    """What errors show of a request is Python that means the same."""
    meaning = parse_gpus(value)
    assert isinstance(meaning, Gpus)
    name, _, written = meaning.asked.partition("=")
    assert name == "gpus"
    assert parse_gpus(eval(written)) == meaning


@given(invalid_options["gpus"])
def test_never_raises(value):
    """A value without a meaning is a Fault, so that the request's other faults are found too."""
    assert isinstance(parse_gpus(value), Fault)


@pytest.mark.parametrize(
    ("gpus", "of", "missing"),
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
def test_on_a_node_of_two(gpus, of, missing):
    """The indices meant on a node, and those that it lacks."""
    assert tuple(gpus.of(2)) == of
    assert gpus.missing(2) == missing


@pytest.mark.parametrize(
    ("mask", "indices", "composed"),
    [
        (None, (0, 2), "0,2"),
        (None, (), ""),
        ("4,5,6,7", (0, 2), "4,6"),
        ("4, 5 ,6", (2, 0), "6,4"),
        ("GPU-8932f937,GPU-1a2b3c4d", (1,), "GPU-1a2b3c4d"),
        ("MIG-GPU-8932f937/1/0", (0,), "MIG-GPU-8932f937/1/0"),
        ("3", (0, 0), "3,3"),
        ("", (), ""),
    ],
)
def test_composes_with_the_users_mask(mask, indices, composed):
    """Entries of the user's mask are picked, of whatever form, and never replaced."""
    assert compose_mask(mask, indices) == composed


def test_probe_agrees_with_torch():
    """What is probed is what torch can use."""
    found = probe()
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        assert found == Hardware(accelerator.type, torch.accelerator.device_count())
    else:
        assert found == Hardware("cpu", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_probe_leaves_the_driver_alone(run_script):
    """After a probe no context exists, and a fork may still use the GPUs."""
    run_script("""
        import os

        import torch
        from parallelize.cluster.devices import probe

        assert probe().count > 0
        assert not torch.cuda.is_initialized()
        if os.fork() == 0:
            torch.zeros(1, device="cuda")
            os._exit(0)
        assert os.wait()[1] == 0
    """)
