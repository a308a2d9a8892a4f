#!/usr/bin/env bash
# Makes a virtual environment with a real SGLang server that runs on a CPU: sglang_env.sh FOLDER
#
# The package asks for CUDA libraries and for kernels that have no CPU build. It is installed without its
# requirements, and those that it needs to serve a text model are installed beside it; the modules of
# sglang_stubs, put on PYTHONPATH when the server starts, stand in for the rest.
set -euo pipefail
venv=${1:?usage: sglang_env.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

"${PYTHON:-python3}" -m venv "$venv"
torch=$(grep '^torch==' "$here/sglang_requirements.txt")
# The CPU build of torch may be on the index in use or only on PyTorch's own.
"${pip[@]}" install --quiet "$torch" \
  || "${pip[@]}" install --quiet "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
"${pip[@]}" install --quiet -r "$here/sglang_requirements.txt"
"${pip[@]}" install --quiet --no-deps torchvision==0.28.0 sglang==0.5.23
