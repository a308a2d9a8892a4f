#!/usr/bin/env bash
# wheel.sh: builds the wheel and tries it in two empty environments, outside the repository: with the core alone, and
# with the extra "all". Needs a package index; PYTHON names the interpreter.
set -euo pipefail
unset PYTHONPATH

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# environment NAME REQUIREMENT: an empty environment in $work/NAME with the wheel in it
environment() {
    "${PYTHON:-python3}" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" "$2"
}

# refused EXTRA COMMAND...: the command must end with code 2 and say how to install what it needs
refused() {
    local extra=$1 message status=0
    shift
    message=$("$@" 2>&1) || status=$?
    if [ "$status" -ne 2 ] || ! grep -qF "pip install 'rollover[$extra]'" <<<"$message"; then
        printf 'expected code 2 and the extra %s, got code %s: %s\n' "$extra" "$status" "$message" >&2
        return 1
    fi
}

"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" "$root"
wheel=$(echo "$work"/rollover-*.whl)
cd "$work"

echo "the core alone"
environment core "$wheel"
! "$work/core/bin/python" -c "import torch" 2>/dev/null
"$work/core/bin/python" -c "import rollover; [getattr(rollover, name) for name in rollover.__all__]"
"$work/core/bin/rollover" --help >/dev/null
"$work/core/bin/rollover" simulate light-8k --strategies april --steps 12 --seeds 1 >simulated.txt
grep -q recommended simulated.txt
sed -n '/^```python$/,/^```$/{//!p}' "$root/docs/embedding.md" >embedding.py
"$work/core/bin/python" embedding.py >printed.txt
grep -q "^decoded 666 = trained 628" printed.txt
refused train "$work/core/bin/rollover" train
refused report "$work/core/bin/rollover" simulate light-8k --out page.html
refused report "$work/core/bin/rollover" report .
refused plan "$work/core/bin/rollover" plan 8xh100 --model .
refused plan "$work/core/bin/rollover" workload fit lengths.jsonl

echo "with everything"
environment all "$wheel[all]"
"$work/all/bin/rollover" train quickstart --dry-run >plan.txt
grep -q "scored by" plan.txt
echo "the wheel works"
