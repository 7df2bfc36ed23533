"""Whether the nodes' clocks agree, from barriers: no rank leaves one before every rank has entered it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpctrain.comm import Collective
from hpctrain.run.doctor.finding import Facts, Finding, ok, warning

_ROUNDS = 8
_MAX_SKEW_S = 1.0


def sample_clock(comm: Collective) -> list[tuple[float, float]]:
    """Returns this node's time right before and right after each of several barriers, in seconds. Collective."""
    samples = []
    for _ in range(_ROUNDS):
        before_s = time.time()
        comm.barrier()
        samples.append((before_s, time.time()))
    return samples


def skew_bounds(
    mine: Sequence[tuple[float, float]], reference: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Returns the least and the greatest possible lead of this clock over the reference's, in seconds. Pure.

    In true time every rank leaves a barrier after every rank has entered it, so my entry, less my lead, is not after
    the other's exit; and the other way round.
    """
    least = max(before - other_after for (before, _), (_, other_after) in zip(mine, reference, strict=True))
    greatest = min(
        after - other_before for (_, after), (other_before, _) in zip(mine, reference, strict=True)
    )
    return least, greatest


def judge_clocks(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns the finding about the clocks of the hosts, compared with that of rank 0's host. Pure."""
    samples = {facts["host"]: facts["clock"] for facts in reversed(facts_by_rank) if facts.get("clock")}
    reference = facts_by_rank[0]["host"]
    if len(samples) < 2 or reference not in samples:
        return []
    bounds = {
        host: skew_bounds(mine, samples[reference]) for host, mine in samples.items() if host != reference
    }
    leads = {host: least if least > 0 else min(greatest, 0.0) for host, (least, greatest) in bounds.items()}
    wrong = {host: lead for host, lead in leads.items() if abs(lead) > _MAX_SKEW_S}
    if not wrong:
        spread_s = max(max(abs(least), abs(greatest)) for least, greatest in bounds.values())
        return [ok("clocks", f"those of {len(samples)} hosts agree within {spread_s:.3f} s")]
    named = [
        f"{host} {abs(lead):.1f} s {'ahead' if lead > 0 else 'behind'}"
        for host, lead in sorted(wrong.items())
    ]
    shown = ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")
    cure = "the site must run chrony or ntpd there: times in records and logs, and Slurm's credentials, are compared"
    return [warning("clocks", f"compared with {reference}: {shown}", cure)]
