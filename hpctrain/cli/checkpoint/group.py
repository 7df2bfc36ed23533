"""`hpctrain checkpoint`: the group of checkpoint commands."""

from __future__ import annotations

import typer

from hpctrain.cli.checkpoint.convert import export_command, import_command
from hpctrain.cli.checkpoint.copy import copy_command
from hpctrain.cli.checkpoint.dcp import export_dcp_command, import_dcp_command
from hpctrain.cli.checkpoint.diff import diff_command
from hpctrain.cli.checkpoint.list_and_show import list_command, show_command
from hpctrain.cli.checkpoint.prune_and_request import prune_command, request_command
from hpctrain.cli.checkpoint.verify import verify_command

checkpoint_app = typer.Typer(
    help="""List, show, verify, compare, convert, copy and delete checkpoints; ask a run for one.

\b
  hpctrain checkpoint list runs/digits/checkpoints                   steps, times, sizes
  hpctrain checkpoint show runs/digits/checkpoints                   the newest one's metadata and tensors
  hpctrain checkpoint verify runs/digits/checkpoints                 hash every byte again
  mpirun -n 8 hpctrain checkpoint verify runs/lm/checkpoints         the same, shared by 8 ranks
  hpctrain checkpoint diff A.h5 B.h5                                 which tensors differ, and by how much
  hpctrain checkpoint export runs/lm/checkpoints --to lm.safetensors --weights
  hpctrain checkpoint import lm.safetensors start --step 0           a checkpoint that weights_from can load
  hpctrain checkpoint import-dcp fsdp/step-500 start --step 500      from torch.distributed.checkpoint
  hpctrain checkpoint export-dcp runs/lm/checkpoints fsdp/start      for torch.distributed.checkpoint
  hpctrain checkpoint copy runs/lm/checkpoints archive               the newest one, verified
  hpctrain checkpoint prune runs/lm/checkpoints --keep 2 --dry-run   what would be deleted
  hpctrain checkpoint request runs/lm                                ask a run for a checkpoint now

\b
Given a folder of checkpoints, a command uses the newest one. All commands but show and list share work between ranks.
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

checkpoint_app.command("list")(list_command)
checkpoint_app.command("show")(show_command)
checkpoint_app.command("verify")(verify_command)
checkpoint_app.command("diff")(diff_command)
checkpoint_app.command("export")(export_command)
checkpoint_app.command("import")(import_command)
checkpoint_app.command("export-dcp")(export_dcp_command)
checkpoint_app.command("import-dcp")(import_dcp_command)
checkpoint_app.command("copy")(copy_command)
checkpoint_app.command("prune")(prune_command)
checkpoint_app.command("request")(request_command)
