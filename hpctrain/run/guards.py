"""Creates the guards of a run from the recipe's section [guards]."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import Tiers
from hpctrain.comm import all_gather_json, on_rank_0
from hpctrain.errors import LaunchError
from hpctrain.reduce import CompareRanks
from hpctrain.resilience import (
    OUT_OF_MEMORY_VARIABLE,
    Divergence,
    DivergenceLimits,
    in_binary_units,
    limit_own_memory,
    read_group_limit,
)
from hpctrain.run.initial_state import roll_back_run
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.recipe.sections import DEFAULT_JUMP_Z
from hpctrain.run.session import Session
from hpctrain.telemetry import RecordWriter
from hpctrain.train import (
    DataBalance,
    Guards,
    MemoryGuard,
    Resumed,
    TrainingState,
    largest_micro_batch,
)


def compare_ranks(recipe: Recipe) -> CompareRanks:
    """Returns what a run does if parameters or optimizer settings differ between ranks: `error`, `note` or `off`."""
    tolerates = recipe.checkpoint.on_replica_mismatch == "rank0"
    return recipe.guards.compare_ranks or ("note" if tolerates else "error")


def build_guards(
    recipe: Recipe,
    state: TrainingState,
    *,
    resumed: Resumed,
    session: Session,
    identity: dict[str, Any],
    tiers: Tiers | None,
    communicates: bool,
    say: Callable[[str], None],
    records: RecordWriter,
) -> Guards:
    """Returns the guards against divergence, lack of memory and unbalanced data. Collective.

    In a resumed run the guard against divergence continues from its saved state.

    communicates: whether forward is collective. If forward is collective, a rank that runs out of memory ends the run,
    since the other ranks wait for this rank in forward.
    """
    section, directory = recipe.guards, Path(recipe.run.directory)
    divergence = Divergence(divergence_limits(recipe))
    divergence.load_state(resumed.divergence)
    memory = MemoryGuard(
        directory,
        comm=session.world,
        recovers=section.out_of_memory == "divide" and not communicates,
        rows=-(-recipe.data.global_batch // session.axes.data.size),
        micro_batches=recipe.micro_batches,
        largest=largest_micro_batch(directory, comm=session.world),
        short_attempt=on_rank_0(session.world, _short_attempt),
        say=say,
        records=records,
    )
    balance = DataBalance(comm=session.world, most_excess=section.max_imbalance, say=say, records=records)

    def roll_back(choose: Callable[[list[int]], int | None]) -> Resumed | None:
        return roll_back_run(
            recipe, state, choose=choose, session=session, identity=identity, tiers=tiers, say=say
        )

    return Guards(
        divergence, memory=memory, balance=balance, roll_back=roll_back,
        skips_data=section.roll_back_skips_data, say=say, records=records,
    )  # fmt: skip


def _short_attempt() -> int | None:
    """Returns the number of the supervisor's previous attempt if that attempt ran out of memory, else None."""
    number = os.environ.get(OUT_OF_MEMORY_VARIABLE)
    return int(number) if number else None


def divergence_limits(recipe: Recipe) -> DivergenceLimits:
    section = recipe.guards
    usual = 0.0 if recipe.data.chosen_order == "sequential" else DEFAULT_JUMP_Z
    return DivergenceLimits(
        jump_z=usual if section.loss_jump_z is None else section.loss_jump_z,
        window=section.loss_window,
        max_skipped_in_row=recipe.optimizer.max_skipped_in_row,
        max_roll_backs=section.max_roll_backs,
        lr_factor=section.roll_back_lr_factor,
    )


def limit_host_memory(recipe: Recipe, *, session: Session) -> None:
    """Limits this rank's memory as `guards.host_memory` says. Collective.

    Raises LaunchError on every rank if a rank already uses more than its share.
    """
    if recipe.guards.host_memory == "unlimited":
        return
    limit = read_group_limit()
    mine = [session.topology.node_of(session.rank), limit.group if limit is not None else None]
    num_sharing = Counter(map(tuple, all_gather_json(session.world, mine)))

    def apply() -> int | None:
        if limit is None:
            return None
        own, used = limit_own_memory(limit, num_sharing=num_sharing[(mine[0], mine[1])])
        if used > own:
            raise LaunchError(
                f"guards.host_memory = 'share': {num_sharing[(mine[0], mine[1])]} ranks share the control group "
                f"{limit.group} of {in_binary_units(limit.num_bytes)}, {in_binary_units(own)} each, but a rank uses "
                f"{in_binary_units(used)} before training starts: ask for more memory, start fewer ranks on a node, or "
                "set guards.host_memory = 'unlimited'"
            )
        return own

    own = session.agreed(apply, os_error=LaunchError)
    if own is None:
        session.note("guards.host_memory = 'share', but no control group limits the memory of rank 0")
    else:
        session.note(
            f"each rank may use {in_binary_units(own)} of memory, its share of the control group's limit"
        )
