#!/usr/bin/env bash
# Runs a program in several processes on this machine, each with virtual CPU devices.
#
#   launch/local.sh -n 2 -d 4 -- --checkpoint=DIR --prompts=FILE --output_dir=OUT --pp=2 --ring=2 --ulysses=2
#
#   -n  processes (2)
#   -d  CPU devices per process (4)
#   -m  module of the program (slope_jax.launch.prefill)
#   --  flags of the program, the same for every process
#
# Process 0 writes to stdout and stderr as it would alone; the lines of the others go to stderr behind "[number] ".
# PYTHON names the interpreter (python). The status is 0 when every process ended with 0, else that of one that
# failed by itself. Ctrl-C and SIGTERM end all processes; nothing but these processes is ever ended.
set -uo pipefail

processes=2
devices=4
module=slope_jax.launch.prefill
python=${PYTHON:-python}
# A process is given this long to end by itself after another has failed, which takes it at most about 25 s.
patience_s=45

usage() {
  sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

while getopts "n:d:m:h" option; do
  case $option in
    n) processes=$OPTARG ;;
    d) devices=$OPTARG ;;
    m) module=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[[ $processes =~ ^[1-9][0-9]*$ && $devices =~ ^[1-9][0-9]*$ ]] || usage

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit 2

pids=()
log_pids=()

send() { # send SIGNAL: to the processes that are still there
  local pid
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then kill "-$1" "$pid" 2>/dev/null; fi
  done
}

any_left() {
  local pid
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then return 0; fi
  done
  return 1
}

end_all() { # SIGCONT lets a stopped process see its SIGTERM
  send TERM
  send CONT
  local i
  for ((i = 0; i < 25; i++)); do
    any_left || return 0
    sleep 0.2
  done
  send KILL
}

interrupted=0
trap 'interrupted=130' INT
trap 'interrupted=143' TERM

for ((i = 0; i < processes; i++)); do
  command=("$python" -m "$module" "--cpu_devices=$devices" "$@")
  if ((processes > 1)); then
    command+=("--coordinator_address=127.0.0.1:$port" "--num_processes=$processes" "--process_id=$i")
  fi
  if ((i == 0)); then
    "${command[@]}" &
    pids+=($!)
  else
    exec {log}> >(exec sed -u "s/^/[$i] /" >&2)
    log_pids+=($!)
    "${command[@]}" >&"$log" 2>&1 {log}>&- &
    pids+=($!)
    exec {log}>&-
  fi
done

status=0
ended=()
failed_at=
while true; do
  # Asked before the statuses are read, so that none is missed when it says that all have ended.
  any_left && left=1 || left=0
  for i in "${!pids[@]}"; do
    if [[ -z ${ended[$i]:-} ]] && ! kill -0 "${pids[$i]}" 2>/dev/null; then
      wait "${pids[$i]}"
      ended[$i]=$?
      # 3 is what a process ends with because another was lost; the other's own status says more.
      if ((ended[i] != 0)) && ((status == 0 || status == 3)); then status=${ended[$i]}; fi
      if ((ended[i] != 0)) && [[ -z $failed_at ]]; then failed_at=$SECONDS; fi
    fi
  done
  if ((!left)); then break; fi
  if ((interrupted)); then
    end_all
  elif [[ -n $failed_at ]] && ((SECONDS - failed_at > patience_s)); then
    echo "local.sh: ends the processes that are left $patience_s s after another failed" >&2
    end_all
  fi
  sleep 0.2
done

for pid in "${log_pids[@]}"; do wait "$pid"; done # the last lines
if ((interrupted)); then exit "$interrupted"; fi
exit "$status"
