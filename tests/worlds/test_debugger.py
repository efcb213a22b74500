"""pdb in ranks: of calls from a terminal, and from a notebook."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pexpect = pytest.importorskip("pexpect")

TRAIN = """
import os
import pdb
import time
import torch
import fractions
from os.path import join as joined
from parallelize import all_reduce, distributed, rank

SCALE, TABLE = 3, {"a": [1, 2]}

def unsent(x):
    return x * SCALE

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            breakpoint()
        return index**2

@distributed(processes=2)
def train():
    x = torch.tensor(rank() + 1.0)
    print("at work", os.getpid())
    breakpoint()
    return all_reduce(10 * x, "mean").item()

@distributed(processes=2, timeout=6)
def wait(seconds):
    if rank() == 1:
        breakpoint()
        time.sleep(seconds)
    return all_reduce(torch.ones(1), "mean").item()

@distributed(processes=2)
def fail(key):
    if rank() == 1:
        return {"lr": 1}[key]
    all_reduce(torch.ones(1), "mean")

def count_line(number):
    return number

@distributed(processes=2)
def count():
    total = 0
    breakpoint()
    for number in range(2):
        total += count_line(number)
    return total

@distributed(processes=2)
def load():
    if rank() == 1:
        for batch in torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1):
            return print("loaded", batch.tolist())

"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts a program in a terminal of its own."""

    def started(line: str, **environ: str) -> Any:
        script = tmp_path / "train.py"
        script.write_text(f"{TRAIN}\nif __name__ == '__main__':\n    {line}\n")
        terminal = pexpect.spawn(
            sys.executable,
            [str(script)],
            env={**os.environ, **environ, "TERM": "dumb", "INPUTRC": os.devnull},
            timeout=600,  # a busy machine takes long
            encoding="utf-8",
            echo=False,
        )
        terminals.append(terminal)
        return terminal

    terminals: list[Any] = []
    yield started
    for terminal in terminals:
        terminal.close(force=True)


# Python 3.13 stops at the call of breakpoint() itself.
STOPPED = r'-> (breakpoint\(\)|return all_reduce\(10 \* x, "mean"\).item\(\))'


def asked(terminal: Any) -> int:
    """Return the rank of the next prompt."""
    terminal.expect(r"\[rank (\d)\] \(Pdb\) ")
    return int(terminal.match[1])


def interrupt_the_prompt(terminal: Any) -> None:
    """Press Ctrl-C at a prompt, again if nothing happens.

    Python's readline notices a signal only while it waits for a key (`readline_until_enter_or_signal`). One that comes
    between the prompt and that is noticed at the next one.
    """
    while True:
        terminal.sendintr()
        if terminal.expect_exact(["--KeyboardInterrupt--", pexpect.TIMEOUT], timeout=30) == 0:
            return


def functions_in(stack: str) -> list[str]:
    """Return the functions that `where` lists, the outermost first."""
    return re.findall(r"\(\d+\)(\w+)\(", stack)


@pytest.mark.slow
def test_the_stack_begins_with_the_function(start: Callable[..., Any]) -> None:
    """`where` lists the function and what it has called, and not what has called it; `up` ends there."""
    terminal = start("train()")
    rank = asked(terminal)
    terminal.sendline("where")
    assert asked(terminal) == rank
    assert functions_in(terminal.before) == ["train"]
    terminal.sendline("up")
    terminal.expect_exact("Oldest frame")
    assert asked(terminal) == rank


def test_ranks_are_debugged_one_after_the_other(start: Callable[..., Any]) -> None:
    """The prompt names the rank; `ranks` lists those that have stopped, `rank 1` goes to one of them."""
    terminal = start("print('result', train())")
    terminal.expect(rf"train.py\(\d+\)train\(\)\s+{STOPPED}\s")
    first = asked(terminal)
    terminal.sendline("p 'x is', x")
    terminal.expect_exact(f"('x is', tensor({first + 1}.))")
    assert asked(terminal) == first
    terminal.sendline("rank 7")
    terminal.expect_exact("rank 7 has not stopped")
    listed = ""
    while "runs" in listed or not listed:  # until the other rank has stopped, too
        asked(terminal)
        terminal.sendline("ranks")
        terminal.expect(r"rank 0 (.*)\s+rank 1 (.*)\s")
        listed = terminal.match[0]
    assert listed.count("train()") == 2
    terminal.sendline(f"rank {1 - first}")
    assert asked(terminal) == first  # before the line
    assert asked(terminal) == 1 - first
    interrupt_the_prompt(terminal)
    assert asked(terminal) == 1 - first
    terminal.sendline("x = x + 4")
    assert asked(terminal) == 1 - first
    terminal.sendline("c")  # it waits for the other rank in all_reduce
    assert asked(terminal) == first
    terminal.sendline("c")
    terminal.expect_exact("result 35.0")
    terminal.expect(pexpect.EOF)


def stop_all(terminal: Any) -> int:
    """Wait until both ranks have stopped; return the one that has the keyboard, at its prompt."""
    listed = ""
    while listed.count("> ") < 2:
        owner = asked(terminal)
        terminal.sendline("ranks")
        terminal.expect(r"rank 0 (.*)\s+rank 1 (.*)\s")
        listed = terminal.match[0]
    assert asked(terminal) == owner
    return owner


def test_a_slow_command_keeps_the_keyboard(start: Callable[..., Any]) -> None:
    """Another rank that has stopped is not asked meanwhile, so that it gets no line that was not meant for it."""
    terminal = start("print('result', train())")
    owner = stop_all(terminal)
    for _ in range(2):
        terminal.sendline("time.sleep(1.5)")
        assert asked(terminal) == owner
    terminal.sendline("p (time.sleep(1.5), x)[1]")
    terminal.expect_exact(f"tensor({owner + 1}.)")
    assert asked(terminal) == owner
    terminal.sendline("c")
    assert asked(terminal) == 1 - owner
    terminal.sendline("c")
    terminal.expect_exact("result 15.0")
    terminal.expect(pexpect.EOF)


@pytest.mark.slow
def test_a_step_that_waits_for_another_rank_lets_it_go_on(start: Callable[..., Any]) -> None:
    """`n` over a collective: the other rank has to come there, and its prompt is next; then both go on."""
    terminal = start("print('result', train())")
    owner = stop_all(terminal)
    terminal.sendline("n")
    if sys.version_info >= (3, 13):
        assert asked(terminal) == owner
        terminal.sendline("n")
    assert asked(terminal) == 1 - owner
    terminal.sendline("ranks")
    terminal.expect_exact(f"rank {owner} waits in a collective")
    assert asked(terminal) == 1 - owner
    terminal.sendline("c")
    terminal.expect_exact("--Return--")
    assert asked(terminal) == owner
    terminal.sendline("n")  # the end of the function
    terminal.expect_exact("result 15.0")
    terminal.expect(pexpect.EOF)


@pytest.mark.slow
def test_the_prompt_has_the_names_of_the_script(start: Callable[..., Any]) -> None:
    """What can be imported, and plain values; of all else, the error says how to get it."""
    terminal = start("print('result', train())")
    owner = stop_all(terminal)
    for line, shown in {
        "p SCALE + len(TABLE['a'])": "5",
        "p joined('a', 'b')": "'a/b'",
        "fractions.Fraction(1, 2)": "Fraction(1, 2)",
        "display SCALE": "display SCALE: 3",
        "p unsent(2)": "`unsent` was not sent to the workers: the function does not mention it. A line `unsent` in",
    }.items():
        terminal.sendline(line)
        terminal.expect_exact(shown)
        assert asked(terminal) == owner
    terminal.sendline("interact")
    for line, shown in {
        "TABLE": "{'a': [1, 2]}",
        "unsent(2)": "`unsent` was not sent to the workers",
    }.items():
        terminal.expect_exact(">>> ")
        terminal.sendline(line)
        terminal.expect_exact(shown)
    terminal.expect_exact(">>> ")
    terminal.sendintr()
    terminal.expect_exact("KeyboardInterrupt")
    terminal.expect_exact(">>> ")
    terminal.sendeof()
    assert asked(terminal) == owner
    terminal.sendline("c")
    assert asked(terminal) == 1 - owner
    terminal.sendline("c")
    terminal.expect_exact("result 15.0")
    terminal.expect(pexpect.EOF)
    assert "was changed" not in terminal.before


@pytest.mark.slow
def test_breakpoints_have_commands(start: Callable[..., Any]) -> None:
    """`until` and the commands of a breakpoint stop and go on as in one process."""
    terminal = start("print('result', count())")
    owner = stop_all(terminal)
    terminal.sendline("b count_line")
    terminal.expect_exact("Breakpoint 1")
    assert asked(terminal) == owner
    terminal.sendline("commands 1")
    terminal.expect_exact("(com) ")
    terminal.sendline("p 'seen', number")
    terminal.expect_exact("(com) ")
    terminal.sendline("continue")
    assert asked(terminal) == owner
    # What the commands print is shown when no prompt waits for the user.
    shown = ""
    for line in ("c", "until", "c"):
        terminal.sendline(line)
        if line != "c" or not shown:
            assert asked(terminal) == 1 - owner
            shown += terminal.before + "\n"
    terminal.expect_exact("result 1")
    shown += terminal.before
    terminal.expect(pexpect.EOF)
    assert shown.count("('seen', ") == 2


@pytest.mark.slow
def test_a_timeout_does_not_count_what_the_user_takes(start: Callable[..., Any]) -> None:
    """A rank waits for one that is stopped for longer than timeout=; without a debugger the timeout ends the call."""
    terminal = start("print('result', wait(0)); wait(60)")
    assert asked(terminal) == 1
    time.sleep(15)
    terminal.sendline("c")
    terminal.expect_exact("result 1.0")
    assert asked(terminal) == 1
    terminal.sendline("c")
    terminal.expect(r"SyncError: rank 0 waits at train.py:\d+ in all_reduce(.|\n)*timeout=6 s is over")
    terminal.expect(pexpect.EOF)


@pytest.mark.slow
def test_quit_ends_the_call(start: Callable[..., Any]) -> None:
    """`q` in one rank raises BdbQuit in the caller, as in one process; the other rank is ended, too."""
    terminal = start("train()")
    asked(terminal)
    terminal.sendline("q")
    if terminal.expect(["bdb.BdbQuit", r"\(Pdb\) "]):  # the other rank was asked before the first had ended
        terminal.sendline("p x")
        terminal.expect_exact("bdb.BdbQuit")
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_user_types(start: Callable[..., Any]) -> None:
    """The next line finds it out."""
    terminal = start("train()")
    terminal.expect(r"at work (\d+)")
    pid = int(terminal.match[1])
    asked(terminal)
    os.kill(pid, signal.SIGKILL)
    terminal.sendline("p x")
    terminal.expect("WorkerError: rank 0 .* SIGKILL")
    terminal.expect(pexpect.EOF)


@pytest.mark.slow
def test_an_uncaught_exception_is_inspected(start: Callable[..., Any]) -> None:
    """PARALLELIZE_POST_MORTEM=1 stops where it was raised; `q` lets it go on to the caller."""
    terminal = start("fail('momentum')", PARALLELIZE_POST_MORTEM="1")
    terminal.expect_exact("KeyError: 'momentum'")
    terminal.expect_exact("[rank 1] (Pdb) ")
    terminal.sendline("p key * 2")
    terminal.expect_exact("'momentummomentum'")
    assert asked(terminal) == 1
    terminal.sendline("where")
    assert asked(terminal) == 1
    assert functions_in(terminal.before) == ["fail"]
    terminal.sendline("q")
    terminal.expect(r"KeyError: 'momentum'\s+rank 1 of 2")
    # Rank 0 has lost its connection to rank 1, and does not ask.
    assert "RuntimeError" not in terminal.before
    terminal.expect(pexpect.EOF)


@pytest.mark.slow
def test_the_worker_of_a_loader_is_debugged(start: Callable[..., Any]) -> None:
    """A breakpoint in a dataset stops in the process that reads it."""
    terminal = start("load.options(logs='all')()")
    terminal.expect_exact("[rank 1] (Pdb) ")
    terminal.sendline("p 'index', index")
    terminal.expect_exact("('index', 3)")
    terminal.sendline("c")
    terminal.expect_exact("loaded [0, 1, 4, 9]")
    terminal.expect(pexpect.EOF)


@pytest.mark.slow
def test_a_notebook_asks_for_the_lines() -> None:
    """The notebook shows the lines of the cell, and its input field gives the debugger its commands."""
    client = pytest.importorskip("jupyter_client.manager")
    manager, kernel = client.start_new_kernel(kernel_name="python3")
    commands, shown = ["p 'x is', x", "c", "c"], []

    def answer(message: Any) -> None:
        shown.append(message["content"]["prompt"])
        kernel.input(commands.pop(0))

    def show(message: Any) -> None:
        shown.append(message["content"].get("text", ""))

    try:
        code = textwrap.dedent(TRAIN) + "print('result', train())"
        reply = kernel.execute_interactive(code, allow_stdin=True, stdin_hook=answer, output_hook=show, timeout=200)
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(shown)
    assert reply["content"]["status"] == "ok", text
    assert re.search(STOPPED, text)
    assert "[rank 0] (Pdb) " in text
    assert "[rank 1] (Pdb) " in text
    assert "('x is', tensor(" in text
    assert "result 15.0" in text
