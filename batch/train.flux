#!/bin/bash
# Trains a recipe with Flux; stops in time, saves, submits the next job, which resumes from there.
#
# NEVER RUN HERE on a real Flux: written from its manual pages; checked by shellcheck, and its flow with a stand-in for
# flux (tests/unit/scripts/test_batch_scripts.py).
#
#   flux batch batch/train.flux examples/digits.toml
#   export HPCTRAIN_FLUX='-N 4 -n 32 -t 2h' HPCTRAIN_RANKS=32; flux batch $HPCTRAIN_FLUX batch/train.flux r.toml
#
# What is given to flux batch wins over the lines below. Adapt these to your cluster:
# flux: -N 2
# flux: -n 4
# flux: -t 1h
# flux: --job-name=hpctrain

# Load your site's modules here: those that `make setup` was run with.
# module load openmpi hdf5-mpi python

# Options that were given to flux batch, for the next job; a job cannot read them.
read -ra flux_options <<<"${HPCTRAIN_FLUX:-}"
num_ranks=${HPCTRAIN_RANKS:-4}
# How many more jobs the first one may lead to; HPCTRAIN_ATTEMPT counts them.
max_requeues=${HPCTRAIN_MAX_REQUEUES:-20}
attempt=${HPCTRAIN_ATTEMPT:-0}
environment=${HPCTRAIN_ENVIRONMENT:-.venv}
# Flux runs a copy of this file: where the original is, seen from the folder that flux batch was called in.
script=${HPCTRAIN_SCRIPT:-batch/train.flux}

say() { printf 'train.flux: %s\n' "$*" >&2; }

if (($# == 0)); then say "no recipe: flux batch $script RECIPE"; exit 2; fi
if [[ -e $environment/bin/activate ]]; then
  # shellcheck source=/dev/null
  source "$environment/bin/activate"
fi
if ! command -v hpctrain >/dev/null; then
  say "no hpctrain on the PATH and no $environment here: activate its environment before flux batch, or set HPCTRAIN_ENVIRONMENT"
  exit 5
fi

left_s=$(flux job timeleft) || exit 5
# The ranks stop by themselves before this time, with what a step and a save take (docs/guides/stopping.md).
export HPCTRAIN_DEADLINE=$(($(date +%s) + left_s))
cancelled=''
# flux cancel: whether the job comes back is not ours to say then.
trap 'cancelled=yes' TERM

say "start $((attempt + 1)): $num_ranks ranks, $left_s s left"
# After the first job the run resumes from its own newest checkpoint, whatever --resume the first one was given.
again=()
((attempt > 0)) && again=(--resume auto)
flux run --ntasks="$num_ranks" hpctrain train "$@" "${again[@]}"
code=$?

if ((code == 75)) && [[ ! $cancelled ]]; then
  export HPCTRAIN_ATTEMPT=$((attempt + 1))
  if ((attempt >= max_requeues)); then
    say "stopped with the state saved, after $max_requeues jobs before: submit it again to resume"
  elif next=$(flux --parent batch "${flux_options[@]}" "$script" "$@"); then
    say "stopped with the state saved; job $next resumes from there"
  else
    say "stopped with the state saved; Flux did not take the next job: submit it again to resume"
  fi
fi
exit "$code"
