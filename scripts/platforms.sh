#!/usr/bin/env bash
# Tries the last commit of this checkout on other releases of Debian, each in a root folder of its own. As root, on a
# Debian with debootstrap; about an hour per release the first time, most of it downloads, builds and tests.
#
#   make platforms                                  # the releases below, one after the other
#   make platforms PLATFORMS=trixie                 # one of them
#   bash scripts/platforms.sh trixie -- make lint   # a command of your own, in the clone of the last try there
#
# In each: `make demo` with nothing cached, `make demo` again, then the tests of TESTS. What was done, its seconds and
# exit code come out as a table for docs/platforms.md; whole outputs lie in $PLATFORMS_IN/NAME.log.
#
# Variables read:
#   PLATFORMS_IN     where the root folders are, 8 GB each     (default: build/platforms)
#   PLATFORMS_BIND   further folders of this machine that are seen there under the same names, as one with wheels
#   PLATFORMS_TESTS  what pytest runs there                    (default: a choice of about 30 minutes)
#   HPCTRAIN_WITHOUT as for `make setup`
# pip's settings of this machine (PIP_*, /etc/pip.conf, /etc/xdg/pip) and its certificates hold there too.
set -euo pipefail

RELEASES=(bookworm trixie testing)
TESTS=${PLATFORMS_TESTS:-"tests/unit/scripts tests/contract tests/ranks/comm/test_backends.py tests/ranks/launch/test_process.py \
tests/ranks/checkpoint/test_save.py tests/ranks/checkpoint/test_engines.py tests/ranks/hvd tests/ranks/distributed/test_c10d.py \
tests/ranks/train/test_training.py tests/cluster/test_life.py"}

say() { printf '==> %s\n' "$*"; }
fail() { printf 'platforms: %s\n' "$*" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
roots=$(realpath -m "${PLATFORMS_IN:-build/platforms}")

make_root() {  # make_root RELEASE
  local root=$roots/$1
  [[ ! -e $root.made ]] || return 0
  say "$1: a root folder in $root"
  rm -rf "$root"
  mkdir -p "$roots"
  debootstrap --variant=minbase --include=ca-certificates,git,make "$1" "$root" >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; fail "debootstrap could not make $1; whole log: $root.log"; }
  touch "$root.made"
}

# inside RELEASE COMMAND: runs it in the root folder. With pivot_root, not chroot: the Slurm cluster of the tests makes
# mount namespaces of its own, whose root would be this machine's.
inside() {
  local root=$roots/$1 folder
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  for folder in /etc/pip.conf /etc/xdg/pip /etc/ssl/certs/ca-certificates.crt; do
    # Not again if it is the same: another command may start in that root at this moment.
    if [[ -e $folder ]] && ! diff -rq "$folder" "$root$folder" >/dev/null 2>&1; then
      mkdir -p "$root$(dirname "$folder")"; cp -rL --remove-destination "$folder" "$root$(dirname "$folder")/"
    fi
  done
  # shellcheck disable=SC2016,SC2086
  unshare --mount --propagation private --pid --fork --kill-child bash -euc '
    root=$1 command=$2; shift 2
    mount --bind "$root" "$root"
    cd "$root"
    mkdir -p before
    mount -t proc proc proc
    mount --rbind /sys sys
    mount --rbind /dev dev
    mount -t tmpfs -o size=50% tmpfs dev/shm
    for folder; do mkdir -p ".$folder"; mount --rbind "$folder" ".$folder"; done
    pivot_root . before
    umount -l /before
    # Only what a user has after logging in, and what pip and the network need on this machine.
    keep=()
    while IFS= read -r name; do keep+=("$name=${!name}"); done < <(compgen -e | grep -E "^(PIP_|HPCTRAIN_|https?_proxy|no_proxy|OMPI_ALLOW)" || true)
    exec env -i HOME=/root TERM=dumb LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      "${keep[@]}" bash -c "$command"
  ' inside "$root" "$2" ${PLATFORMS_BIND:-}
}

# step RELEASE WHAT COMMAND: runs the command in the clone, and adds a row to the table.
step() {
  local began=$SECONDS code=0 counts
  say "$1: $2"
  inside "$1" "cd /root/hpctrain && { $3; }" >"$roots/$1.step" 2>&1 || code=$?
  cat "$roots/$1.step" >> "$roots/$1.log"
  counts=$(grep -E '^(=+ )?[0-9]+ (passed|failed|skipped|error).*( =+)?$' "$roots/$1.step" | tail -n 1 | tr -d '=' | sed 's/^ *//; s/ *$//') || true
  rows+=("| $1 | $2 | $code | $((SECONDS - began)) s | ${counts} |")
  printf '%s\n' "${rows[-1]}"
  if ((code)); then tail -n 15 "$roots/$1.step" >&2; failed=yes; fi
}

failed='' rows=()
try() {
  rows=()
  make_root "$1"
  : > "$roots/$1.log"
  # From out here: the repository of a worktree lies elsewhere. HOME: what is set for this clone is of that root alone.
  local home=$roots/$1/root
  rm -rf "$home/hpctrain" "$home/.cache/hpctrain"
  HOME=$home git config --global --replace-all safe.directory '*'
  HOME=$home git clone -q --no-hardlinks "$PWD" "$home/hpctrain" || fail "$1: no clone"
  step "$1" "make demo, nothing cached" "make demo"
  step "$1" "make demo again" "make demo"
  step "$1" "what is there" "source .venv/bin/activate; hpctrain doctor; python -V; gcc --version | head -n 1; mpirun --version | head -n 1;
    pip list 2>/dev/null | grep -E '^(torch|numpy|h5py|mpi4py|horovod) '"
  step "$1" "tests" "export HPCTRAIN_CLUSTER=required; make cluster-setup && source .venv/bin/activate &&
    python -m pytest -q --timeout=900 -p no:cacheprovider $TESTS"
  { echo "| Debian | what | exit code | time | tests |"; echo "| --- | --- | --- | --- | --- |"; printf '%s\n' "${rows[@]}"; } | tee "$roots/$1.md"
}

main() {
  local releases=() release
  [[ $(id -u) == 0 ]] || fail "only root may make root folders: run it as root"
  command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
  while (($#)) && [[ $1 != -- ]]; do releases+=("$1"); shift; done
  if (($#)); then
    shift
    for release in "${releases[@]}"; do inside "$release" "cd /root/hpctrain && $*"; done
    return
  fi
  ((${#releases[@]})) || releases=("${RELEASES[@]}")
  for release in "${releases[@]}"; do try "$release"; done
  [[ ! $failed ]]
}

main "$@"
