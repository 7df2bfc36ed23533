from .jobs import (
    Job as Job,
    Submission as Submission,
    consumed_energy as consumed_energy,
    newest_submission as newest_submission,
    parse_energy as parse_energy,
    past_jobs as past_jobs,
    queued_jobs as queued_jobs,
)
from .resizing import (
    ResizePlan as ResizePlan,
    ResizeWay as ResizeWay,
    carry_out_resize as carry_out_resize,
    plan_resize as plan_resize,
    run_of_job as run_of_job,
)
from .status import (
    CheckpointFound as CheckpointFound,
    Progress as Progress,
    RunStatus as RunStatus,
    describe_status as describe_status,
    find_run as find_run,
    newest_job as newest_job,
    read_progress as read_progress,
    run_statuses as run_statuses,
)
from .submission import (
    JobScript as JobScript,
    PlannedJob as PlannedJob,
    active_jobs as active_jobs,
    check_idle as check_idle,
    check_job as check_job,
    kill_jobs as kill_jobs,
    plan_job as plan_job,
    render_script as render_script,
    stop_jobs as stop_jobs,
    submit_job as submit_job,
)
