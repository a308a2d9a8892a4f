#!/usr/bin/env bash
# wheel.sh: builds the wheel and tries it in two environments, outside the repository: with the core alone and then with
# the extra "swarm" and README's; with "trl" and then with "all". Needs a package index; PYTHON names the interpreter.
set -euo pipefail
unset PYTHONPATH

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# install NAME REQUIREMENT: the wheel into the environment in $work/NAME
install() {
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

for name in core trl; do "${PYTHON:-python3}" -m venv "$work/$name"; done
"$work/core/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" "$root"
wheel=$(echo "$work"/rollover-*.whl)
cd "$work"

echo "the core alone"
install core "$wheel"
! "$work/core/bin/python" -c "import torch" 2>/dev/null
"$work/core/bin/python" -c "
import rollover
[getattr(rollover, name) for name in rollover.__all__ if name not in ('EmbeddedEngine', 'LocalTrainer', 'TrainingSetup')]"
"$work/core/bin/rollover" --help >/dev/null
"$work/core/bin/rollover" simulate light-8k --strategies april --steps 12 --seeds 1 --out page.html >simulated.txt
grep -q recommended simulated.txt
grep -q 'id="plotly">H4sI' page.html # packed by gzip
sed -n '/^```python$/,/^```$/{//!p}' "$root/docs/embedding.md" >embedding.py
"$work/core/bin/python" embedding.py >printed.txt
[ "$(grep "^decoded" printed.txt)" = "$(grep "^decoded" "$root/docs/embedding.md")" ]
refused train "$work/core/bin/rollover" train
refused plan "$work/core/bin/rollover" plan 8xh100 --model .
refused plan "$work/core/bin/rollover" workload fit lengths.jsonl

echo "a worker over a server"
install core "$wheel[swarm]"
! "$work/core/bin/python" -c "import torch" 2>/dev/null
ROLLOVER_SWARM_TOKEN=$("$work/core/bin/python" -c "
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rollover.swarm.wire.token import WorkerToken
print(WorkerToken.make('laptop', Ed25519PrivateKey.generate().public_key()).text)")
export ROLLOVER_SWARM_TOKEN
refused train "$work/core/bin/rollover" worker --join ws://127.0.0.1:9
"$work/core/bin/rollover" worker --join ws://127.0.0.1:9 --cache cache \
    --engine.kind vllm --engine.urls '["http://127.0.0.1:9"]' 2>said.txt &
for _ in $(seq 600); do grep -q "nothing listens there" said.txt && break || sleep 0.1; done
kill $! && wait $! || true
grep -q "nothing listens there" said.txt
unset ROLLOVER_SWARM_TOKEN

echo "README's first command"
extras=$(grep -o "pip install '\.\[[a-z,]*\]'" "$root/README.md" | grep -o '\[.*\]')
install core "$wheel$extras"
"$work/core/bin/rollover" train quickstart --steps 5 --sft.num_steps 20 --eval.num_prompts 20 --run-dir short >said.txt 2>&1 \
    || { cat said.txt >&2 && exit 1; }

echo "inside TRL, by the script of its page"
install trl "$wheel[trl]"
mkdir trains
awk '/^```python$/ { shown = ++blocks == 1; next } /^```$/ { shown = 0 } shown' "$root/docs/how-to/trl.md" \
    | sed 's/max_steps=40/max_steps=2/' >trains/train.py
grep -q max_steps=2 trains/train.py
(cd trains && "$work/trl/bin/python" train.py >said.txt 2>&1) || { cat trains/said.txt >&2 && exit 1; }
[ "$(grep -c '"kind": *"step"' trains/out/_rollover/metrics.jsonl)" -eq 2 ]

echo "with everything"
install trl "$wheel[all]"
"$work/trl/bin/rollover" train quickstart --dry-run >plan.txt
grep -q "scored by" plan.txt
echo "the wheel works"
