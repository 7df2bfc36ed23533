"""Splits of a node's cores into ranks and threads: which there are, and with which a model trains fastest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from hpctrain.bench.scaling.sweep import FailedSplit, SplitVerdict, SweepSettings
from hpctrain.errors import UsageError
from hpctrain.launch import Launcher, LocalMachine, plan_launch
from hpctrain.scaling import RatioEstimate, paired_ratio

OPTION = "--split-cores"
# With more divisors than this, only numbers of threads that are powers of two, and one rank with all cores.
MOST_DIVISORS = 6
LEVEL = 0.95  # of all intervals together
# How long other programs are watched before each run, and the share of CPU time from which a note says so.
BUSY_OVER_S, BUSY_FROM = 0.5, 0.1
# `hpctrain launch` takes the threads of a rank from these if they are set, whatever the number of ranks.
_GIVEN_THREADS = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")


def cores_to_split(*, machine: LocalMachine, launcher: Launcher, environ: Mapping[str, str]) -> int:
    """Returns the number of cores that `hpctrain launch` divides over the ranks of a node: the threads of one rank.

    Inside a Slurm allocation this is the number of CPUs that the job has on a node. Raises LaunchError if no ranks can
    be started from here.
    """
    planned = plan_launch(
        ["hpctrain"], num_ranks=1, environ=without_threads(environ), machine=machine, launcher=launcher
    )
    return int(planned.env_updates["OMP_NUM_THREADS"])


def without_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables that give every rank the same number of threads."""
    return {name: value for name, value in environ.items() if name not in _GIVEN_THREADS}


def ranks_of_splits(cores: int, *, asked: Sequence[int] | None) -> list[int]:
    """Returns the numbers of ranks to measure, ascending. Each rank has `cores` / ranks threads.

    asked: the user's choice; None: every divisor of `cores`, or those whose threads are powers of two if there are many
    divisors.

    Raises UsageError if there are fewer than two splits.
    """
    divisors = [ranks for ranks in range(1, cores + 1) if cores % ranks == 0]
    if cores == 1:
        raise UsageError(
            f"{OPTION}: there is only one core for ranks and threads, so there is nothing to compare: call it on a "
            "machine, or in a Slurm job, that has more (salloc --nodes=1 --cpus-per-task=N)"
        )
    if asked is None:
        powers = [ranks for ranks in divisors if ranks == 1 or (cores // ranks).bit_count() == 1]
        return divisors if len(divisors) <= MOST_DIVISORS else powers
    wrong = [ranks for ranks in asked if ranks not in divisors]
    if wrong or len(asked) < 2:
        found = f"{wrong[0]} ranks cannot divide {cores} cores evenly" if wrong else "one split has no other"
        raise UsageError(
            f"{OPTION} --ranks {','.join(map(str, asked))}: {found}: choose two or more of "
            f"{','.join(map(str, divisors))}, or leave out --ranks"
        )
    return list(asked)


def judge_splits(
    rates: Mapping[int, Mapping[int, float]],
    *,
    settings: SweepSettings,
    failed: Sequence[FailedSplit],
    recipe: str,
) -> SplitVerdict | None:
    """Returns with which split of the cores the model trains fastest; None if no round has a run of each split.

    rates: samples/s by number of ranks and round, for every split.
    failed: splits that are left out.
    recipe: path of the recipe, for the command line.
    """
    left_out = [one.ranks for one in failed]
    compared = {ranks: found for ranks, found in rates.items() if ranks not in left_out}
    rounds = sorted(set.intersection(*(set(found) for found in compared.values()))) if compared else []
    if not rounds:
        return None
    columns = {ranks: [found[number] for number in rounds] for ranks, found in sorted(compared.items())}
    fewest = min(columns)
    fastest = max(columns, key=lambda ranks: paired_ratio(columns[ranks], columns[fewest]).value)
    # The fastest is known only after the measurement, so that all intervals must hold together (Bonferroni).
    level = 1 - (1 - LEVEL) / max(1, len(columns) - 1)
    ratios = {
        ranks: paired_ratio(columns[fastest], column, level=level)
        for ranks, column in columns.items()
        if ranks != fastest
    }
    undecided = [ranks for ranks, ratio in ratios.items() if ratio.low is None or ratio.low <= 1]
    use = min([fastest, *undecided]) if len(rounds) > 1 else fastest
    names = {ranks: settings.size_name(ranks) for ranks in rates}
    if not ratios:
        text = f"On this node, {names[fastest]} is the only split that could be measured."
    elif undecided:
        text = _undecided(ratios, undecided, fastest=fastest, names=names, num_rounds=len(rounds))
        text += f" Of these, {names[use]} needs the least memory." if len(rounds) > 1 else ""
    else:
        text = _decided(ratios, fastest=fastest, names=names)
    for one in failed:
        text += f" {names[one.ranks]} failed with exit code {one.exit_code} and was not compared."
    return SplitVerdict(
        fastest=fastest, undecided=undecided, use=use, failed=list(failed), text=text,
        ratios={ranks: ratio.as_json() for ranks, ratio in ratios.items()},
        start=_how_to_start(use, settings=settings, recipe=recipe),
    )  # fmt: skip


def _decided(ratios: Mapping[int, RatioEstimate], *, fastest: int, names: Mapping[int, str]) -> str:
    order = sorted(ratios, key=lambda ranks: ratios[ranks].value)
    text = f"On this node, {names[fastest]} train{'s' * (fastest == 1)} this model fastest: "
    text += _times(ratios, order[0], names=names)
    if len(order) > 1:
        text += f", and {ratios[order[-1]].value:.2f} times as many as {names[order[-1]]}"
    return f"{text}."


def _undecided(
    ratios: Mapping[int, RatioEstimate],
    undecided: Sequence[int],
    *,
    fastest: int,
    names: Mapping[int, str],
    num_rounds: int,
) -> str:
    *first, last = [names[ranks] for ranks in sorted([fastest, *undecided])]
    slowest = max(undecided, key=lambda ranks: ratios[ranks].value)
    rounds = f"{num_rounds} round{'s' * (num_rounds > 1)}"
    spread = "which is within the spread" if num_rounds > 1 else "and a single round does not show the spread"
    return (
        f"On this node, {rounds} cannot tell whether {', '.join(first)} or {last} trains this model "
        f"{'fastest' if len(undecided) > 1 else 'faster'}: {names[fastest]} had "
        f"{_times(ratios, slowest, names=names)}, {spread} of the repetitions."
    )


def _times(ratios: Mapping[int, RatioEstimate], ranks: int, *, names: Mapping[int, str]) -> str:
    ratio = ratios[ranks]
    text = f"{ratio.value:.2f} times as many samples/s as {names[ranks]}"
    if ratio.low is None or ratio.high is None:
        return text
    together = "simultaneous " * (len(ratios) > 1)
    return f"{text} ({LEVEL:.0%} {together}interval {ratio.low:.2f} to {ratio.high:.2f})"


def _how_to_start(ranks: int, *, settings: SweepSettings, recipe: str) -> str:
    return (
        f"For {settings.size_name(ranks)} on a node: `hpctrain launch -n {ranks} -- hpctrain train {recipe}` with "
        f"OMP_NUM_THREADS unset; in a batch script, before it, `#SBATCH --nodes=1 --ntasks-per-node={ranks} "
        f"--cpus-per-task={settings.threads_of(ranks)}`; for `hpctrain slurm submit`, tasks_per_node = {ranks} and "
        f"cpus_per_task = {settings.threads_of(ranks)} in the recipe's section [slurm]."
    )


def busy_notes(busy: Sequence[float]) -> list[str]:
    """Returns a note if other programs used the cores, which slows down ranks with many threads the most.

    busy: the share of the machine's CPU time that other programs used before each run.
    """
    used = fmean(busy) if busy else 0.0
    if used < BUSY_FROM:
        return []
    return [
        f"other programs used {used:.0%} of this machine's CPU time between the runs: threads of one rank wait for "
        "each other at every operation, so on a node of its own the model may train faster with fewer ranks than here"
    ]
