#!/usr/bin/env bash
# All that a machine with one GPU can show, without a network, in two calls of 8 and 5 minutes: five minutes of questions
# whose answers decide most, the gpu tests, and the CUDA sanitizer over the prefetch tests; then the GPU rows of the
# benchmarks, and those that take long.
#
#     OUT=day bash tests/gpu/day.sh                                   on a GPU
#     OUT=day PARTS="benchmarks more" bash tests/gpu/day.sh           the second call
#     OUT=day python tests/fake_cuda bash tests/gpu/day.sh --short    all of it on the pretended device, shortened
#
# Each part ends within its seconds (QUESTIONS_S, TESTS_S, SANITIZER_S, BENCHMARKS_S, MORE_S), and prints what failed
# first. With pytest-xdist, the tests run in WORKERS processes. Leaves in $OUT: facts.txt, the log of each part,
# tests.xml, and gpu.json with the results of the benchmarks, for benchmarks/results. The exit status is the number of
# parts that failed. The package is run from this checkout, without an installation; a folder of wheels in $WHEELS
# (default: .wheels) provides what the machine lacks, such as wrapt and cloudpickle:
#
#     pip download --dest .wheels --only-binary=:all: --no-deps --python-version 3.12 wrapt cloudpickle
set -uo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "${OUT:?set OUT to a folder for the results}"
out=$(cd "$OUT" && pwd)
short=$([ "${1:-}" = --short ] && echo yes)
parts=${PARTS:-questions tests sanitizer${short:+ benchmarks more}}
python=$(command -v python3)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
wheels=${WHEELS:-.wheels}
if [ -d "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl || exit 1
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
failed=0

first_failure() { # first_failure LOG: what has failed first, in a log of the questions, of pytest, or of a benchmark
    grep '^UNEXPECTED' "$1" || grep '^answered: UNEXPECTED' "$1" || grep -m 1 -A 30 -E '^_{3,} .* _{3,}$' "$1" || grep -m 1 -A 15 '^Traceback' "$1"
}

part() { # part NAME SECONDS COMMAND...: run a command with a time limit, and write its output to NAME.log
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    echo "$name: exit status $status after $((SECONDS - begin)) of $seconds s"
    [ $status -eq 0 ] || first_failure "$out/$name.log" | cut -c1-250
    tail -n "${LINES_SHOWN:-12}" "$out/$name.log" | cut -c1-250
}

{
    command -v nvidia-smi >/dev/null && nvidia-smi
    "$python" -c "import sys, torch, wrapt, cloudpickle; print(sys.version, torch.__version__, wrapt.__version__, cloudpickle.__version__)"
    timeout 30 "$python" -m parallelize doctor
} >"$out/facts.txt" 2>&1
tail -n 20 "$out/facts.txt"

part questions "${QUESTIONS_S:-90}" "$python" tests/gpu/five_minutes.py --seconds "$((${QUESTIONS_S:-90} - 5))"

pytest=("$python" -m pytest -p no:cacheprovider -p failures_at_once --timeout 150 -q)
workers=()
"$python" -c "import xdist" 2>/dev/null && workers=(-n "${WORKERS:-4}")
cat >"$site/failures_at_once.py" <<'PYTHON'
"""Prints a failure when it happens: pytest prints them at its end, which a part that is cut off does not reach."""


class FailuresAtOnce:
    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            terminal = self.config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"\n{'_' * 20} {report.nodeid} {'_' * 20}\n{report.longreprtext}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
PYTHON
tests=(tests/gpu tests/unit/cluster/test_devices.py)
[ -z "$short" ] || tests=(tests/gpu/test_features.py tests/gpu/test_memory.py tests/unit/cluster/test_devices.py)
part tests "${TESTS_S:-320}" "${pytest[@]}" "${workers[@]}" -m gpu "${tests[@]}" --durations=8 --junitxml "$out/tests.xml"

# On the pretended device each test is checked for unordered accesses, and torch's sanitizer has nothing to trace.
sanitizer=()
[ -n "${FAKE_CUDA:-}" ] || sanitizer=(env TORCH_CUDA_SANITIZER=1)
part sanitizer "${SANITIZER_S:-45}" "${sanitizer[@]}" "${pytest[@]}" -W ignore tests/gpu/test_data_device.py \
    -k "order or reads_no or reused or reuses or another_stream"

cat >"$site/run_benchmarks.py" <<'PYTHON'
import pathlib
import shlex
import sys

sys.path.insert(0, "benchmarks")
import suite

commands = {  # name of the results, in the order in which they are wanted
    "benchmarks": {
        "data": "--rounds 3",
        "step_overhead": "--ranks 1 --turns 3",
        "amp": "--rounds 1",
    },
    "more": {
        "step_overhead/compiled": "--ranks 1 --turns 2 --levels O0 'O1 bf16' --compile",
        "overlap": "",
        "checkpoint": "--megabytes 4000 --rounds 3",
        "step_overhead/two_ranks": "--ranks 2 --turns 2 --levels O0 fsdp --works 'GPT 124M'",
        "auto": "--rounds 1",
    },
}
if sys.argv[3]:
    commands = {
        "benchmarks": {
            "step_overhead": "--ranks 1 --turns 1 --works MLP",
            "amp": "--rounds 1 --size small --nets gpt",
        },
        "more": {
            "overlap": "--turns 1 --steps 1 --rows 8",
            "checkpoint": "--megabytes 10 --rounds 1",
            "step_overhead/two_ranks": "--ranks 2 --turns 1 --levels O0 fsdp --works MLP",
        },
    }
done = []
for result, given in commands[sys.argv[2]].items():
    name, _, kind = result.partition("/")
    folder = pathlib.Path(sys.argv[1], kind)
    folder.mkdir(exist_ok=True)
    suite.BENCHMARKS[name] = suite.Benchmark(full=tuple(shlex.split(given)))
    done.append(suite.run(name, folder, is_quick=False))
sys.exit(not all(done))
PYTHON
part benchmarks "${BENCHMARKS_S:-140}" "$python" "$site/run_benchmarks.py" "$out" benchmarks "$short"
part more "${MORE_S:-140}" "$python" "$site/run_benchmarks.py" "$out" more "$short"
"$python" - "$out" <<'PYTHON'
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
paths = [path for path in sorted(folder.rglob("*.json")) if path.stem != "gpu"]
found = {str(path.relative_to(folder).with_suffix("")): json.loads(path.read_text()) for path in paths}
(folder / "gpu.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
for path in (*paths, *folder.rglob("*.svg")):
    path.unlink()
for path in (path for path in folder.iterdir() if path.is_dir() and not any(path.iterdir())):
    path.rmdir()
PYTHON
ls "$out"
exit "$failed"
