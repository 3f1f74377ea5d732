# shellcheck shell=bash
# fleet.sh: what di-up and di-down share.  Sourced, never run.
#
# A run directory holds INSTANCE.pid (locked by the daemon), INSTANCE.log, the sockets, the key, and
# .up/ with what only these scripts need: INSTANCE.ready, INSTANCE.exit and supervisor.pid.

# Between two looks at something that is awaited.
# shellcheck disable=SC2034 # di-up reads it too
look_s=0.02

# True while process $1 exists and is no zombie.
alive() {
  local line
  { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  line=${line##*) }
  [[ ${line:0:1} != [ZX] ]]
}

# Sets `pid` to the process of instance $2 in run directory $1; false when it does not run.
find_pid() {
  local comm program=${2%%.*}
  pid=
  { read -r pid <"$1/$2.pid"; } 2>/dev/null || return 1
  [[ $pid =~ ^[0-9]+$ ]] && alive "$pid" || return 1
  # A number that was used again belongs to another program.
  { read -r comm <"/proc/$pid/comm"; } 2>/dev/null && [[ $comm == "${program:0:15}" ]]
}

# Waits until none of the processes $2... lives, $1 seconds at most; false when one still does.
await_gone() {
  local limit_s=$1 process
  shift
  local end=$((SECONDS + limit_s))
  for process; do
    while alive "$process"; do
      ((SECONDS <= end)) || return 1
      sleep "$look_s"
    done
  done
}

# Stops processes $2...: asks, and kills after $1 seconds.
stop_processes() {
  local limit_s=$1
  shift
  (($# > 0)) || return 0
  kill -TERM "$@" 2>/dev/null
  kill -CONT "$@" 2>/dev/null # a stopped process would not hear it
  await_gone "$limit_s" "$@" && return 0
  kill -KILL "$@" 2>/dev/null
  await_gone 10 "$@"
}

stop_supervisor() {
  local supervisor
  { read -r supervisor <"$1/.up/supervisor.pid"; } 2>/dev/null || return 0
  if [[ $supervisor =~ ^[0-9]+$ ]] && alive "$supervisor" && grep -qz -- --supervisor "/proc/$supervisor/cmdline" 2>/dev/null; then
    # Its group: the supervisor and what it waits with.  The daemons have groups of their own.
    kill -TERM -- "-$supervisor" 2>/dev/null
    await_gone 2 "$supervisor" || kill -KILL -- "-$supervisor" 2>/dev/null
    await_gone 2 "$supervisor"
  fi
  rm -f "$1/.up/supervisor.pid"
}

# Stops the instances $3... of run directory $1, callers before those they call, $2 seconds for each step.
stop_instances() {
  local run=$1 limit_s=$2 step instance pid
  shift 2
  local -a pids
  for step in '^di-router\.' '^di-(prefill|decode|vision|eplb)\.' '^di-kvd\.' '^di-'; do
    pids=()
    for instance; do
      [[ $instance =~ $step ]] && find_pid "$run" "$instance" && pids+=("$pid")
    done
    stop_processes "$limit_s" "${pids[@]}"
  done
}

# Removes what killed instances left behind in $1; the others are those that stopped.
forget_instances() {
  local run=$1 instance
  shift
  for instance; do
    find_pid "$run" "$instance" || rm -f "$run/$instance".{pid,ctl,ro,http,sock,arena,listen}
  done
}
