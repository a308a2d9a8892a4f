#!/usr/bin/env bash
# Makes a virtual environment with frameworks for agents and environments: agents_env.sh FOLDER
#
# It is not Rollover's own, whose websockets is newer than openai-agents allows.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
begin "${1:?usage: agents_env.sh FOLDER}" 1 "$here/agents_env.sh"
packages openai==3.57.0 openai-agents==0.24.0 smolagents==1.26.0 textarena==0.7.4 openenv==0.10.0
end
