"""`hpctrain supervise`: starts the ranks, watches them, and restarts them on the remaining nodes.

Two pure functions judge and decide: `classify` tells why an attempt ended, and `decide` tells what to do next.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from hpctrain.errors import ExitCode, GivenUp, LaunchError
from hpctrain.launch import (
    STOP_SIGNALS,
    ForkServer,
    LocalMachine,
    plan_launch,
    run_launch,
)
from hpctrain.resilience import ELASTIC_VARIABLE, NOTICES_VARIABLE, OUT_OF_MEMORY_VARIABLE
from hpctrain.supervise.attempt_watch import AttemptWatch, Notices, say
from hpctrain.supervise.classify import AttemptEnd, Diagnosis, Evidence, classify
from hpctrain.supervise.elastic import (
    Elastic,
    NodeReturns,
    ResizeWatch,
    pause_until,
)
from hpctrain.supervise.ledger import (
    Attempt,
    Ledger,
    RunProgress,
    close_open_attempt,
    effective_time,
    record_begin_of_training,
    record_end,
)
from hpctrain.supervise.nodes import (
    MARK_VARIABLE,
    Allocation,
    Checks,
    NodeWatch,
    Survey,
    end_fork_servers,
    nodes_now,
    survey_nodes,
    was_preempted,
)
from hpctrain.supervise.rules import (
    Action,
    Decision,
    RestartLimits,
    choose_nodes,
    decide,
    excluded_nodes,
    needs_smaller_micro_batches,
)

ATTEMPT_VARIABLE = "HPCTRAIN_ATTEMPT"
# Pauses before the nodes are checked again if none has answered, since the controller may be busy or failing over.
_ASK_AGAIN_AFTER_S = (5.0, 15.0, 30.0)
# While an elastic run waits for slots.
_READS_SLOTS_EVERY_S = 1.0
_ASKS_NODES_EVERY_S = 5.0

# srun asks Slurm to kill the ranks on all nodes, and then waits for a lost node for KillWait, 30 s as a rule.
# The check of the nodes ends ranks that it leaves behind.
_SRUN_KILLED_AFTER_S = 0.3
# mpirun gives its ranks a second before it kills them.
_MPIRUN_KILLED_AFTER_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRun:
    """The run to supervise.

    command: command of each rank.
    again: words that are appended to the command from the job's second attempt on.
    num_ranks: largest number of ranks; an attempt has fewer if too few nodes are left.
    ranks_per_node: number of ranks per node; outside Slurm, a number below `num_ranks` emulates nodes.
    directory: run directory.
    checkpoints: folder of the finished checkpoints.
    start_within_s: seconds from the launch to the start of training; None for no limit.
    check_paths, check_script, check_timeout_s: see `Checks`.
    fork_server: fork server for all attempts, see `plan_launch`.
    elastic: how the number of ranks may change; None: it changes only if nodes are lost, and not during an attempt.
    """

    command: Sequence[str]
    again: Sequence[str]
    num_ranks: int
    ranks_per_node: int
    directory: Path
    checkpoints: Path
    start_within_s: float | None
    check_paths: Sequence[str] = ()
    check_script: str | None = None
    check_timeout_s: float = 30.0
    fork_server: ForkServer | None = None
    elastic: Elastic | None = None


@final
class Supervisor:
    """Runs attempts until the run has ended.

    allocation: nodes that the run may use.
    limits: limits of restarting.
    machine: cores and launchers of this machine.
    environ: environment variables of this process.
    """

    def __init__(
        self,
        run: SupervisedRun,
        *,
        allocation: Allocation,
        limits: RestartLimits,
        machine: LocalMachine,
        environ: Mapping[str, str],
    ) -> None:
        self._run = run
        self._allocation = allocation
        self._limits = limits
        self._machine = machine
        self._environ = environ
        self._ledger = Ledger(run.directory)
        self._checks = Checks(
            mark=secrets.token_hex(8),
            run_directory=run.directory,
            paths=run.check_paths,
            script=run.check_script,
            timeout_s=run.check_timeout_s,
        )
        self._signals: list[str] = []
        self._left_out: dict[str, str] = {}  # nodes that are not used, and why

    def run(self) -> int:
        """Runs attempts, and returns the exit code of the command.

        The exit code is 0 if the run is finished, and 75 if the job is to be queued again. If the user has stopped the
        ranks, their exit code is returned. Raises GivenUp if a restart would not help.
        """
        self._run.directory.mkdir(parents=True, exist_ok=True)
        close_open_attempt(self._ledger, directory=self._run.directory, checkpoints=self._run.checkpoints)
        try:
            return self._run_attempts()
        finally:
            self._end_fork_servers()

    def _run_attempts(self) -> int:
        with self._noting_signals():
            survey = self._survey()
            while True:
                nodes, survey = self._wait_for_slots(survey)
                if self._signals:
                    say(f"{self._signals[0]}: no further attempt is started")
                    return int(ExitCode.STOPPED_EARLY)
                if not self._num_ranks(nodes):
                    return int(ExitCode.STOPPED_EARLY)
                if len(nodes) < self._limits.min_nodes:
                    say(
                        f"{len(nodes)} nodes are usable and at least {self._limits.min_nodes} needed (--min-nodes): "
                        "ending with exit code 75, so that the job is queued again"
                    )
                    return int(ExitCode.STOPPED_EARLY)
                attempt, survey = self._attempt(nodes, before=survey)
                decision = decide(self._ledger.attempts, limits=self._limits)
                decided = f"{decision.action.value}: {decision.reason}"
                self._ledger.replace(replace(attempt, decision=decided))
                say(f"attempt {attempt.number}: {_cause(attempt)}: {attempt.reason}; {decided}")
                if decision.action is not Action.RESTART:
                    return self._end(decision, attempt)

    def _end(self, decision: Decision, attempt: Attempt) -> int:
        """Prints the effective training time and returns the exit code. Raises GivenUp if the run is given up."""
        spent = effective_time([entry for entry in self._ledger.attempts if entry.job == attempt.job])
        say(
            f"effective training time of this job: {spent.share:.0%} of {spent.wall_s:.0f} s; its attempts are in "
            f"{self._ledger.path}"
        )
        if decision.action is Action.GIVE_UP:
            raise GivenUp(
                f"given up after attempt {attempt.number}: {decision.reason} ({_cause(attempt)}: {attempt.reason}). "
                f"Do not queue the job again before the cause is removed; {self._ledger.path} lists the attempts"
            )
        if decision.action is Action.REQUEUE:
            say("ending with exit code 75, so that the job is queued again")
            return int(ExitCode.STOPPED_EARLY)
        return attempt.exit_code or 0

    # ---- nodes

    def _survey(self, *, known_silent: Sequence[str] = ()) -> Survey:
        survey = self._survey_once(known_silent)
        for pause_s in _ASK_AGAIN_AFTER_S:
            if survey.usable or not self._allocation.in_slurm or self._signals:
                break
            say(f"no node is usable ({_fold(survey.unusable)}): asking again in {pause_s:.0f} s")
            self._pause(pause_s)
            survey = self._survey_once(())
        return survey

    def _survey_once(self, known_silent: Sequence[str]) -> Survey:
        return survey_nodes(
            nodes_now(self._allocation),
            allocation=self._allocation,
            checks=self._checks,
            environ=self._environ,
            known_silent=known_silent,
        )

    def _choose(self, survey: Survey) -> tuple[str, ...]:
        """Returns the nodes of the next attempt, and prints which nodes are left out, and why."""
        left_out = dict(survey.unusable)
        if self._allocation.in_slurm:  # elsewhere there is no other node
            excluded = excluded_nodes(self._ledger.attempts, limits=self._limits, now=time.time())
            for node in {*survey.usable} & {*excluded}:
                until = time.strftime("%F %T", time.localtime(excluded[node]))
                left_out[node] = f"excluded until {until} for its failures"
        if left_out and left_out != self._left_out:
            say(f"nodes that are not used: {_fold(left_out)}")
        self._left_out = left_out
        usable = [node for node in survey.usable if node not in left_out]
        before = self._ledger.attempts[-1].nodes if self._ledger.attempts else ()
        wanted = -(-self._run.num_ranks // self._run.ranks_per_node) if self._allocation.in_slurm else 1
        return choose_nodes(usable, wanted=wanted, in_use=before)

    def _num_ranks(self, nodes: Sequence[str]) -> int:
        """Returns the number of ranks of an attempt on these nodes; 0 if an elastic run has too few slots for one."""
        run, in_slurm = self._run, self._allocation.in_slurm
        if run.elastic is None:
            return min(run.num_ranks, run.ranks_per_node * max(1, len(nodes))) if in_slurm else run.num_ranks
        return run.elastic.ranks_for(
            run.ranks_per_node * len(nodes) if in_slurm else self._slots(run.elastic)
        )

    def _slots(self, elastic: Elastic) -> int:
        """Returns the slots of this machine. If the hostfile has become faulty, there are none until it is mended."""
        try:
            return elastic.slots_here()
        except LaunchError as error:
            if not self._ledger.attempts:
                raise
            say(f"{error}")
            return 0

    def _wait_for_slots(self, survey: Survey) -> tuple[tuple[str, ...], Survey]:
        """Returns the nodes of the next attempt, and their survey.

        An elastic run with fewer slots than it needs waits for more, for at most `Elastic.wait_s` seconds.
        """
        nodes, elastic = self._choose(survey), self._run.elastic
        if elastic is None or self._num_ranks(nodes):
            return nodes, survey
        until_s = time.monotonic() + elastic.wait_s
        say(f"{self._too_few(elastic, nodes)}: waiting up to {elastic.wait_s:g} s for more")
        while not self._signals and not self._num_ranks(nodes):
            if time.monotonic() >= until_s:
                say(
                    f"{self._too_few(elastic, nodes)}, after {elastic.wait_s:g} s: ending with exit code 75; the same "
                    "command resumes from the state that is saved"
                )
                break
            every_s = _ASKS_NODES_EVERY_S if self._allocation.in_slurm else _READS_SLOTS_EVERY_S
            self._pause(min(every_s, max(0.0, until_s - time.monotonic())))
            if not self._allocation.in_slurm and not self._num_ranks(nodes):
                continue
            survey = self._survey_once(())
            nodes = self._choose(survey)
        return nodes, survey

    def _too_few(self, elastic: Elastic, nodes: Sequence[str]) -> str:
        needed = f"at least {elastic.range.least} ranks are needed (--elastic {elastic.range})"
        if not self._allocation.in_slurm:
            return f"{elastic.hostfile} gives {self._slots(elastic)} slots on this machine, and {needed}"
        missing = f"; missing: {_fold(self._left_out)}" if self._left_out else ""
        slots = self._run.ranks_per_node * len(nodes)
        return f"{len(nodes)} nodes with {slots} slots are usable, and {needed}{missing}"

    def _resize_watch(self, nodes: Sequence[str], *, num_ranks: int) -> ResizeWatch | None:
        elastic = self._run.elastic
        if elastic is None:
            return None
        if not self._allocation.in_slurm:
            if elastic.hostfile is None:
                return None

            def read() -> tuple[int, str]:
                slots = elastic.slots_here()
                return elastic.ranks_for(slots), f"{elastic.hostfile} gives {slots} slots"

            return ResizeWatch(ranks=num_ranks, find=read)
        if num_ranks == elastic.ranks_for(elastic.range.most):
            return None
        excluded = excluded_nodes(self._ledger.attempts, limits=self._limits, now=time.time())
        returns = NodeReturns(
            nodes,
            excluded=list(excluded),
            allocation=self._allocation,
            checks=self._checks,
            environ=self._environ,
            ranks_with=lambda count: elastic.ranks_for(self._run.ranks_per_node * count),
        )
        return ResizeWatch(ranks=num_ranks, find=returns.find)

    def _end_fork_servers(self) -> None:
        server, attempts = self._run.fork_server, self._ledger.attempts
        if server is not None and self._allocation.in_slurm and attempts:
            nodes = [node for node in attempts[-1].nodes if node not in attempts[-1].blamed]
            if nodes:
                with contextlib.suppress(OSError):  # they end by themselves after two minutes
                    end_fork_servers(server.key, nodes, allocation=self._allocation, environ=self._environ)

    # ---- one attempt

    def _attempt(self, nodes: Sequence[str], *, before: Survey) -> tuple[Attempt, Survey]:
        """Starts the ranks on `nodes` and waits for their end.

        Returns the attempt, and the state of the nodes at its end.
        """
        run, in_slurm, elastic = self._run, self._allocation.in_slurm, self._run.elastic
        num_ranks = self._num_ranks(nodes)
        attempts = self._ledger.attempts
        attempt = Attempt(
            number=attempts[-1].number + 1 if attempts else 1,
            job=self._allocation.job,
            allocation=self._allocation.number,
            nodes=tuple(nodes),
            ranks=num_ranks,
            began=time.time(),
            time_limit=self._allocation.time_limit,
        )
        is_first = all(entry.job != attempt.job for entry in attempts)
        environ = {
            **self._environ,
            MARK_VARIABLE: self._checks.mark,
            ATTEMPT_VARIABLE: str(attempt.number),
        }
        if attempts and needs_smaller_micro_batches(attempts[-1]):
            environ[OUT_OF_MEMORY_VARIABLE] = str(attempts[-1].number)
        batch = None if elastic is None else elastic.batch
        overrides: tuple[str, ...] = ()
        notices: Notices | None = None
        if elastic is not None:
            environ[ELASTIC_VARIABLE] = str(elastic.range)
            notices = Notices()
            environ[NOTICES_VARIABLE] = notices.path
            if batch is not None:
                overrides = batch.overrides(ranks=num_ranks, most=elastic.range.most)
        plan = plan_launch(
            [*run.command, *overrides, *(() if is_first else run.again)],
            num_ranks=num_ranks,
            ranks_per_node=run.ranks_per_node,
            environ=environ,
            machine=self._machine,
            nodes=nodes if in_slurm else (),
            fork_server=run.fork_server,
        )
        self._ledger.add(attempt)
        say(f"attempt {attempt.number}: {num_ranks} ranks on {', '.join(nodes)}")
        if elastic is not None and batch is not None:
            say(f"{num_ranks} ranks: {batch.describe(ranks=num_ranks, most=elastic.range.most)}")
        resize = self._resize_watch(nodes, num_ranks=num_ranks)
        progress = RunProgress(run.directory, checkpoints=run.checkpoints)
        watch = AttemptWatch(
            progress,
            nodes=NodeWatch(
                nodes, addresses=self._allocation.addresses, slurmd_port=self._allocation.slurmd_port
            ),
            start_within_s=run.start_within_s,
            kill_after_s=_SRUN_KILLED_AFTER_S if in_slurm else _MPIRUN_KILLED_AFTER_S,
            training_begins=self._training_begins,
            resize=resize,
            keeps_state=elastic is not None and run.start_within_s is not None,
            notices=notices,
        )
        with notices or contextlib.nullcontext():
            outcome = run_launch(plan, environ=environ, observer=watch)
        if resize is not None:
            resize.end()
        watch.look_for_begin()
        self._signals += outcome.signals
        ended, lines = time.time(), watch.log.lines()
        after, stopped = before, outcome.exit_code == ExitCode.STOPPED_EARLY or bool(self._signals)
        resized = bool(watch.resized) and outcome.exit_code == ExitCode.STOPPED_EARLY and not self._signals
        if outcome.exit_code != ExitCode.DONE and (resized or not stopped):
            after = self._survey(known_silent=watch.silent_nodes)
        announced = progress.announced_ending()
        diagnosis = classify(
            Evidence(
                exit_code=outcome.exit_code,
                failure=outcome.failure,
                lines=lines if announced is None else (*lines, announced),
                ended=ended,
                time_limit=self._allocation.time_limit,
                signals=self._signals,
                nodes=nodes,
                silent_nodes=(*watch.silent_nodes, *after.silent),
                answering_nodes=[node for node in nodes if node not in after.silent],
                oom_nodes=[
                    node
                    for node in nodes
                    if after.oom_kills.get(node, 0) > before.oom_kills.get(node, sys.maxsize)
                ],
                overdue_s=run.start_within_s if watch.overdue else None,
                preempted=stopped and was_preempted(self._allocation),
            )
        )
        if resized and diagnosis.cause not in (AttemptEnd.WALL_CLOCK, AttemptEnd.LOST_NODE):
            diagnosis = Diagnosis(cause=AttemptEnd.RESIZED, reason=watch.resized)
        finished = record_end(
            self._ledger,
            progress,
            exit_code=outcome.exit_code,
            diagnosis=diagnosis,
            ended=ended,
            lost_at=watch.lost_at,
        )
        return finished, after

    def _training_begins(self, first_step: int, at: float) -> None:
        lost_at = record_begin_of_training(self._ledger, first_step=first_step, at=at)
        if lost_at is not None:
            say(f"training continues from step {first_step}, {at - lost_at:.1f} s after the loss")

    # ---- signals

    @contextlib.contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Records signals that ask to stop between launches. During a launch, `run_launch` handles these signals."""

        def note(number: int, frame: object) -> None:
            self._signals.append(signal.Signals(number).name)

        previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pause(self, seconds: float) -> None:
        pause_until(seconds, ends=lambda: bool(self._signals))


def _cause(attempt: Attempt) -> str:
    return attempt.cause.value if attempt.cause is not None else AttemptEnd.UNKNOWN.value


def _fold(reasons: Mapping[str, str]) -> str:
    """Returns a text that lists the nodes by reason."""
    by_reason: dict[str, list[str]] = {}
    for node, reason in reasons.items():
        by_reason.setdefault(reason, []).append(node)
    return "; ".join(f"{', '.join(nodes)}: {reason}" for reason, nodes in by_reason.items())
