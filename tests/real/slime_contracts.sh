#!/usr/bin/env bash
# Runs slime's own contract tests on the slime integration, and rounds with its data source:
#
#     PYTHON=... slime_contracts.sh CHECKOUT [PYTEST ARGUMENTS]
#
# They need no GPU, Ray or SGLang, for which slime's tests bring stubs. The few packages that slime's modules import and
# Rollover does not have are installed into a folder of their own.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
slime=$(cd "${1:?usage: slime_contracts.sh CHECKOUT}" && pwd)
shift
contracts=$slime/tests/plugin_contracts
[ -f "$contracts/test_plugin_rollout_contracts.py" ] || { echo "$slime is no checkout of slime with contract tests"; exit 2; }
beside=$root/build/slime-contracts
modules="import aiohttp, pylatexenc, PIL, tqdm"
if ! PYTHONPATH=$beside "$PYTHON" -c "$modules" 2>/dev/null; then
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$beside" aiohttp pylatexenc pillow tqdm
fi
cd "$root"
export PYTHONPATH=$root:$slime:$slime/tests:$beside OMP_NUM_THREADS=1
export SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH=tests.real.slime_plugin.generate_rollout
export SLIME_CONTRACT_EVAL_FUNCTION_PATH=tests.real.slime_plugin.generate_rollout
export SLIME_CONTRACT_DATA_SOURCE_PATH=rollover.integrations.slime.DataSource
exec "$PYTHON" -m pytest -q -c /dev/null --rootdir "$slime" -p tests.real.slime_plugin -p no:cacheprovider \
  "$contracts/test_plugin_rollout_contracts.py" "$contracts/test_plugin_path_loading_contracts.py" \
  tests/real/slime_rounds.py "$@"
