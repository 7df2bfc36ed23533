"""`hpctrain supervise`: starts the ranks, watches them, and restarts them on the remaining nodes.

Two pure functions judge and decide: `classify` tells why an attempt ended, and `decide` tells what to do next.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from hpctrain.errors import ExitCode, GivenUp
from hpctrain.launch import (
    STOP_SIGNALS,
    EndRequest,
    ForkServer,
    LocalMachine,
    RankFailure,
    plan_launch,
    run_launch,
)
from hpctrain.resilience import OUT_OF_MEMORY_VARIABLE
from hpctrain.supervise.classify import AttemptEnd, Evidence, classify, is_telling, says_a_loss
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

# Earlier lines are ignored: the attempt has survived what they report.
_WINDOW_S = 60.0
_MAX_TELLING = 1000
_MAX_RECENT = 1000
_MAX_CHARACTERS = 1000  # per line


@final
class LogLines:
    """The part of a log that the classifier needs: the last lines, and earlier lines that may show a cause.

    Lines are added in order. Memory is bounded, even for a job step that prints for days.
    """

    def __init__(self) -> None:
        self._telling: deque[tuple[int, float, str]] = deque(maxlen=_MAX_TELLING)
        self._recent: deque[tuple[int, float, str]] = deque(maxlen=_MAX_RECENT)
        self._count = 0

    def add(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")[:_MAX_CHARACTERS]
        self._count += 1
        entry = (self._count, time.monotonic(), text)
        self._recent.append(entry)
        if is_telling(text):
            self._telling.append(entry)

    def lines(self) -> tuple[str, ...]:
        """Returns the kept lines of the last minute, in order."""
        since = time.monotonic() - _WINDOW_S
        return tuple(text for _, added, text in sorted({*self._telling, *self._recent}) if added >= since)


# Seconds from the first line that names a lost rank or node until the others are ended: they may still print why.
_GRACE_S = 1.5
# The same if a signal has ended the rank: only lines that are under way are waited for, such as the report of a hang.
_GRACE_AFTER_SIGNAL_S = 0.5


@final
class AttemptWatch:
    """An `Observer` that follows one attempt.

    The watch records the start of training and the first loss of a rank or node, and asks the launcher to end the
    attempt after a loss, or if training does not start.

    start_within_s: seconds within which training must start; None for no limit.
    kill_after_s: see `EndRequest`.
    training_begins: function that is called once, with the step from which training starts and the time (seconds since
    1970).

    lost_at: time of the first sign that a rank or node was lost, in seconds since 1970; None if there was no such sign.
    silent_nodes: nodes that no longer answered.
    overdue: True if training has not started in time. The ranks are then ended, and output that they print from then on
    is ignored.
    """

    def __init__(
        self,
        progress: RunProgress,
        *,
        nodes: NodeWatch,
        start_within_s: float | None,
        kill_after_s: float,
        training_begins: Callable[[int, float], None],
    ) -> None:
        self.log = LogLines()
        self.lost_at: float | None = None
        self.silent_nodes: tuple[str, ...] = ()
        self.overdue = False
        self._has_begun = False
        self._kill_after_s = kill_after_s
        self._progress = progress
        self._nodes = nodes
        self._start_by_s = None if start_within_s is None else time.monotonic() + start_within_s
        self._training_begins = training_begins
        self._end_by_s: float | None = None

    def launched(self, pid: int) -> None:
        self._nodes.launched(pid)

    def saw_line(self, line: bytes, failure: RankFailure | None) -> None:
        if self.overdue:
            return
        self.log.add(line)
        if self.lost_at is not None:
            return
        if failure is not None and failure.exit_code == ExitCode.STOPPED_EARLY:
            return  # the other ranks have saved too, and are about to end
        if failure is not None or says_a_loss(line.decode(errors="replace")):
            self.lost_at = time.time()
            by_signal = failure is not None and failure.signal is not None
            self._end_by_s = time.monotonic() + (_GRACE_AFTER_SIGNAL_S if by_signal else _GRACE_S)

    def must_end(self) -> EndRequest | None:
        self._nodes.look()
        lost = self._nodes.lost()
        if lost:
            self.silent_nodes = tuple(lost)
            self.lost_at = min([*lost.values(), *([] if self.lost_at is None else [self.lost_at])])
            return self._end(f"{', '.join(lost)} does not answer any more")
        self.look_for_begin()
        if not self._has_begun and self._start_by_s is not None and time.monotonic() > self._start_by_s:
            self.overdue = True
            return self._end("training does not begin")
        if self._end_by_s is not None and time.monotonic() > self._end_by_s:
            return self._end("a rank is lost")
        return None

    def _end(self, reason: str) -> EndRequest:
        return EndRequest(reason=reason, kill_after_s=self._kill_after_s)

    def look_for_begin(self) -> None:
        """Calls `training_begins` if training has started since the last call."""
        step = None if self._has_begun or self.overdue else self._progress.first_step()
        if step is not None:
            self._has_begun = True
            self._training_begins(step, time.time())


# `hpctrain supervise`.


ATTEMPT_VARIABLE = "HPCTRAIN_ATTEMPT"
# Pauses before the nodes are checked again if none has answered, since the controller may be busy or failing over.
_ASK_AGAIN_AFTER_S = (5.0, 15.0, 30.0)

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
                nodes = self._choose(survey)
                if self._signals:
                    say(f"{self._signals[0]}: no further attempt is started")
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
        if left_out:
            say(f"nodes that are not used: {_fold(left_out)}")
        usable = [node for node in survey.usable if node not in left_out]
        before = self._ledger.attempts[-1].nodes if self._ledger.attempts else ()
        wanted = -(-self._run.num_ranks // self._run.ranks_per_node) if self._allocation.in_slurm else 1
        return choose_nodes(usable, wanted=wanted, in_use=before)

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
        run, in_slurm = self._run, self._allocation.in_slurm
        num_ranks = min(run.num_ranks, run.ranks_per_node * len(nodes)) if in_slurm else run.num_ranks
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
        plan = plan_launch(
            [*run.command, *(() if is_first else run.again)],
            num_ranks=num_ranks,
            ranks_per_node=run.ranks_per_node,
            environ=environ,
            machine=self._machine,
            nodes=nodes if in_slurm else (),
            fork_server=run.fork_server,
        )
        self._ledger.add(attempt)
        say(f"attempt {attempt.number}: {num_ranks} ranks on {', '.join(nodes)}")
        progress = RunProgress(run.directory, checkpoints=run.checkpoints)
        watch = AttemptWatch(
            progress,
            nodes=NodeWatch(
                nodes, addresses=self._allocation.addresses, slurmd_port=self._allocation.slurmd_port
            ),
            start_within_s=run.start_within_s,
            kill_after_s=_SRUN_KILLED_AFTER_S if in_slurm else _MPIRUN_KILLED_AFTER_S,
            training_begins=self._training_begins,
        )
        outcome = run_launch(plan, environ=environ, observer=watch)
        watch.look_for_begin()
        self._signals += outcome.signals
        ended, lines = time.time(), watch.log.lines()
        after, stopped = before, outcome.exit_code == ExitCode.STOPPED_EARLY or bool(self._signals)
        if outcome.exit_code != ExitCode.DONE and not stopped:
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
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._signals:
            time.sleep(0.2)


def _cause(attempt: Attempt) -> str:
    return attempt.cause.value if attempt.cause is not None else AttemptEnd.UNKNOWN.value


def _fold(reasons: Mapping[str, str]) -> str:
    """Returns a text that lists the nodes by reason."""
    by_reason: dict[str, list[str]] = {}
    for node, reason in reasons.items():
        by_reason.setdefault(reason, []).append(node)
    return "; ".join(f"{', '.join(nodes)}: {reason}" for reason, nodes in by_reason.items())


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"hpctrain supervise: {text}", file=sys.stderr, flush=True)
