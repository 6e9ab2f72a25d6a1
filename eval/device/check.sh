#!/usr/bin/env bash
# Checks and times the kernels and narrowed prefills on a machine that has PyTorch and nothing of
# this project's, and prints one table. What it does: check.py beside this.
#
#   eval/device/check.sh [--tiny] [--seconds N] [--out FILE] [--flashinfer PATH]
#
# PATH is FlashInfer's wheel, or a folder with it and the wheels it needs that the machine lacks; they
# are unpacked into a temporary folder. Nothing is installed, nothing is fetched.
#
# PYTHON   the interpreter that has PyTorch (default: python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
seconds=480
wheels=
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
  --flashinfer | --seconds)
    [ $# -gt 1 ] || { echo "check: $1 needs a value" >&2; exit 2; }
    if [ "$1" = --seconds ]; then seconds=$2; else wheels=$2; fi
    shift 2
    ;;
  *)
    arguments+=("$1")
    shift
    ;;
  esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The folder is called `eval`, the package kvshare_eval.
mkdir "$work/packages"
ln -s "$root/eval" "$work/packages/kvshare_eval"
path=$work/packages:$root

if [ -n "$wheels" ]; then
  if [ -d "$wheels" ]; then files=("$wheels"/*.whl); else files=("$wheels"); fi
  if "$python" -m pip install --quiet --no-deps --no-index --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action ignore \
    --target "$work/flashinfer" "${files[@]}" >&2; then
    path=$path:$work/flashinfer
  else
    echo "check: FlashInfer could not be unpacked, going on without it" >&2
  fi
fi

# What the unpacking took is part of the budget.
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 \
  "$python" -m kvshare_eval.device.check --seconds $((seconds - SECONDS)) \
  ${arguments[@]+"${arguments[@]}"}
