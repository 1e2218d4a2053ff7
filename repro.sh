#!/usr/bin/env bash
# One command from a clean tree to a verdict and a bundle.
#
#   ./repro.sh                    compile the candidates, check and time what this machine can run, write artifacts/,
#                                 then verify the bundle and replay one case from it
#   ./repro.sh replay FILE ...    verify a bundle and replay it at every level it has; options as `bundle replay --help`
#   ./repro.sh test               what a change must pass: style, types and the project's own tests but the nightly ones
#   ./repro.sh lint               style and types
#   ./repro.sh test-nightly       the tests that ./repro.sh test leaves out
#   ./repro.sh test-without-torch the tests that need no torch, in an environment without it: for other Pythons
#   ./repro.sh build              compile every variant, also ablations and wrong ones, for every architecture
#   ./repro.sh prepare[-without-torch]  only set up the environment that the other commands use
#   ./repro.sh --env=current ...  use this interpreter's packages, name what differs from constraints.txt, install nothing
#
# PYTHON chooses the interpreter (3.11 or newer).  Without a CUDA toolkit the compiler comes from wheels.
set -euo pipefail
caller=$PWD
TASKS="test, lint, test-nightly, test-without-torch, build, prepare, prepare-without-torch"
cd "$(dirname "$0")"

main() {
  local environment=fresh task=run
  while [ $# -gt 0 ] && [ "$task" != replay ]; do
    case "$1" in
      --env=fresh | --env=current) environment=${1#--env=} ;;
      test | lint | test-nightly | build | prepare) task=${1//-/_} ;;
      test-without-torch | prepare-without-torch) task=${1%-without-torch} environment=without_torch ;;
      replay) task=replay ;;
      -h | --help) sed -n '2,16s/^# \{0,1\}//p' "$0"; return 0 ;;
      *) fail "unknown argument '$1'; allowed: replay FILE, $TASKS, --env=fresh, --env=current" ;;
    esac
    shift
  done
  [ "$task" != replay ] || [ $# -gt 0 ] || fail "replay needs the file of a bundle: ./repro.sh replay FILE"
  check_machine
  "prepare_$environment"
  [ "$environment/$task" != without_torch/test ] || task=test_without_torch
  [ "$task" = prepare ] || "$task" "$@"
}

check_machine() {
  PYTHON=${PYTHON:-python3}
  command -v "$PYTHON" >/dev/null || fail "no Python: $PYTHON is not on PATH (set PYTHON)"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" --version 2>&1); pytest-fa needs Python 3.11 or newer (set PYTHON)"
  command -v "${CXX:-g++}" >/dev/null || fail "no host compiler: ${CXX:-g++} is not on PATH; install g++"
}

# An environment of its own, made anew when what it is made from has changed.
prepare_fresh() {
  local extras=test
  [ -x "${CUDA_HOME:-/nowhere}/bin/nvcc" ] || command -v nvcc >/dev/null || extras=test,cuda13
  make_environment .venv-repro "$extras" -e ".[$extras]"
}

# Everything but torch, which the parts under test do not import.
prepare_without_torch() {
  local version needed
  version=$("$PYTHON" -c 'import sys; print("{}.{}".format(*sys.version_info))')
  needed=$("$PYTHON" -c 'import tomllib; print(*(each.replace(" ", "") for each in
    tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if not each.startswith("torch")))')
  # shellcheck disable=SC2086  # one word for each requirement
  make_environment ".venv-repro-$version" without-torch $needed hypothesis pytest-xdist setuptools syrupy wheel
  "$PYTHON" -m pip show --quiet pytest-fa 2>/dev/null ||
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
}

# make_environment FOLDER WHAT-FOR REQUIREMENT...: made once, used from here on.
make_environment() {
  local folder=$1 what=$2 made_from
  shift 2
  made_from="$("$PYTHON" --version) $what $(cat constraints.txt pyproject.toml | sha256sum)"
  if [ "$(cat "$folder/made-from" 2>/dev/null)" != "$made_from" ]; then
    step "environment: $folder, pinned by constraints.txt"
    rm -rf "$folder"
    "$PYTHON" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
    echo "$made_from" >"$folder/made-from"
  fi
  PYTHON=$PWD/$folder/bin/python
  export PATH="$PWD/$folder/bin:$PATH"
}

# The interpreter as it is; the plugin from this tree where it is not installed.
prepare_current() {
  step "environment: $PYTHON as it is"
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  if ! "$PYTHON" -c 'from importlib.metadata import entry_points as e; assert e(group="pytest11", name="fa")' 2>/dev/null; then
    export PYTEST_PLUGINS=pytest_fa.plugin
  fi
  "$PYTHON" -m pytest_fa bundle differences constraints.txt
}

run() {
  local status=0 replayed=0 suite=history,edge records bundle
  step "compile, check, time; then pack, verify and replay the results"
  if nvidia-smi --list-gpus >/dev/null 2>&1; then
    echo "Every candidate is compiled for this GPU, checked and timed on it: suites history and edge."
  else
    suite=history
    echo "No GPU: every candidate is compiled, for one architecture; CPU kernels are checked and timed: suite history."
    echo "About three minutes on two cores; less if the builds are in the cache."
  fi
  mkdir -p artifacts
  touch artifacts/.started
  "$PYTHON" -m pytest --fa-suite="$suite" -rf \
    --junit-xml=artifacts/junit.xml --benchmark-json=artifacts/benchmark.json --fa-html=artifacts/report.html || status=$?
  step "bundle"
  "$PYTHON" -m pip freeze >artifacts/packages.txt 2>/dev/null || true
  records=$(find artifacts/records -name '*.jsonl' -newer artifacts/.started 2>/dev/null | sort | tail -n 1)
  rm artifacts/.started
  [ -n "$records" ] || fail "pytest wrote no record (exit status $status)"
  "$PYTHON" -m pytest_fa bundle make --records "$records" --exit-status "$status"
  bundle=$PWD/$(ls -t artifacts/repro_bundle_*.tar.gz | head -n 1)
  replay "$bundle" --level=right --case=b1h2s64d64-fp16-seed0 || replayed=$?
  [ "$replayed" = 0 ] || [ "$replayed" = 3 ] || [ "$status" != 0 ] || status=$replayed  # 3: nothing to compare with here
  step "done in $SECONDS s"
  case "$status" in
    0) echo "passed: every check, and the replay from the bundle" ;;
    10) echo "no verdict: a gate was inconclusive (exit status 10)" ;;
    *) echo "failed: exit status $status; the lines above say what" ;;
  esac
  echo "bundle: ${bundle#"$PWD"/}"
  return "$status"
}

# replay FILE OPTION...: what a reviewer runs.  FILE is relative to the folder in which repro.sh was called.
replay() {
  local bundle=$1 answers status=0
  shift
  [ "${bundle#/}" != "$bundle" ] || bundle=$caller/$bundle
  answers=artifacts/replay_$(basename "$bundle" .tar.gz).json
  mkdir -p artifacts
  rm -f "$answers"
  step "verify"
  "$PYTHON" -m pytest_fa bundle verify "$bundle" || return
  step "replay"
  "$PYTHON" -m pytest_fa bundle replay "$bundle" --level=all --output="$answers" "$@" || status=$?
  [ ! -f "$answers" ] || echo "answers: $answers"
  return "$status"
}

build() { "$PYTHON" -m pytest --fa-static --fa-variant='*'; }

# Types are checked beside the tests, which often wait for a process; nothing runs beside the tests that measure time.
# shellcheck disable=SC2046  # words without spaces
test() {
  local types
  types=$(mktemp)
  check_style
  { check_types >"$types" 2>&1 || echo failed >>"$types"; } &
  run_tests "not alone and not nightly" $(processes 4) tests || { wait; cat "$types"; return 1; }
  wait
  cat "$types"
  [ "$(tail -n 1 "$types")" != failed ] || return 1
  run_tests "alone and not nightly" $(files_of_alone)
  rm "$types"
}

# shellcheck disable=SC2046  # words without spaces
test_nightly() {
  run_tests "nightly and not alone" $(processes 3) tests
  run_tests "nightly and alone" $(files_of_alone)
}

lint() {
  check_style
  check_types
}

check_style() {
  step "style"
  if has ruff; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
  fi
}

check_types() {
  step "types"
  if has mypy; then "$PYTHON" -m mypy; fi
}

# The files and folders that name the marker `alone`; to collect all files would take a quarter of a minute.
files_of_alone() {
  grep -rlE 'mark\.alone|"alone"' tests --include='test_*.py' --include=conftest.py | sed 's|/conftest\.py$||'
}

# Options of pytest-xdist for so many processes; none where it is not installed.
processes() { ! has xdist >&2 || echo "-n $1 --dist loadfile --no-loadscope-reorder"; }

# run_tests MARKS OPTION-OR-FILE...
run_tests() {
  local marks=$1
  shift
  step "tests: $marks"
  unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would otherwise compile the same modules
  "$PYTHON" -m pytest -c tests/pytest.ini -m "$marks" "$@"
}

test_without_torch() {
  unset PYTHONDONTWRITEBYTECODE
  step "tests without torch, $("$PYTHON" --version)"
  "$PYTHON" -m pytest -c tests/pytest.ini -m "not needs_nvcc and not alone" -q -n 2 \
    tests/unit/{build,catalog,records,table} tests/unit/test_options.py tests/tools tests/repo/test_layers.py \
    tests/features/{bundle,compare,export,gate,github,html,ncu,sanitize,shards}
}

has() {
  "$PYTHON" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$1') is None)" || { echo "not run: $1 is not installed"; return 1; }
}

step() { printf '\n== %s\n' "$*"; }
fail() { printf 'repro.sh: %s\n' "$*" >&2; exit 2; }

main "$@"
