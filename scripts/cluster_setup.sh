#!/usr/bin/env bash
# Installs what a Slurm cluster on this machine needs (tests/cluster): Slurm, munge, iproute2, GlusterFS for its shared
# volumes, and shellcheck for the batch scripts. Debian and Ubuntu.
#
#   make cluster-setup
#   bash scripts/cluster_setup.sh --check     # only say whether a cluster can be made here
#
# Ends with 0 if one can, 1 if something is not installed, 3 if this machine or this user may make no namespaces.
#
# Without /dev/fuse, or where files cannot have trusted attributes, clusters have no volumes; that is printed and is not a
# failure.
#
# Nothing of the machine is configured: each cluster brings its own slurm.conf, munge key, network and storage pool.
# Where systemd runs, the packages may start munge and GlusterFS services of their own, which the clusters neither use nor touch.
set -euo pipefail

packages=(slurm-wlm munge iproute2 util-linux glusterfs-server fuse3 shellcheck)
programs=(slurmctld slurmd srun sbatch munged ip tc unshare nsenter setpriv glusterd glusterfs glusterfsd gluster fusermount3 shellcheck)
export PATH=$PATH:/usr/sbin:/sbin

fail() { printf 'cluster-setup: %s\n' "$*" >&2; exit 1; }

missing=()
for name in "${programs[@]}"; do command -v "$name" >/dev/null || missing+=("$name"); done

if [[ ${1:-} != --check ]] && ((${#missing[@]})); then
  root=()
  [[ $(id -u) == 0 ]] || root=(sudo -n)
  if ! command -v apt-get >/dev/null || ! ${root[@]+"${root[@]}"} true 2>/dev/null; then
    fail "not found: ${missing[*]}; this user may not install packages. Ask for: apt-get install ${packages[*]}"
  fi
  printf '==> system packages: %s\n' "${packages[*]}"
  log=$(mktemp "${TMPDIR:-/tmp}/hpctrain-apt.XXXXXX")
  apt=(${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -y -q)
  # One unreachable third-party list makes update fail; what is needed here may be known all the same.
  "${apt[@]}" update >"$log" 2>&1 || printf 'apt-get update failed; continuing with the existing package lists\n'
  if ! "${apt[@]}" install --no-install-recommends "${packages[@]}" >>"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    fail "apt-get could not install ${packages[*]}; whole log: $log"
  fi
  rm -f "$log"
  missing=()
  for name in "${programs[@]}"; do command -v "$name" >/dev/null || missing+=("$name"); done
fi
((${#missing[@]} == 0)) || fail "not found: ${missing[*]}"

if [[ $(id -u) != 0 ]]; then
  echo "==> Slurm is here; bring a cluster up as root: sudo .venv/bin/python -m tests.cluster up"
  exit 3
fi
if ! error=$(unshare --net --uts --mount --pid --fork ip link add end-a type veth peer name end-b 2>&1); then
  echo "cluster-setup: Slurm is here, but this machine allows no namespaces or virtual links: $error" >&2
  exit 3
fi
no_volumes=
if [[ ! -c /dev/fuse ]]; then
  no_volumes="this machine has no /dev/fuse"
else
  file=$(mktemp /var/lib/.hpctrain-attributes.XXXXXX)  # where clusters are made
  setxattr='import os, sys; os.setxattr(sys.argv[1], "trusted.hpct-test", b"1")'
  if ! error=$(python3 -c "$setxattr" "$file" 2>&1); then
    no_volumes="files in /var/lib have no trusted attributes: ${error##*$'\n'}"
  fi
  rm -f "$file"
fi
echo "==> a Slurm cluster can be made here: .venv/bin/python -m tests.cluster up"
if [[ -n $no_volumes ]]; then
  echo "==> without volumes of GlusterFS: $no_volumes"
else
  echo "==> also with volumes of GlusterFS: .venv/bin/python -m tests.cluster up --gluster"
fi
