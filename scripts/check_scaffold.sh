#!/usr/bin/env bash
# Checks what `art-gym new` writes as its user would: in a fresh environment with the core alone, installed, its tests must pass within 20 s.
#
#   PYTHON  the interpreter that the environment is made from (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."

limit=20
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet "$@"; }

"$python" -m venv "$folder/venv"
pip install .
"$folder/venv/bin/art-gym" new my_task --dir "$folder" >/dev/null
pip install "$folder/my_task[dev]"
if "$folder/venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "check_scaffold: the core brought torch with it" >&2
  exit 1
fi

cd "$folder/my_task"
began=$(date +%s%N)
"$folder/venv/bin/python" -m pytest -q
took=$((($(date +%s%N) - began) / 1000000))
"$folder/venv/bin/art-gym" check my_task:my_task/MyTask-v0
echo "check_scaffold: the generated tests took $((took / 1000)).$(printf %03d $((took % 1000))) s"
[ $took -lt $((limit * 1000)) ] || { echo "check_scaffold: more than $limit s" >&2; exit 1; }
