#!/bin/bash
# Slurm: a waiting job whose number of tasks is changed still starts with the SLURM_NTASKS of its submission.
#
# sbatch puts SLURM_NTASKS into the job's environment when the job is submitted. `scontrol update` of a waiting job
# changes the allocation that the job gets, and what `scontrol show job` says, but not that environment. So in the batch
# script srun reads the old number, and with fewer tasks than before it refuses to start ("More processors requested than
# permitted"). SLURM_JOB_NUM_NODES is that of the allocation, so a script of a job that may be changed in the queue has to
# count its tasks itself.
#
# Seen with Slurm 22.05.8 of Debian 12 (x86_64), as root, the packages unpacked in a temporary folder:
#   NumTasks after scontrol update: 1
#   SLURM_NTASKS in the job: 2
#   More processors requested than permitted
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
SlurmctldPort=46827
SlurmdPort=46828
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
cat >job <<'JOB'
#!/bin/bash
echo "SLURM_NTASKS in the job: $SLURM_NTASKS"
srun true 2>&1 | grep -o "More processors requested than permitted" | sort -u
JOB
job=$(sbatch --parsable --hold --ntasks=2 --output="$work/said" job)
scontrol update JobId="$job" NumTasks=1 NumCPUs=1
echo "NumTasks after scontrol update: $(scontrol -o show job "$job" | grep -o 'NumTasks=[0-9]*' | cut -d= -f2)" | tee seen
scontrol release "$job"
for _ in $(seq 300); do
  [[ $(squeue -h -j "$job" 2>/dev/null) ]] || break
  sleep 0.2
done
tee -a seen <said
[[ $(cat seen) == "NumTasks after scontrol update: 1
SLURM_NTASKS in the job: 2
More processors requested than permitted" ]]
