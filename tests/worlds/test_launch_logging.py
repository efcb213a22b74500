"""Log records of the workers are handled by the caller's loggers; what a script sets by calls is in force."""

from __future__ import annotations

import logging
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelize import barrier, distributed, rank

Run = Callable[..., subprocess.CompletedProcess[str]]

NAMED = """
    import logging, sys

    log = logging.getLogger("named")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(logging.FileHandler("named.log", mode="w"))
    log.info("imported")
"""
SCRIPT = """
    import logging, sys
    from named import log
    from parallelize import distributed, rank

    class Shouting(logging.Formatter):
        def format(self, record):
            return super().format(record).upper()

    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(Shouting("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[console, logging.FileHandler("root.log")])
    logging.getLogger("quiet").setLevel(logging.ERROR)

    @distributed(processes=2)
    def train():
        log.debug("step %d", rank(), extra={"loss": 0.5})
        logging.info("epoch %d", rank())
        logging.getLogger("quiet").warning("no")
        try:
            1 / 0
        except ZeroDivisionError:
            logging.getLogger("other").warning("of rank %d", rank(), exc_info=rank() == 0)

    train()
    train.options(logs="logs")()
    logging.info("end")
"""


RECORDS = """
    import contextvars, logging, sys, time
    import torch
    from parallelize import distributed

    request = contextvars.ContextVar("request")
    request.set("mine")
    logging.addLevelName(25, "NOTICE")

    def add_request(record):
        record.request = request.get()
        return record.flag is not None

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s %(flag)s %(request)s"))
    handler.formatter.converter = lambda *_: time.gmtime()
    handler.addFilter(add_request)
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    @distributed(processes=2)
    def train(model):
        torch.nn.init.constant_(model.weight, 3.0)
        logging.info("without a flag")
        logging.log(25, "with one", extra={"flag": True})
        return 7

    model = torch.nn.Linear(1, 1)
    print(train(model), model.weight.item())
    logging.disable(25)
    train(model)
"""


def test_filters_of_the_caller(run_script: Run) -> None:
    """They see extra values, and the context of the call; one that fails costs neither later records nor the result."""
    done = run_script(RECORDS)
    assert done.stdout == "NOTICE with one True mine\n7 3.0\n"
    assert done.stderr.count("AttributeError: 'LogRecord' object has no attribute 'flag'") == 1


def test_records_reach_the_callers_handlers(run_script: Run, tmp_path: Path) -> None:
    """Rank 0's, and warnings of the others: files, formatters, levels; no worker opens a file of an imported module."""
    (tmp_path / "named.py").write_text(textwrap.dedent(NAMED))
    lines = run_script(SCRIPT).stdout.splitlines()
    assert (tmp_path / "named.log").read_text() == "imported\nstep 0\nstep 0\n"
    assert [line for line in lines if line.startswith("INFO")] == ["INFO EPOCH 0"] * 2 + ["INFO END"]
    assert lines.count("WARNING OF RANK 0") == lines.count("WARNING [RANK 1] OF RANK 1") == 2
    assert lines.count("ZERODIVISIONERROR: DIVISION BY ZERO") == 2
    assert not any(line.endswith("NO") for line in lines)
    assert (tmp_path / "root.log").read_text().count("epoch 0\n") == 2
    (records,) = (tmp_path / "logs").glob("*/rank1.log")
    assert records.read_text().startswith("DEBUG STEP 1\nINFO EPOCH 1\nWARNING OF RANK 1\n")


MIXED = """
    import logging, subprocess, sys
    from parallelize import distributed, rank

    @distributed(processes=2, logs="logs", max_restarts=1)
    def train():
        for number in range(3):
            print("out", number)
            logging.getLogger("mine").info("log %d", number)
            print("err", number, file=sys.stderr)
            logging.getLogger("mine").debug("not sent")
            print("out again", number)
        subprocess.run(["echo", "of a program"])
        if rank() == 1:
            raise ValueError("of rank 1")

    logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(message)s", stream=sys.stdout)
    try:
        train()
    except ValueError:
        print("ended")
"""


def test_a_folder_gets_a_text_file_for_each_rank(run_script: Run, tmp_path: Path) -> None:
    """As a terminal shows it: output and records in the order of time, formatted; each attempt has a folder."""
    lines = run_script(MIXED).stdout.splitlines()
    once = [text.format(number) for number in range(3) for text in ("out {}", "INFO:log {}", "out again {}")]
    assert [line for line in lines if line[:3] in {"out", "INF"}] == 2 * once
    assert lines[-1] == "ended"
    folders = list((tmp_path / "logs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"rank0.log", "rank1.log"}
        expected = ["out {}", "INFO:log {}", "err {}", "out again {}"]
        for path in folder.iterdir():
            text = path.read_text().splitlines()
            assert text[:12] == [line.format(number) for number in range(3) for line in expected]
            assert text[12:] == ["of a program"]


@distributed(processes=2)
def log_much(count: int) -> None:
    for number in range(count):
        logging.getLogger("much").info("%d", number)
    if count == 3:
        barrier()  # the first rank that fails stops the others
        raise LookupError("after the last record")


@pytest.mark.parametrize("count", [3, 3000])
def test_no_record_is_lost(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """In order; those before an exception, too."""
    with caplog.at_level(logging.INFO, logger="much"):
        try:
            log_much(count)
        except LookupError:
            assert count == 3
    found = [each for each in caplog.records if each.name == "much"]
    assert [each.getMessage() for each in found] == list(map(str, range(count)))
    assert {(each.funcName, Path(each.pathname).name) for each in found} == {("log_much", Path(__file__).name)}


@distributed(processes=2)
def warn_all() -> None:
    logging.getLogger("much").info("of rank %d", rank())


def test_all_ranks_are_logged_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    """logs="all" shows the records of all ranks."""
    with caplog.at_level(logging.INFO, logger="much"):
        warn_all.options(logs="all")()
    assert sorted(each.message for each in caplog.records if each.name == "much") == ["[rank 1] of rank 1", "of rank 0"]


EDITED = """
    import importlib
    from pathlib import Path
    import edited
    from parallelize import distributed

    train = distributed(processes=2)(edited.train)
    print(train())
    Path("edited.py").write_text("def train():\\n    return 'the new code'\\n")
    print(train())
    importlib.reload(edited)
    print(distributed(processes=2)(edited.train)())
"""


@pytest.mark.slow
def test_a_module_that_was_edited_is_named(run_script: Run, tmp_path: Path) -> None:
    """Workers import the new code; this process has the old, until the module is reloaded."""
    (tmp_path / "edited.py").write_text("def train():\n    return 'the old code'\n")
    done = run_script(EDITED)
    assert done.stdout == "the old code\nthe new code\nthe new code\n"
    assert done.stderr.count("edited.py was edited after this program imported it") == 1
