from .controller import (
    Controller as Controller,
    SlurmRefused as SlurmRefused,
    SlurmUnavailable as SlurmUnavailable,
)
from .energy import consumed_energy as consumed_energy, parse_energy as parse_energy
from .jobs import Submission as Submission, newest_submission as newest_submission
from .progress import CheckpointFound as CheckpointFound, Progress as Progress, read_progress as read_progress
from .queue import Job as Job, past_jobs as past_jobs, queued_jobs as queued_jobs
from .read_status import find_run as find_run, run_statuses as run_statuses
from .resizing import Resized as Resized, resize as resize
from .script import JobScript as JobScript, render_script as render_script
from .status import (
    RunStatus as RunStatus,
    describe_status as describe_status,
    newest_job as newest_job,
)
from .submission import (
    PlannedJob as PlannedJob,
    active_jobs as active_jobs,
    check_idle as check_idle,
    check_job as check_job,
    kill_jobs as kill_jobs,
    plan_job as plan_job,
    stop_jobs as stop_jobs,
    submit_job as submit_job,
)
