"""Workers' output is copied live, with characters, lines and progress bars intact."""

from __future__ import annotations

import io
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.call.logs import RecordFile
from parallelize.launchers.output import OutputTail, forwarded, outputs_of_ranks, rank_file, read_output


def forwarded_in_pieces(pieces: list[bytes], folder: Path, prefix: str = "") -> list[str]:
    """Return the text that was forwarded after each piece and at the end."""
    path, to = folder / "rank0.out", io.StringIO()
    path.write_bytes(b"")
    stream = OutputTail(path, to, prefix)
    steps = []
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        stream.forward(is_last=False)
        steps.append(to.getvalue())
    stream.forward(is_last=True)
    return [*steps, to.getvalue()]


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_text_arrives_whole_wherever_it_was_cut(
    text: str, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without a prefix the text is unchanged, however it was split."""
    data = text.encode(errors="surrogatepass")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    folder = tmp_path_factory.getbasetemp()
    assert forwarded_in_pieces(pieces, folder)[-1] == data.decode(errors="replace")


def test_lines_under_a_prefix_wait_for_their_end(tmp_path: Path) -> None:
    """An incomplete line is held back: ranks do not mix their lines."""
    steps = forwarded_in_pieces([b"loss ", b"0.5\nnext\n", b"end"], tmp_path, "[rank 1] ")
    assert steps == [
        "",
        "[rank 1] loss 0.5\n[rank 1] next\n",
        "[rank 1] loss 0.5\n[rank 1] next\n",
        "[rank 1] loss 0.5\n[rank 1] next\n[rank 1] end\n",
    ]


def test_a_bar_under_a_prefix_is_a_line_per_poll(tmp_path: Path) -> None:
    """Of several states of a bar between two polls, only the final one is forwarded."""
    steps = forwarded_in_pieces([b"\r 10%\r 20%\r 30%\r", b" 40%\r\n"], tmp_path, "[rank 1] ")
    assert steps == ["[rank 1]  30%\n", "[rank 1]  30%\n[rank 1]  40%\n", "[rank 1]  30%\n[rank 1]  40%\n"]


def test_a_console_that_lacks_a_character_shows_the_rest(tmp_path: Path) -> None:
    """An ASCII terminal shows a question mark for it."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    (tmp_path / "rank0.out").write_text("5 µs\n", encoding="utf-8")
    OutputTail(tmp_path / "rank0.out", console).forward(is_last=True)
    assert console.buffer.getvalue() == b"5 ?s\n"


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class WriteOnly:
    def write(self, text: str) -> None:
        """Accept text; this stream has no flush()."""


@pytest.mark.parametrize("console", [None, WriteOnly(), closed_stream()], ids=["none", "incomplete", "closed"])
def test_a_missing_incomplete_or_closed_console_is_no_failure(console: Any, tmp_path: Path) -> None:
    """sys.stdout is None without a terminal, a GUI may replace it by any object, and a program may close it."""
    (tmp_path / "rank0.out").write_text("text\n")
    with forwarded([OutputTail(tmp_path / "rank0.out", console), OutputTail(tmp_path / "missing", io.StringIO())]):
        pass


def test_a_worker_that_ended_before_it_wrote_has_no_output(tmp_path: Path) -> None:
    """A worker that is ended while it starts has not opened its files yet."""
    (tmp_path / "rank0.out").write_text("line\n")
    assert read_output(tmp_path, 0) == ("line\n", "")
    assert read_output(tmp_path, 1) == ("", "")


def test_output_and_records_of_a_rank_are_shown_in_the_order_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in three files, all read at once: the records say where in the output they belong."""
    streams = [rank_file(tmp_path, 1, stream) for stream in ("out", "err")]
    records = RecordFile(rank_file(tmp_path, 1, "records"), streams)
    for stream in streams:
        stream.touch()
    for number in range(2):
        with streams[0].open("a") as out, streams[1].open("a") as err:
            out.write(f"out {number}\n")
            out.flush()
            records.mark(json.dumps({"name": "of", "msg": f"log {number}", "levelno": logging.INFO}) + "\n")
            records.mark()
            err.write(f"err {number}\n")
            err.flush()
            records.mark()
            out.write(f"out again {number}\n")
    # pytest's handlers have a format of their own.
    monkeypatch.setattr(logging.root, "handlers", [])
    (output,) = outputs_of_ranks(tmp_path, [1], str(tmp_path / "logs"), "call")
    output.forward(is_last=True)
    text = (tmp_path / "logs" / "call" / "rank1.log").read_text()
    lines = ["out {}", "log {}", "err {}", "out again {}"]
    assert text.splitlines() == [line.format(number) for number in range(2) for line in lines]
    assert capsys.readouterr() == ("", "")
