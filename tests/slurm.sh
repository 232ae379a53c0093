#!/usr/bin/env bash
# A real Slurm on this one host, for tests: munged, slurmctld and slurmd, with every file of theirs in DIR.
#   tests/slurm.sh start DIR [key=value ...]   the words are appended to slurm.conf, e.g. MaxArraySize=5
#   tests/slurm.sh stop DIR                    ends the daemons and whatever jobs are left
# Clients need only the line that start prints (also in DIR/env): export SLURM_CONF=DIR/slurm.conf
# Needs Debian's munge, slurmctld, slurmd and slurm-client, and root. SLURM_SH_TIMEOUT: seconds that start waits (30).
# Partitions: main (default), and urgent, whose jobs preempt main's: USR2 (or SIGTERM), 10 s of grace, then a requeue.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

usage() { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd -P)
shift 2
export SLURM_CONF=$dir/slurm.conf

running() { # running PID NAME: that process is there, of that name (pids get reused) and not yet dead
  [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null
}

alive() { # alive NAME: the daemon of that name's pid file
  local pid
  pid=$(cat "$dir/$1.pid" 2>/dev/null) && [ -n "$pid" ] && running "$pid" "$1"
}

stepds() { # the job managers of this Slurm: they outlive slurmd and have no pid file, but hold its log open
  local pid
  for pid in $(pgrep -x slurmstepd); do
    if find "/proc/$pid/fd" -lname "$dir/slurmd.log" 2>/dev/null | grep -q .; then echo "$pid"; fi
  done
}

jobs_left() { # the processes of this Slurm's jobs, whatever sessions they made: our SLURM_CONF, and a job's number
  local file
  for file in $(grep -lzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null); do
    if grep -qz '^SLURM_JOB_ID=' "$file" 2>/dev/null; then file=${file%/environ}; echo "${file#/proc/}"; fi
  done
}

stop() {
  local name try pid
  if alive slurmctld && alive slurmd && [ -f "$SLURM_CONF" ]; then
    timeout 5 scancel --user="$(id -un)" 2>/dev/null || true # in peace first, then with kill -9 below
    for try in $(seq 20); do [ -n "$(stepds)" ] || break; sleep 0.1; done
  fi
  for name in slurmctld slurmd munged; do # munged last: the others cannot speak without it
    if alive "$name"; then
      pid=$(cat "$dir/$name.pid") # now: slurmd removes the file well before its end
      kill "$pid" 2>/dev/null || true
      for try in $(seq 20); do running "$pid" "$name" || break; sleep 0.1; done
      if running "$pid" "$name"; then kill -9 "$pid" 2>/dev/null || true; fi
    fi
    rm -f "$dir/$name.pid"
  done
  for pid in $(stepds) $(jobs_left); do kill -9 "$pid" 2>/dev/null || true; done
}

fail() {
  local log
  echo "slurm.sh: $1" >&2
  for log in munged.out munged.log slurmctld.out slurmctld.log slurmd.out slurmd.log; do
    if [ -s "$dir/$log" ]; then echo "--- $dir/$log" >&2; tail -n 15 "$dir/$log" >&2; fi
  done
  stop
  exit 1
}

port() { # a free one, below the range from which the kernel gives clients theirs
  local p
  while :; do
    p=$((20000 + RANDOM % 12000))
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; then echo "$p"; return; fi
  done
}

start() {
  local name user munge deadline node ctld_port d_port
  for name in munged slurmctld slurmd sinfo; do
    command -v "$name" >/dev/null || { echo "slurm.sh: no $name: apt-get install munge slurmctld slurmd slurm-client" >&2; exit 1; }
  done
  [ "$(id -u)" = 0 ] || { echo "slurm.sh: needs root" >&2; exit 1; }
  for name in munged slurmctld slurmd; do
    if alive "$name"; then echo "slurm.sh: $name runs already in $dir" >&2; exit 1; fi
  done
  # A Unix socket's path has at most 107 characters; the longest is spool/NODE_JOBID.STEPID
  [ ${#dir} -le 70 ] || { echo "slurm.sh: too long a path for sockets, 70 characters at most: $dir" >&2; exit 1; }
  name=$(hostname -s)
  user=$(id -un)
  munge=$dir/munge.socket
  rm -rf "$dir/state" "$dir/spool" # from an earlier start
  mkdir -p "$dir/state" "$dir/spool"
  rm -f "$munge" "$munge.lock"
  [ -s "$dir/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
  ctld_port=$(port)
  d_port=$(port)
  while [ "$d_port" = "$ctld_port" ]; do d_port=$(port); done
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$d_port
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job must wait: 120 s unless told, 5 s at least
AuthInfo=socket=$munge,cred_expire=5
# The host's cgroups are left alone, and there is no accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Look for jobs to start each second, rather than each minute
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobRequeue=1
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# What the node has is believed, whatever the host has; its GPUs are copies of /dev/null
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=$name NodeAddr=127.0.0.1 CPUs=4 RealMemory=4096 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU=256 PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefMemPerCPU=256 PriorityTier=10 PreemptMode=OFF
CONF
  rm -f "$dir/gpu0" "$dir/gpu1"
  mknod "$dir/gpu0" c 1 3
  mknod "$dir/gpu1" c 1 3
  echo "Name=gpu File=$dir/gpu[0-1]" >"$dir/gres.conf"
  for name in "$@"; do # in place of ours, where there is one: a key given twice is an error to Slurm
    [[ $name == *=* ]] || { echo "slurm.sh: not key=value: $name" >&2; exit 2; }
    sed -i "/^${name%%=*}=/Id" "$SLURM_CONF"
    echo "$name" >>"$SLURM_CONF"
  done
  echo "export SLURM_CONF=$SLURM_CONF" >"$dir/env"

  # Their output goes to files, else they would hold our caller's pipe open.
  # --force: munged would refuse to run as root, or in folders that others may write to
  munged --force --socket="$munge" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" >"$dir/munged.out" 2>&1 || fail "munged did not start"
  (cd "$dir" && exec slurmctld -f "$SLURM_CONF" >"$dir/slurmctld.out" 2>&1) || fail "slurmctld did not start"
  (cd "$dir" && exec slurmd -f "$SLURM_CONF" >"$dir/slurmd.out" 2>&1) || fail "slurmd did not start"
  deadline=$((SECONDS + ${SLURM_SH_TIMEOUT:-30}))
  while :; do
    node=$(timeout 5 sinfo -h -p main -o '%T %E' 2>&1) || true
    case $node in
    idle*none) break ;;
    *drain* | inval*) fail "the node was refused: $node" ;; # does not mend itself
    esac
    [ $SECONDS -lt $deadline ] || fail "the node is not idle after ${SLURM_SH_TIMEOUT:-30} s: $node"
    sleep 0.1
  done
  cat "$dir/env"
}

case $action in
start) start "$@" ;;
stop) stop ;;
*) usage ;;
esac
