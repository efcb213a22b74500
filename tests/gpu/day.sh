#!/usr/bin/env bash
# All that a machine with one GPU can show, without a network, in two calls of at most 9 minutes: the gpu tests, the CUDA
# sanitizer over the prefetch tests, and the GPU rows of the benchmarks; then what takes long, or two GPUs show better.
#
#     OUT=day bash tests/gpu/day.sh                                   on a GPU
#     OUT=day PARTS=more bash tests/gpu/day.sh                        the second call
#     OUT=day python tests/fake_cuda bash tests/gpu/day.sh --short    on the pretended device, with shorter benchmarks
#
# Leaves in $OUT: facts.txt, tests.log, tests.xml, sanitizer.log, benchmarks.log, more.log, a JSON file per benchmark, and
# gpu.json with all of them, for benchmarks/results. The exit status is the number of parts that failed. The package is run from this checkout, without an installation; a folder of
# wheels in $WHEELS (default: .wheels) provides what the machine lacks, such as wrapt and cloudpickle:
#
#     pip download --dest .wheels --only-binary=:all: --no-deps --python-version 3.12 wrapt cloudpickle
set -uo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "${OUT:?set OUT to a folder for the results}"
out=$(cd "$OUT" && pwd)
short=$([ "${1:-}" = --short ] && echo yes)
parts=${PARTS:-tests sanitizer benchmarks}
python=$(command -v python3)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
wheels=${WHEELS:-.wheels}
if [ -d "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl || exit 1
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
failed=0

part() { # part NAME SECONDS COMMAND...: run a command with a time limit, and write its output to NAME.log
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    echo "$name: exit status $status after $((SECONDS - begin)) s"
    [ $status -eq 0 ] || grep -m 1 -A 30 -E '^_{3,} .* _{3,}$' "$out/$name.log"  # what has failed first
    tail -n "${LINES_SHOWN:-12}" "$out/$name.log" | cut -c1-250
}

{
    command -v nvidia-smi >/dev/null && nvidia-smi
    "$python" -c "import sys, torch, wrapt, cloudpickle; print(sys.version, torch.__version__, wrapt.__version__, cloudpickle.__version__)"
    timeout 60 "$python" -m parallelize doctor
} >"$out/facts.txt" 2>&1
tail -n 20 "$out/facts.txt"

pytest=("$python" -m pytest -p no:cacheprovider --timeout 150 -q)
part tests "${TESTS_S:-420}" "${pytest[@]}" -m gpu tests/gpu tests/unit/cluster/test_devices.py --durations=8 --junitxml "$out/tests.xml"

# On the pretended device each test is checked for unordered accesses, and torch's sanitizer has nothing to trace.
sanitizer=()
[ -n "${FAKE_CUDA:-}" ] || sanitizer=(env TORCH_CUDA_SANITIZER=1)
part sanitizer "${SANITIZER_S:-60}" "${sanitizer[@]}" "${pytest[@]}" -W ignore tests/gpu/test_data_device.py \
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
part benchmarks "${BENCHMARKS_S:-200}" "$python" "$site/run_benchmarks.py" "$out" benchmarks "$short"
part more "${MORE_S:-480}" "$python" "$site/run_benchmarks.py" "$out" more "$short"
"$python" - "$out" <<'PYTHON'
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
paths = [path for path in sorted(folder.rglob("*.json")) if path.stem != "gpu"]
found = {str(path.relative_to(folder).with_suffix("")): json.loads(path.read_text()) for path in paths}
(folder / "gpu.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
PYTHON
rm -f "$out"/*.svg "$out"/*/*.svg
ls "$out"
exit "$failed"
