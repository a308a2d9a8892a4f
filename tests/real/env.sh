# Sourced by the scripts that make an environment for a real server. They say what FOLDER and NEEDED_GB are, and which
# files decide what is installed; an environment made from the same files is left as it is.

fail() {
  echo "$0: $*" >&2
  exit 1
}

# begin FOLDER NEEDED_GB FILE...: ends the script where the environment is there already.
begin() {
  folder=$1 needed_gb=$2
  shift 2
  recipe=$(cat "$@" | cksum)
  [ "$(cat "$folder/installed" 2>/dev/null)" = "$recipe" ] && exit 0
  mkdir -p "$folder" || fail "cannot make $folder"
  [ -e "$folder/pyvenv.cfg" ] || [ -z "$(ls -A "$folder")" ] || fail "$folder is neither empty nor an environment"
  rm -rf "${folder:?}"/*
  local free_gb=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') / 1000000))
  [ "$free_gb" -ge "$needed_gb" ] || fail "needs $needed_gb GB of free disk at $folder, there are $free_gb: make room," \
    "or name another folder (make test-vllm VLLM_VENV=..., for one)"
  echo "$0: installing into $folder, a few minutes ($needed_gb GB)"
  "${PYTHON:-python3}" -m venv "$folder" || fail "no virtual environment could be made with ${PYTHON:-python3}"
}

# packages ARGUMENT...: pip install, with a word on what to look at when it fails.
packages() {
  "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@" \
    || fail "pip could not install $*: is the package index in reach (pip config list), and is there disk left?"
}

# torch_for_cpu REQUIREMENT: its CPU build, which may be on the index in use or only on PyTorch's own.
torch_for_cpu() {
  "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$1" 2>/dev/null \
    || packages "$1" --extra-index-url https://download.pytorch.org/whl/cpu
}

# end: from now on the environment counts as made.
end() {
  echo "$recipe" > "$folder/installed"
}
