"""The command line of `parallelize run`, and which scripts use the decorator; runs no script."""

from __future__ import annotations

import sys

import pytest

from parallelize import ConfigError
from parallelize.cli.arguments import Command, help_text, parse
from parallelize.cli.main import main
from parallelize.cli.run import uses_decorator
from parallelize.config.config import Config
from parallelize.config.options import FROM_TEXT


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("train.py", Command("train.py", False, (), {})),
        ("--gpus 0 train.py -- --lr 0.1 -- x", Command("train.py", False, ("--lr", "0.1", "--", "x"), {"gpus": "0"})),
        ("train.py --amp=bf16 --num-nodes 2", Command("train.py", False, (), {"amp": "bf16", "num_nodes": "2"})),
        ("--verify_every=5 -m pkg.train -- -m", Command("pkg.train", True, ("-m",), {"verify_every": "5"})),
        ("--gpus -1 train.py", Command("train.py", False, (), {"gpus": "-1"})),
        ("--gpus= train.py -- ", Command("train.py", False, (), {"gpus": ""})),
    ],
)
def test_valid_command_lines(words: str, command: Command) -> None:
    """Options before and after the script, with a space or "=", and the arguments of the script after --."""
    if "--gpus=" in words:
        with pytest.raises(ConfigError, match="gpus=''"):
            parse(words.split())
        return
    assert parse(words.split()) == command


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        ("", ["no script"]),
        ("--gpus 0", ["no script"]),
        ("a.py b.py", ["a.py b.py"]),
        ("a.py -m b", ["a.py b"]),
        ("a.py -m", ["-m"]),
        ("a.py --amp", ["--amp"]),
        ("--gpus --amp O2 a.py", ["--gpus"]),
        ("a.py --lr 3 -q x", ["--lr", "-q"]),
        ("a.py --wrap x", ["--wrap"]),
        ("a.py --gpus x --seed -3 --backend dpp", ["gpus='x'", "seed=-3", "backend='dpp'"]),
        ("a.py --gpus 2 --processes 2", ["gpus=2 with processes=2"]),
    ],
)
def test_invalid_command_lines(words: str, faults: list[str]) -> None:
    """All faults of a command line are reported at once, each with the word that was passed."""
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    assert sorted(fault.what for fault in caught.value.faults) == sorted(faults)


def test_misspelt_options_get_a_suggestion() -> None:
    """The error for an unknown option suggests a similar one, and says where arguments of the script go."""
    with pytest.raises(ConfigError, match="did you mean '--num-nodes'") as caught:
        parse(["a.py", "--num-node", "2"])
    assert "come after --" in caught.value.faults[0].fix


def test_help_fits_a_screen() -> None:
    """One line per option with text from the docstring of `distributed`, at most 25 lines of 120 columns."""
    lines = help_text().splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 120
    for name in FROM_TEXT:
        (line,) = (each for each in lines if each.startswith(f"  --{name.replace('_', '-')} "))
        assert len(line.split()) > 2, line
    assert '"fsdp"' in help_text()
    assert '("30min")' in help_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 0, "usage: parallelize run"),
        (["--help"], 0, "usage: parallelize run"),
        (["run"], 0, "usage: parallelize run"),
        (["run", "a.py", "--help"], 0, "--backend"),
        (["--version"], 0, "parallelize "),
        (["rnu"], 2, "did you mean 'run'"),
        (["run", "nowhere.py"], 2, "no such file"),
        (["run", "-m", "nowhere.at_all"], 2, "no such module"),
        (["run", "-m", "json"], 2, "a package without __main__"),
        (["run", "nowhere.py", "--gpu", "2"], 2, "fix: "),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 for output on request; 2 for a refused request, with what, why and fix, and no traceback."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command looks for modules in the current folder
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert message in (err if code else out)
    assert "Traceback" not in err
    assert err == "" if code == 0 else "why: " in err


DECORATED = [
    "from parallelize import distributed\n@distributed(gpus=2)\ndef f(): ...",
    "from parallelize import distributed as spread\nf = spread()(len)",
    "import parallelize\n@parallelize.distributed()\ndef f(): ...",
    "import parallelize as p\ndef g():\n    return p.distributed(gpus=2)",
    "from parallelize.decorator import distributed\nrun = distributed",
    "from parallelize import *\nf = distributed()(len)",
    "this is no Python",
    "nul = '\0'",
]
UNDECORATED = [
    "",
    "from parallelize import parallel_model, rank\nprint(rank())",
    "from parallelize import distributed",
    "import torch.distributed as distributed\ndistributed.barrier()",
    "import parallelize\nparallelize.rank()\nother.distributed()",
    "from mine import train\ntrain()  # decorated with parallelize.distributed there",
    "'from parallelize import distributed'",
    "from .parallelize import distributed\ndistributed()",
]


@pytest.mark.parametrize("source", DECORATED)
def test_scripts_that_use_the_decorator(source: str) -> None:
    """Scripts that use the decorator, under any name, and source that does not parse."""
    assert uses_decorator(source)


@pytest.mark.parametrize("source", UNDECORATED)
def test_scripts_that_do_not_use_the_decorator(source: str) -> None:
    """All other scripts, also those that only import the decorator, or use another object of its name."""
    assert not uses_decorator(source)


def test_every_option_of_the_command_line_is_one_of_config() -> None:
    """The options that text can set are fields of Config."""
    assert FROM_TEXT.keys() <= set(Config.parse().options())
