# shellcheck shell=bash
# What every job does; sourced by the *.sbatch files, which say RECIPE and ask for nodes.
#
#   sbatch slurm/opo_70b.sbatch                                   the recipe as it is
#   sbatch slurm/opo_70b.sbatch optimizer.lr=2e-6 train.steps=200 with changes
#   ROLLOUT_NODES=4 sbatch slurm/opo_70b.sbatch                   4 of the nodes only generate
#   CHECK_ONLY=1 sbatch slurm/opo_70b.sbatch                      only try the nodes
#
# Settings come from the environment of sbatch, or from slurm/env.sh:
#   ROLLOUT_NODES      nodes for servers alone; unset: what the recipe says (rollout.nodes)
#   CONTAINER_IMAGE    run in this image: pyxis where srun knows it, else apptainer
#   CONTAINER_MOUNTS   more mounts, host:container,...; the project directory is always there
#   VENV               Python environment on bare metal (default .venv)
#   MAX_RESTARTS       how many failures of a job are followed by another start (default 10)
#   SWEEP              with --array: a file whose line i holds the changes of array task i (from
#                      0; # begins a comment line, quotes hold values with spaces together)
#
# Exit codes: 0 done; 2 a mistake in the recipe or on the nodes, not started again; 85 stopped
# before the time limit, after a checkpoint, and queued again; 130, 143 ended by SIGINT, SIGTERM, not
# started again; else what failed.

set -uo pipefail
say() { echo "$(date '+%F %T') job ${SLURM_JOB_ID:-?}: $*"; }

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: this is a job script: run it by sbatch, from the project directory" >&2
  exit 2
fi
# Slurm runs a copy of the script, so its own place says nothing.
project=${MEGATRON_OPO_HOME:-$SLURM_SUBMIT_DIR}
if ! cd "$project" || [[ ! -f $RECIPE ]]; then
  echo "error: $project/$RECIPE does not exist: run sbatch in the project directory, or set" \
    "MEGATRON_OPO_HOME to it" >&2
  exit 2
fi
# shellcheck source=slurm/env.sh
source slurm/env.sh

# Not in the launcher: containers have no scontrol.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MEGATRON_OPO_NODES="${nodes[*]}"
export PYTHONUNBUFFERED=1

overrides=("$@")
if [[ -n ${ROLLOUT_NODES:-} ]]; then
  overrides+=("rollout.nodes=$ROLLOUT_NODES")
fi
if [[ -n ${SWEEP:-} ]]; then
  if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
    echo "error: SWEEP is for job arrays: sbatch --array=0-N" >&2
    exit 2
  fi
  line=$(grep -Ev '^[[:space:]]*(#|$)' "$SWEEP" | sed -n "$((SLURM_ARRAY_TASK_ID + 1))p")
  if [[ -z $line ]]; then
    echo "error: $SWEEP has no line for array task $SLURM_ARRAY_TASK_ID (the first is task 0)" >&2
    exit 2
  fi
  if ! split=$(xargs -n 1 printf '%s\n' <<<"$line"); then # understands quotes
    echo "error: $SWEEP, line of array task $SLURM_ARRAY_TASK_ID: a quote is not closed: $line" >&2
    exit 2
  fi
  mapfile -t more <<<"$split"
  overrides+=("name=$(basename "$RECIPE" .yaml)_$SLURM_ARRAY_TASK_ID" "${more[@]}")
fi
if [[ -n ${CHECK_ONLY:-} ]]; then
  overrides=(--check-only "${overrides[@]}")
fi

# The launchers end together and agree on a code, which --kill-on-bad-exit would replace by that of
# its own signal. --wait is for one that cannot end.
step=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --wait=60)
if [[ -z ${CONTAINER_IMAGE:-} ]]; then
  launch=("${VENV:-.venv}/bin/megatron-opo")
  if [[ ! -x ${launch[0]} ]]; then
    # realpath: VENV may be absolute or not.
    echo "error: $(realpath -m "${launch[0]}") does not exist: make setup STACK=cluster, or set" \
      "VENV" >&2
    exit 2
  fi
elif [[ $(srun --help) == *--container-image* ]]; then
  mounts="$project:$project${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
  step+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts"
    --container-workdir="$project" --no-container-mount-home)
  launch=(python3 -m megatron_opo)
else
  mounts="$project${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
  launch=(apptainer exec --nv --bind "$mounts" --pwd "$project" "$CONTAINER_IMAGE"
    python3 -m megatron_opo)
fi

restarts=${SLURM_RESTART_COUNT:-0}
many="${#nodes[@]} nodes"
[[ $many == "1 nodes" ]] && many="1 node"
say "$RECIPE on $many (${nodes[*]}), start $((restarts + 1))"
# In place before anything runs: without it the warning would end this script. Repeated, as the
# launchers do not hear it in their first seconds.
step_pid=
# shellcheck disable=SC2329 # the trap calls it
warned() {
  say "warned of the time limit"
  [[ -n $step_pid ]] && { while kill -USR1 "$step_pid"; do sleep 5; done } 2>/dev/null &
}
trap warned USR1

"${step[@]}" bash -c 'trap "" USR1; exec "$@"' launch "${launch[@]}" launch "$RECIPE" \
  "${overrides[@]}" &
step_pid=$!
# A trap ends `wait` early; the last one has the exit code of srun.
while :; do
  wait "$step_pid"
  code=$?
  kill -0 "$step_pid" 2>/dev/null || break
done
say "ended with exit code $code"

# The last task of an array has the id of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# Cancelled, preempted, or started again already: nothing for this script to decide.
is_running() {
  local found
  found=$(scontrol show job "$job")
  [[ $found == *JobState=RUNNING* && $found =~ Restarts=$restarts([[:space:]]|$) ]]
}

failures=.slurm_failures_$job
[[ $restarts == 0 ]] && rm -f "$failures" # of a job long ago that had this id and was cancelled
case $code in
  0 | 2 | 130 | 143) again= ;;
  85) again=yes ;;
  *)
    echo "start $((restarts + 1)): exit code $code" >>"$failures"
    [[ $(wc -l <"$failures") -le ${MAX_RESTARTS:-10} ]] && again=yes
    ;;
esac
if [[ -n ${again:-} && -z ${CHECK_ONLY:-} ]] && is_running; then
  say "queueing it again"
  scontrol requeue "$job" && sleep 60
fi
rm -f "$failures"
exit "$code"
