#!/bin/bash
# Slurm: if TMPDIR is not set, srun's first task of each node gets TMPDIR=/tmp, and the others do not get it.
#
# slurmstepd creates the folder in TMPDIR before it starts the first task of a node, and in that task's environment it sets
# the variable if it is missing. So the environments of the tasks of a step differ in a variable that the user has not set:
# what compares them, or what makes a name from them, finds a difference between the first task and all others. In a batch
# script nothing is seen of this, since the script is itself the first task of its step and passes TMPDIR on; after salloc,
# or with srun at the prompt, there is no such script.
#
# Seen with Slurm 22.05.8 of Debian 12 (x86_64), as root, the packages unpacked in a temporary folder:
#   task 0: TMPDIR=/tmp
#   task 1: TMPDIR is not set
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
started=()
end() {
  ((${#started[@]} == 0)) || kill "${started[@]}" 2>/dev/null || true
  sleep 1
  rm -rf "$work"
}
trap end EXIT
cd "$work"
for package in slurmctld=22.05.8-4+deb12u3 slurmd=22.05.8-4+deb12u3 slurm-client=22.05.8-4+deb12u3 \
  slurm-wlm-basic-plugins=22.05.8-4+deb12u3 munge=0.5.15-2+deb12u1 libmunge2=0.5.15-2+deb12u1; do
  apt-get download -q "$package" >/dev/null 2>&1
done
for package in ./*.deb; do dpkg -x "$package" root; done
plugins=$work/root/usr/lib/x86_64-linux-gnu/slurm-wlm
export PATH=$work/root/usr/sbin:$work/root/usr/bin:$PATH
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu:$plugins SLURM_CONF=$work/etc/slurm.conf
mkdir -p etc state spool log munge
chmod 700 munge
head -c 128 /dev/urandom >munge/key
chmod 600 munge/key
name=$(hostname -s)
cat >etc/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=46817
SlurmdPort=46818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$work/munge/socket
PluginDir=$plugins
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=$name NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
printf 'CgroupPlugin=autodetect\nIgnoreSystemd=yes\n' >etc/cgroup.conf
munged --force --foreground --socket="$work/munge/socket" --key-file="$work/munge/key" --log-file="$work/log/munged" \
  --pid-file="$work/munge/pid" --seed-file="$work/munge/seed" >log/munged.out 2>&1 &
started+=($!)
until [[ -S munge/socket ]]; do sleep 0.2; done
slurmctld-wlm -D >log/slurmctld 2>&1 &
started+=($!)
slurmd-wlm -D -d "$work/root/usr/sbin/slurmstepd-wlm" >log/slurmd 2>&1 &
started+=($!)
for _ in $(seq 300); do
  [[ $(sinfo -h -o %T 2>/dev/null) != idle ]] || break
  sleep 0.2
done
unset TMPDIR
timeout 60 srun --ntasks=2 --overcommit sh -c 'printf "task %s: %s\n" "$SLURM_PROCID" "${TMPDIR+TMPDIR=$TMPDIR}"' | sort >seen
sed 's/: $/: TMPDIR is not set/' seen
[[ $(cat seen) == "task 0: TMPDIR=/tmp
task 1: " ]]
