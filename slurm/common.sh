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
#   MAX_RESTARTS       how often a job that failed starts again by itself (default 10)
#   SWEEP              with --array: a file whose line i holds the changes of array task i (from
#                      0; # begins a comment line, quotes hold values with spaces together)
#
# Exit codes: 0 done; 2 a mistake in the recipe or on the nodes, not started again; 85 stopped
# before the time limit, after a checkpoint, and queued again; else what failed.

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
  line=$(grep -Ev '^[[:space:]]*(#|$)' "$SWEEP" | sed -n "$((SLURM_ARRAY_TASK_ID + 1))p")
  if [[ -z $line ]]; then
    echo "error: $SWEEP has no line for array task $SLURM_ARRAY_TASK_ID (the first is task 0)" >&2
    exit 2
  fi
  mapfile -t more < <(xargs -n 1 printf '%s\n' <<<"$line") # understands quotes
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
# In place before anything runs: without it the warning would end this script.
step_pid=
trap 'say "warned of the time limit"; [[ -n $step_pid ]] && kill -USR1 "$step_pid"' USR1

"${step[@]}" "${launch[@]}" launch "$RECIPE" "${overrides[@]}" &
step_pid=$!
# A trap ends `wait` early; the last one has the exit code of srun.
while :; do
  wait "$step_pid"
  code=$?
  kill -0 "$step_pid" 2>/dev/null || break
done
say "ended with exit code $code"

# Cancelled or preempted: starting it again is not for this script to decide.
running() { [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; }

if [[ -z ${CHECK_ONLY:-} ]] && { ((code == 85)) || { ((code != 0 && code != 2)) && ((restarts < ${MAX_RESTARTS:-10})); }; }; then
  if running; then
    say "queueing it again"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
  fi
fi
exit "$code"
