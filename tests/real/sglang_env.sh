#!/usr/bin/env bash
# Makes a virtual environment with a real SGLang server that runs on a CPU: sglang_env.sh FOLDER
#
# The package asks for CUDA libraries and for kernels that have no CPU build. It is installed without its
# requirements, and those that it needs to serve a text model are installed beside it; the modules of
# sglang_stubs, put on PYTHONPATH when the server starts, stand in for the rest.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
begin "${1:?usage: sglang_env.sh FOLDER}" 5 "$here/sglang_env.sh" "$here/sglang_requirements.txt"

torch_for_cpu "$(grep '^torch==' "$here/sglang_requirements.txt")"
packages -r "$here/sglang_requirements.txt"
packages --no-deps torchvision==0.28.0 sglang==0.5.23
end
