#!/usr/bin/env bash
# Makes the environment of this checkout, or does nothing when it is there.
#
#   <cache>/env-<key>/   every package of the lock; shared by all checkouts, built once
#   .venv/               this checkout: a small venv that sees the packages above and has the
#                        project itself installed editable
#
# The key is made of the lock and Python's minor version, so a changed lock builds a new environment
# and an old checkout keeps the one it had.
#
# PYTHON         the CPython 3.11 to use (default: python3, else python3.11)
# SGLANG_KVSHARE_CACHE  the cache (default: $XDG_CACHE_HOME/sglang-kvshare, else ~/.cache/sglang-kvshare)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
lock=requirements/cpu.txt

say() { printf 'environment: %s\n' "$*"; }
fail() {
  printf 'environment: %s\n' "$@" >&2
  exit 1
}

# --- which Python -----------------------------------------------------------------------------

# Prints "<implementation> <full version> <machine> <home of the installation>".
describe() {
  "$1" -c 'import platform, sys
print(sys.implementation.name, platform.python_version(), sys.platform + "-" + platform.machine(), sys.base_prefix)' 2>/dev/null
}

found=
python=
candidates=(python3 python3.11)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
  description=$(describe "$candidate") || continue
  found="$found${found:+; }$candidate is $description"
  case $description in
    "cpython 3.11."*" linux-x86_64 "*)
      python=$candidate
      break
      ;;
  esac
done
[ -n "$python" ] || fail \
  "$lock is for CPython 3.11 on x86-64 Linux (${found:-there is no ${candidates[*]}})." \
  "Name one that fits: make env PYTHON=/path/to/python3.11. For other machines see requirements/README.md."

# --- up to date? ------------------------------------------------------------------------------

cache=${SGLANG_KVSHARE_CACHE:-${XDG_CACHE_HOME:-${HOME:?is not set; set SGLANG_KVSHARE_CACHE}/.cache}/sglang-kvshare}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

key=$({ cat "$lock" && echo "3.11"; } | sha256sum | cut -c1-12)
env=$cache/env-$key
packages=$env/lib/python3.11/site-packages
whole=$env/.complete # written last: an environment without it is one that was interrupted
log=$env.log

stamp=.venv/.stamp
state=$({ echo "$root $env $description" && cat pyproject.toml scripts/env.sh; } | sha256sum)

up_to_date() {
  [ -f "$whole" ] && [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]
}
up_to_date && exit 0

command -v flock >/dev/null || fail "needs flock (util-linux) to keep two builds apart."
exec 9>"$env.lock"
if ! flock --nonblock 9; then
  say "waiting for another build of $env"
  flock 9
  up_to_date && exit 0
fi

# Runs a command with its output in the log; on failure shows the end of it.
logged() {
  local what=$1
  shift
  if ! "$@" >>"$log" 2>&1 9>&-; then
    grep -v '^WARNING: Location ' "$log" | tail -n 15 >&2 || true
    fail "$what failed; the whole log is $log"
  fi
}

# --- the shared packages ----------------------------------------------------------------------

# Says how far pip is, until it is stopped or this script is gone.
watch_pip() {
  local last=0 fetched
  # The sleep must not hold this script's output open when the rest has ended.
  while sleep 20 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    fetched=$(grep -cE '^(Collecting|Processing) ' "$log" || true)
    if [ "$fetched" = "$last" ]; then say "  still at it ..."; else say "  $fetched of $count fetched"; fi
    last=$fetched
  done
}

if [ ! -f "$whole" ]; then
  count=$(grep -c '==' "$lock")
  say "installing $count packages into $env, about 3 minutes and 6 GB, once ..."
  rm -rf "$env"
  : >"$log"
  logged "making a venv with $python" "$python" -m venv "$env"
  watch_pip 9>&- &
  watch=$!
  trap 'kill "$watch" 2>/dev/null || true' EXIT
  logged "installing $lock" "$env/bin/python" -m pip install --no-deps --no-input \
    --disable-pip-version-check --progress-bar off -r "$lock"
  kill "$watch"
  touch "$whole"
fi

# --- this checkout ----------------------------------------------------------------------------

say "installing this checkout into .venv"
# Without pip: it would bring its own setuptools, which hides the newer one of the lock. The shared
# packages hold pip.
logged "making .venv with $python" "$python" -m venv --clear --without-pip .venv
# addsitedir rather than a bare path: .pth files over there count too.
printf "import site; site.addsitedir('%s')\n" "${packages//\'/\\\'}" >.venv/lib/python3.11/site-packages/kvshare-packages.pth
logged "installing this checkout" .venv/bin/python -m pip install --no-deps --no-build-isolation \
  --no-input --disable-pip-version-check --no-index --editable .
printf '%s\n' "$state" >"$stamp"
say "ready: .venv/bin/python"
