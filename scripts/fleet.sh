# shellcheck shell=bash
# fleet.sh: what di-up and di-down share.  Sourced, never run.
#
# A run directory holds INSTANCE.pid (locked by the daemon), INSTANCE.log, the sockets, the key, and
# .up/ with what only these scripts need:
#   lock              of the script that works there
#   conf              the folder of the fleet
#   INSTANCE.child    who was started as INSTANCE, until it has its own pid file: its number and when it began
#   INSTANCE.ready    not empty: it is ready
#   INSTANCE.exit     the status with which it ended under the supervisor
#   supervisor.pid    open as long as the supervisor lives
#   supervisor.ask    a pipe: `wanted INSTANCE 0` begins one again that was given up

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

# Sets `pid` to the process that file $1 names and that has it open, and with that its lock; false when there is
# none.  A number that was used again belongs to a process that has not.  (To try the lock would be to take it for a
# moment, in which a daemon that starts would think that it runs already.)  $2: the name of its program, which decides
# where its descriptors are not for us to see.
find_holder() {
  local comm fd seen=
  pid=
  { read -r pid <"$1"; } 2>/dev/null || return 1
  [[ $pid =~ ^[0-9]+$ ]] && alive "$pid" || return 1
  for fd in "/proc/$pid/fd"/*; do
    [[ $fd -ef $1 ]] && return 0
    [[ -e $fd ]] && seen=1
  done
  [[ -z $seen ]] || return 1
  { read -r comm <"/proc/$pid/comm"; } 2>/dev/null && [[ $comm == "${2:0:15}" ]]
}

# Sets `pid` to the process of instance $2 in run directory $1; false when it does not run.
find_pid() {
  find_holder "$1/$2.pid" "${2%%.*}"
}

# True when somebody asked process $1 to stop and it has not looked at that yet.  Once it has, it says so to di-ctl.
asked_to_stop() {
  local text
  # As a whole.  `read` takes a line and seeks back to its end, which fails when the process has ended meanwhile; then
  # the rest is what bash gives to the next `read`, of whatever file.
  { text=$(<"/proc/$1/status"); } 2>/dev/null
  # SIGTERM and SIGINT, among those that wait for any of its threads.
  [[ $text =~ ShdPnd:[[:space:]]*([0-9a-f]+) ]] && ((16#${BASH_REMATCH[1]} & 16#4002))
}

# Prints when process $1 began, which tells two apart that have the same number.
born() {
  local line
  { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  # shellcheck disable=SC2086 # into words
  set -- ${line##*) }
  printf '%s\n' "${20}"
}

# Sets `pid` to the process that was started as instance $2 in run directory $1, whether or not it has got to its pid
# file; false when it is gone.
find_child() {
  local began
  pid=
  { read -r pid began <"$1/.up/$2.child"; } 2>/dev/null || return 1
  [[ $pid =~ ^[0-9]+$ ]] && alive "$pid" && [[ $(born "$pid") == "$began" ]]
}

# Sets `pid` to the supervisor of run directory $1; false when there is none.
find_supervisor() {
  find_holder "$1/.up/supervisor.pid" bash
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
  local pid
  if find_supervisor "$1"; then
    # Its group: the supervisor and what it waits with.  The daemons have groups of their own.
    kill -TERM -- "-$pid" 2>/dev/null
    await_gone 2 "$pid" || kill -KILL -- "-$pid" 2>/dev/null
    await_gone 2 "$pid"
  fi
  rm -f "$1/.up"/supervisor.{pid,ask}
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
