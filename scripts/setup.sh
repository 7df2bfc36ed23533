#!/usr/bin/env bash
# Sets up everything hpctrain needs, without a question asked.
#
#   make setup                            # plain Debian: system packages, .venv, Horovod, parallel h5py
#   MPICC=... HDF5_DIR=... make setup     # cluster: the site's own MPI and HDF5, no package manager
#   source site-env/bin/activate; make setup   # into the environment that is already active
#   make setup BUNDLE=hpctrain-bundle.tar # no network: packages from an archive of `make bundle`, the site's MPI and HDF5
#   bash scripts/setup.sh --print-plan    # say what would be used and built, and why; change nothing
#
# Variables read:
#   PYTHON               interpreter for a new .venv         (default: python3, or the first of 3.10 to 3.14)
#   VENV                 where the environment is made       (default: .venv)
#   MPICC                the site's MPI compiler wrapper;    set = never call a package manager
#   HDF5_DIR             prefix of a parallel HDF5;          set = never call a package manager
#   BUNDLE               archive of `make bundle`, or the folder that came out of it; set = never use the network.
#                        Kept for later set-ups of the same environment; set to nothing = use the network again
#   HPCTRAIN_CACHE       built wheels live here  (default: $XDG_CACHE_HOME/hpctrain or ~/.cache/hpctrain)
#   HPCTRAIN_WITHOUT     words from "horovod h5py": do not build that; hpctrain falls back and says so
#   HPCTRAIN_JOBS        compilers at a time                 (default: the cores, at most 8)
#   HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME   where CUDA and NCCL are, if not in the usual places
# pip keeps its own settings: PIP_INDEX_URL, PIP_FIND_LINKS and the like say where packages come from.
set -euo pipefail

SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HOROVOD_VERSION=0.28.1
H5PY_VERSION=3.16.0
HDF5PLUGIN_VERSION=7.1.0
RECIPE=3            # raise it when the way the wheels are built changes: old cached ones are then not used

say()  { if [[ -t 1 ]]; then printf '\033[1m==>\033[0m %s\n' "$*"; else printf '==> %s\n' "$*"; fi; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# shellcheck source=scripts/setup_find.sh
source "$SCRIPTS/setup_find.sh"
# shellcheck source=scripts/setup_wheels.sh
source "$SCRIPTS/setup_wheels.sh"

pip() { "$py" -m pip --disable-pip-version-check "$@"; }

# ---------------------------------------------------------------- system packages
install_system_packages() {
  if [[ $site_because ]]; then
    { echo "setup: no package manager is called, because $site_because. Not found:"
      printf '  - %s\n' "${missing_things[@]}"; } >&2
    exit 1
  fi
  local root=() log
  [[ $(id -u) == 0 ]] || root=(sudo -n)
  if ! have apt-get || ! ${root[@]+"${root[@]}"} true 2>/dev/null; then
    { echo "setup: this user may not install system packages. Not found:"
      printf '  - %s\n' "${missing_things[@]}"
      echo "Ask for: apt-get install ${missing_packages[*]}"; } >&2
    exit 1
  fi
  say "system packages: ${missing_packages[*]}"
  log=$(mktemp "${TMPDIR:-/tmp}/hpctrain-apt.XXXXXX")
  local apt=(${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -y -q)
  # One unreachable third-party list makes update fail; what is needed here may be known all the same.
  "${apt[@]}" update >"$log" 2>&1 || say "apt-get update failed; continuing with the existing package lists"
  if ! "${apt[@]}" install --no-install-recommends "${missing_packages[@]}" >>"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    fail "apt-get could not install ${missing_packages[*]}; whole log: $log"
  fi
  rm -f "$log"
}

# ---------------------------------------------------------------- bundle
check_bundle() {
  [[ $bundle && $base_python ]] || return 0
  bundle_line=$("$base_python" "$SCRIPTS/setup_bundle.py" "$bundle" --torch-found "$torch_version") || exit 1
}

# From here on pip knows the bundle alone.
open_bundle() {
  if [[ ! $bundle ]]; then
    [[ ! $bundle_id ]] || fail "$site_because, and that is no longer there: set BUNDLE to its new place, or BUNDLE=" \
      "to nothing to use the network"
    return 0
  fi
  local folder answer links
  say "bundle: $bundle_line"
  folder=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-bundle.XXXXXX")
  # shellcheck disable=SC2064
  trap "rm -rf '$folder'" EXIT
  answer=$("$base_python" "$SCRIPTS/setup_bundle.py" "$bundle" --torch-found "$torch_version" --unpack-into "$folder") || exit 1
  { read -r links; read -r bundle_torch; read -r bundle_for; } <<<"$answer"
  # Settings of this user and machine name other places to take packages from.
  unset "${!PIP_@}"
  export PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=$links PIP_USER=0
}

# ---------------------------------------------------------------- python environment
# Sets py, the environment's interpreter, and holds the environment's lock until the script ends.
open_environment() {
  local prefix=$active
  if [[ ! $active ]]; then
    prefix=$VENV
    mkdir -p "$prefix"
  fi
  [[ -w $prefix ]] || fail "the active environment $prefix is not writable. Deactivate it and run" \
    "PYTHON=$prefix/bin/python MPICC=${MPICC:-mpicc} make setup: that makes a .venv which sees its packages"
  stamp=$prefix/hpctrain-setup.stamp
  record=$prefix/hpctrain-wheels      # which wheels of ours are installed here: one file per name, with its key
  py=$prefix/bin/python
  exec {environment_lock}>"$prefix/hpctrain-setup.lock"
  # Two at once in one environment would tear it. Some parallel filesystems have no locks: then it is up to the user.
  flock -n "$environment_lock" 2>/dev/null || { say "waiting for another set-up of $prefix"; flock "$environment_lock" || true; }
}

make_environment() {
  [[ ! $active ]] || { say "using the active environment $active"; return 0; }
  "$py" -m pip --version >/dev/null 2>&1 && return 0
  local options=()
  # A site's torch may be installed with its interpreter instead of in an environment: .venv has to see it.
  if [[ $site_because && $torch_version ]]; then options=(--system-site-packages); fi
  say "new environment $VENV ($("$base_python" -V))"
  "$base_python" -m venv ${options[@]+"${options[@]}"} "$VENV"
}

# What decides the result: the same again means that there is nothing to do.
inputs() {
  cat "$SCRIPTS"/setup*.sh requirements/*.txt setup.py hpctrain/*/_*.c hpctrain/*/*/_*.c hpctrain/*/*/*/_*.c | sha256sum | cut -c1-16
  printf '%s\n' "${MPICC:-}" "${HDF5_DIR:-}" "$bundle_id" "$WITHOUT" "${HOROVOD_CUDA_HOME:-}" "${HOROVOD_NCCL_HOME:-}" "$PWD" \
    "$(command -v "${CC:-cc}" || true)"
}

# What an earlier set-up of this environment could not build, and how to try it again.
without_failed() {
  local names
  names=$(xargs <"$record/failed" 2>/dev/null) || true
  [[ ! $names ]] || printf ', but %s could not be built; to try again: rm %s; make setup' "$names" "${stamp#"$PWD"/}"
}

install_python_packages() {
  local chosen log
  chosen=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-pip.XXXXXX")
  # A site's packages stay where they are new enough for hpctrain: torch was built for this machine, and
  # what else is there may need the numpy that is there. Elsewhere everything is as pinned.
  local options=()
  [[ ! $site_because ]] || options+=(--keep-installed)
  [[ ! $bundle_torch ]] || options+=(--torch "$bundle_torch")
  [[ $bundle_for != runtime ]] || options+=(--without-tests)
  "$py" "$SCRIPTS/setup_requirements.py" ${options[@]+"${options[@]}"} --into "$chosen"
  say "python packages (torch ${bundle_torch:-$(sed -n 's/^torch==//p' requirements/runtime.txt)} and what goes with it)"
  if ! pip install -q -q -r "$chosen/requirements.txt" -c "$chosen/constraints.txt" >"$chosen/log" 2>&1; then
    tail -n 30 "$chosen/log" >&2
    fail "pip could not install the pinned packages; whole log: $chosen/log"
  fi
  rm -rf "$chosen"
}

# ---------------------------------------------------------------- the flow
find_machine() {
  find_python
  find_mpi
  find_hdf5
  find_missing
}

main() {
  cd "$SCRIPTS/.."
  # A site's pip.conf may ask for --user, which no environment allows.
  export PIP_USER=0
  find_settings
  find_mode
  find_bundle
  find_machine
  find_torch "$base_python"
  check_bundle
  if [[ ${1:-} == --print-plan ]]; then
    find_nccl
    print_plan
    exit $((${#missing_packages[@]} > 0))
  fi
  (($# == 0)) || fail "unknown option $1; there is only --print-plan"

  if ((${#missing_packages[@]})); then
    install_system_packages
    find_machine
    ((${#missing_packages[@]} == 0)) || fail "installed, and still not found: ${missing_things[*]}"
  fi
  open_environment
  if [[ -e $stamp && $(cat "$stamp") == "$(inputs)" ]]; then
    say "already set up$(without_failed)"
    exit 0
  fi
  open_bundle
  rm -f "$stamp"
  make_environment
  install_python_packages
  find_torch "$py"
  install_wheels
  say "hpctrain"
  pip install -q -q --no-deps --no-build-isolation --editable .
  "$py" "$SCRIPTS/setup_requirements.py" --report
  if [[ $bundle ]]; then printf '%s\n' "$bundle" "$bundle_id" > "$bundle_record"; else rm -f "$bundle_record"; fi
  mkdir -p "$record"
  printf '%s\n' ${failed[@]+"${failed[@]}"} > "$record/failed"
  inputs > "$stamp"
  say "ready: source ${active:-${VENV#"$PWD"/}}/bin/activate && hpctrain doctor"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
