#!/usr/bin/env bash
# resolver.sh: asks pip whether Rollover can be installed beside each trainer that it runs inside, with all that both
# need. Nothing is installed. Needs a package index and some minutes; PYTHON names the interpreter.
set -euo pipefail
unset PYTHONPATH

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" wheel --no-deps --wheel-dir "$work" "$root"
wheel=$(echo "$work"/rollover-*.whl)

# beside REQUIREMENT...: a set of versions that satisfies all of these must exist
beside() {
    echo "beside $*"
    "${pip[@]}" install --dry-run --ignore-installed "$@"
}

beside "$wheel[trl,tasks,report,plan,lora]" trl==1.16.0
beside "$wheel[report,plan]" verl==0.9.1
# slime is installed from its repository; these are what it and the SGLang of its image pin of what Rollover needs too.
beside "$wheel[report,plan]" 'httpx[http2]' 'sglang-router>=0.3.0' 'ray[default]' pydantic numpy==1.26.4 torch==2.11.0 \
    transformers==5.12.1 openai==2.6.1 torchao==0.17.0 xgrammar==0.2.1 outlines==0.1.11 openai-harmony==0.0.4
# miles likewise; its pins.
beside "$wheel" 'httpx[http2]' 'sglang-router>=0.2.3' 'ray[default]' 'safetensors>=0.8.0' blake3==1.0.9 polars==1.42.1 \
    xxhash==3.7.1 zstandard==0.25.0 transformers==5.12.1
