#!/usr/bin/env bash
# Makes a virtual environment with the real verl and Rollover on a CPU: verl_env.sh FOLDER
#
# Of verl's extra "verl-core", the packages that images, profiles and tests need are left out, and so are vLLM, SGLang
# and flash-attn, which need a GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
begin "${1:?usage: verl_env.sh FOLDER}" 4 "$here/verl_env.sh"
torch_for_cpu torch==2.13.0
packages verl==0.9.1 TransferQueue==0.1.11 pyzmq msgspec fastapi uvicorn cachetools --editable "$here/../.."
end
