"""Record a terminal in which three programs run, as an animated SVG: `python record.py`.

The programs run in a real terminal, and the SVG shows what the terminal shows. Only three things
change: long waits are shortened, long lines break between words, and the temporary folder is
removed from paths.

A *scene* is one session of a shell. Each of its *steps* is a command that is typed, or a line that
a program prints. The text of all steps is laid out in *rows* of the screen. The *pen* is the cursor
and a cover over the text that the terminal has not shown yet. Where the pen moves on, text appears.
"""

import bisect
import html
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pexpect

FOLDER = Path(__file__).parent
RECORDING = FOLDER / "recording.svg"
PROGRAMS = {
    "train.py": FOLDER.parent / "00_quickstart.py",
    "mistake.py": FOLDER / "mistake.py",
    "debug.py": FOLDER / "debug.py",
}
COMMANDS_OF_SCENES = {
    "Two processes train the model": [
        "sed -n 8,20p train.py",
        "python train.py",
    ],
    "Only rank 0 calls barrier(): the error names the line and the fix": [
        "grep -n -A 2 'if rank() == 0' mistake.py",
        "python mistake.py 2>&1 | grep -A 2 SyncError",
    ],
    "breakpoint() opens pdb in rank 1": [
        "grep -n -A 1 'if rank() == 1' debug.py",
        "python debug.py",
        "p loss",
        "ranks",
        "c",
    ],
}
TITLE = "parallelize in a terminal: two processes train, an error names its fix, pdb in a rank"
DESCRIPTION = (
    "The terminal shows three scenes. First, a training function with a decorator runs in two "
    "processes and prints its losses. Second, only rank 0 calls barrier, and the program ends "
    "with a SyncError that names the line and the fix. Third, breakpoint() in rank 1 opens a "
    "pdb prompt: it prints the loss and lists the ranks, and then the program continues."
)
PROMPT = re.compile(r"\$ |\[rank \d+\] \(Pdb\) ")

# The recording takes this long. The other times are stretched to fill it: only their ratios count.
LENGTH_S = 18.0
KEY_S = 0.02
LONGEST_WAIT_S = 0.6
SHORTEST_PAUSE_S = 0.3
READING_S_PER_CHARACTER = 0.006
END_OF_SCENE_S = 1.0
END_OF_RECORDING_S = 2.5

# Pixels, except for the columns. A character of common monospace fonts is 0.6 em wide.
COLUMNS = 98
CHARACTER_WIDTH = 8
FONT_SIZE = 13.3
ROW_HEIGHT = 18
BASELINE = 13
TITLE_HEIGHT = 32
MARGIN = 12
WIDTH = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN

STYLE = f"""
text {{ font: {FONT_SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", \
"Liberation Mono", monospace; white-space: pre }}
.output {{ fill: #c9d1d9 }}
.window, .cover {{ fill: #161b22 }}
.border {{ fill: none; stroke: #6e7681 }}
.title {{ fill: #a5b1bd; text-anchor: middle }}
.prompt {{ fill: #7ee787 }}
.typed {{ fill: #ffffff; font-weight: bold }}
.error {{ fill: #ffa198 }}
.fix {{ fill: #7ee787 }}
.cursor {{ fill: #c9d1d9 }}
.pen {{ pointer-events: none }}
.scene {{ visibility: hidden }}
.scene:last-of-type {{ visibility: visible }}
@media (prefers-reduced-motion: no-preference) {{
.scene, .pen {{ animation: {LENGTH_S:g}s step-end infinite }}
}}
"""


@dataclass(frozen=True)
class Step:
    """A command that was typed, or a line of output, and how long the terminal took to show it."""

    text: str
    seconds: float
    is_typed: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the screen. Its first character is number `start` of the text of its scene."""

    text: str
    start: int
    style: str


@dataclass(frozen=True)
class Move:
    """A jump of the pen to the end of the first `shown` characters of its scene."""

    at_s: float
    shown: int
    # The keys that are typed from here on: each moves the pen by one character.
    keys: int = 0


@dataclass(frozen=True)
class Scene:
    """What a scene shows, and when: `start_s` and `end_s` count from the start of the recording."""

    number: int
    title: str
    rows: list[Row]
    moves: list[Move]
    start_s: float
    end_s: float


def record_scene(commands, folder):
    """Type the commands in a shell that runs in the folder, and return the steps."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PS1": "$ ",
        "PROMPT_COMMAND": "",
        "HISTFILE": os.devnull,
        # The terminal gets plain text only: no colors, and no sequences that move its cursor.
        "TERM": "dumb",
        "NO_COLOR": "1",
        "INPUTRC": os.devnull,
    }
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "--noediting"],
        cwd=folder,
        env=environment,
        dimensions=(50, 200),
        encoding="utf-8",
        timeout=240,
    )
    with shell:
        steps = read_until_prompt(shell, folder)
        for command in commands:
            shell.send(command)
            shell.expect_exact(command)
            steps.append(Step(command, KEY_S * len(command), is_typed=True))
            shell.send("\n")
            steps += read_until_prompt(shell, folder)
    return steps


def read_until_prompt(shell, folder):
    """Return a step for each line that the terminal shows, up to and with the next prompt."""
    steps = []
    has_prompt = False
    while not has_prompt:
        start_s = time.monotonic()
        # A line is taken off as soon as it is complete, so that ^ is the beginning of the next.
        has_prompt = shell.expect([r"\r\n", f"^({PROMPT.pattern})"]) == 1
        text = shell.before + shell.after
        text = text.replace("\r\n", "\n").replace(f"{folder}/", "")
        steps.append(Step(text, time.monotonic() - start_s))
    return steps


def lay_out(steps):
    """Return the rows of a scene: lines that are too long go on in the next row."""
    rows = []
    start = 0
    for line in "".join(step.text for step in steps).split("\n"):
        style = style_of(line)
        rest = line
        while len(rest) > COLUMNS:
            after_space = rest.rfind(" ", 0, COLUMNS) + 1
            end = after_space or COLUMNS
            rows.append(Row(rest[:end], start, style))
            start += end
            rest = rest[end:]
        rows.append(Row(rest, start, style))
        start += len(rest) + len("\n")
    return rows


def style_of(line):
    """Return the class of the style sheet for a line of output."""
    if "SyncError" in line and not PROMPT.match(line):
        return "error"
    if line.startswith("  fix:"):
        return "fix"
    return "output"


def moves_of_pen(steps, start_s):
    """Return the moves of the pen in a scene that begins at `start_s`, and when its text ends."""
    moves = []
    at_s = start_s
    shown = 0
    characters_to_read = 0
    for step in steps:
        if step.is_typed:
            at_s += max(SHORTEST_PAUSE_S, READING_S_PER_CHARACTER * characters_to_read)
            characters_to_read = 0
            moves.append(Move(at_s, shown, keys=len(step.text)))
            at_s += step.seconds
        else:
            at_s += min(step.seconds, LONGEST_WAIT_S)
            characters_to_read += len(step.text)
        shown += len(step.text)
        moves.append(Move(at_s, shown))
    return moves, at_s + READING_S_PER_CHARACTER * characters_to_read


def scenes_of(steps_of_scenes):
    """Lay out the scenes, one after the other in time."""
    scenes = []
    start_s = 0.0
    for number, (title, steps) in enumerate(steps_of_scenes.items(), start=1):
        moves, end_s = moves_of_pen(steps, start_s)
        end_s += END_OF_SCENE_S
        if number == len(steps_of_scenes):
            end_s += END_OF_RECORDING_S
        scenes.append(Scene(number, title, lay_out(steps), moves, start_s, end_s))
        start_s = end_s
    return scenes


def top_of_row(index):
    """Return the y of the upper edge of a row."""
    return TITLE_HEIGHT + MARGIN + index * ROW_HEIGHT


def position(shown, rows):
    """Return the x and y of the pen when the first `shown` characters of a scene are visible."""
    starts = [row.start for row in rows]
    index = bisect.bisect_right(starts, shown) - 1
    x = MARGIN + (shown - starts[index]) * CHARACTER_WIDTH
    return x, top_of_row(index)


def draw(steps_of_scenes):
    """Return the recording as the text of an SVG."""
    scenes = scenes_of(steps_of_scenes)
    total_s = scenes[-1].end_s
    height = top_of_row(max(len(scene.rows) for scene in scenes)) + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    names = 'role="img" aria-labelledby="title description"'
    border = f'x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {names}>',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="description">{DESCRIPTION}</desc>',
        f"<style>{STYLE}",
    ]
    for scene in scenes:
        lines += [scene_keyframes(scene, total_s), *pen_keyframes(scene, total_s)]
    lines += [
        "</style>",
        f'<clipPath id="window"><rect {border}/></clipPath>',
        f'<rect class="window" {border}/>',
    ]
    for scene in scenes:
        lines += draw_scene(scene, height)
    lines += [
        # The covers of the pens hide the border, so it is painted last.
        f'<path class="border" d="M0 {TITLE_HEIGHT}.5H{WIDTH}"/>',
        f'<rect class="border" {border}/>',
        "</svg>\n",
    ]
    return "\n".join(lines)


def draw_scene(scene, height):
    """Return the lines of the SVG for a scene. Without animation its pen is at the end."""
    clip = 'clip-path="url(#window)"'
    lines = [
        f'<g class="scene" {clip} style="animation-name: scene{scene.number}">',
        f'<text class="title" x="{WIDTH / 2:g}" y="21">{html.escape(scene.title)}</text>',
    ]
    for index, row in enumerate(scene.rows):
        lines.append(draw_row(row, top_of_row(index)))
    x, y = position(scene.moves[-1].shown, scene.rows)
    place = f'style="animation-name: pen{scene.number}" transform="translate({x} {y})"'
    cover = f"M0 0H{WIDTH}V{height}H-{WIDTH}V{ROW_HEIGHT}H0Z"
    cursor = f'width="{CHARACTER_WIDTH}" height="{ROW_HEIGHT - 2}"'
    lines += [
        f'<g class="pen" {place}>',
        # The rest of the row that the pen is in, and all rows below.
        f'<path class="cover" d="{cover}"/>',
        f'<rect class="cursor" {cursor}/>',
        "</g>",
        "</g>",
    ]
    return lines


def draw_row(row, top):
    """Return a row as an SVG text."""
    content = html.escape(row.text, quote=False)
    prompt = PROMPT.match(row.text)
    if prompt:
        command = html.escape(row.text[prompt.end() :], quote=False)
        content = f'<tspan class="prompt">{prompt[0]}</tspan><tspan class="typed">{command}</tspan>'
    # Every font is stretched to the columns, so that the pen stands between two characters.
    width = f'textLength="{len(row.text) * CHARACTER_WIDTH}" lengthAdjust="spacingAndGlyphs"'
    place = f'x="{MARGIN}" y="{top + BASELINE}"'
    return f'<text class="{row.style}" {place} {width} xml:space="preserve">{content}</text>'


def scene_keyframes(scene, total_s):
    """Return the CSS that shows a scene from its start to its end."""
    visibility_at = {
        0.0: "hidden",
        scene.start_s: "visible",
        scene.end_s: "hidden",
    }
    frames = []
    for at_s, visibility in visibility_at.items():
        frames.append(f"{at_s / total_s:.2%} {{ visibility: {visibility} }}")
    return f"@keyframes scene{scene.number} {{ {' '.join(frames)} }}"


def pen_keyframes(scene, total_s):
    """Return the lines of CSS that move the pen of a scene."""
    # Of the moves that the same percentage stands for, the last one counts.
    declarations_at = {}
    for move in [Move(0.0, 0), *scene.moves]:
        x, y = position(move.shown, scene.rows)
        declarations = f"transform: translate({x}px, {y}px)"
        if move.keys:
            declarations += f"; animation-timing-function: steps({move.keys})"
        declarations_at[f"{move.at_s / total_s:.2%}"] = declarations
    lines = [f"@keyframes pen{scene.number} {{"]
    for percentage, declarations in declarations_at.items():
        lines.append(f"{percentage} {{ {declarations} }}")
    return [*lines, "}"]


def record(path):
    """Run the programs in a temporary folder, and write the recording of their scenes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "demo"
        folder.mkdir()
        for name, program in PROGRAMS.items():
            shutil.copy(program, folder / name)
        steps_of_scenes = {}
        for title, commands in COMMANDS_OF_SCENES.items():
            steps_of_scenes[title] = record_scene(commands, folder)
    path.write_text(draw(steps_of_scenes), encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING)
