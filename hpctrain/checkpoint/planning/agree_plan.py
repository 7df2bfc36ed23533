"""Combines every rank's state into one write plan, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.checkpoint.format.state import Header, State, encode_document, header_of
from hpctrain.checkpoint.planning.shards import EvenShards
from hpctrain.checkpoint.planning.write_plan import WritePlan, explain_difference, make_plan
from hpctrain.comm import Collective, agreed, all_gather_distinct, all_gather_json, describe_ranks
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of


def document_hash(state: State) -> str:
    """Returns the hash of document and parent, which must be the same on every rank. Raises CheckpointError if they
    cannot be encoded as JSON."""
    return hash_of(_shared_text(state).encode())


def _shared_text(state: State) -> str:
    return encode_document({"document": state.document, "parent": state.parent})


def agree_on_plan(
    state: State, *, step: int, comm: Collective, file_of_rank: Sequence[int] | None = None
) -> WritePlan:
    """Returns the write plan for the ranks' states. Collective.

    Compares step, files, document and replicated tensors of the ranks by their hashes. Raises CheckpointError on every
    rank, with the difference, if they do not match.
    """
    headers = agreed(comm, lambda: [header_of(item) for item in state.sources()])
    replicated = [header.to_json() for header in headers if header.box is None]
    shards = [header for header in headers if header.box is not None]
    even = EvenShards.of(shards, rank=comm.rank, num_ranks=comm.num_ranks)
    document = agreed(comm, lambda: _shared_text(state))
    files = None if file_of_rank is None else list(file_of_rank)
    mine = {
        "step": step,
        "files": hash_of(json.dumps(files).encode()),
        "document": hash_of(document.encode()),
        "replicated": hash_of(json.dumps(replicated).encode()),
        # Even shards are the same text on every rank.
        "even": even is not None,
        "shards": [header.to_json() for header in (shards if even is None else even.first)],
    }
    different, number_of_rank = all_gather_distinct(comm, mine)
    by_rank = [different[number] for number in number_of_rank]
    if any(entry["step"] != by_rank[0]["step"] for entry in by_rank):
        steps = ", ".join(f"{entry['step']} on rank {place}" for place, entry in enumerate(by_rank))
        raise CheckpointError(f"the ranks save different steps: {steps}", agreed=True)
    if any(entry["files"] != by_rank[0]["files"] for entry in by_rank):
        texts = "; ".join(
            f"rank {rank} as {theirs}" for rank, theirs in enumerate(all_gather_json(comm, files)[:8])
        )
        raise CheckpointError(f"the ranks disagree on which rank writes to which file: {texts}", agreed=True)
    if any(entry["document"] != by_rank[0]["document"] for entry in by_rank):
        shared = json.loads(document)
        raise CheckpointError(
            _document_difference({**shared["document"], "parent": shared["parent"]}, comm), agreed=True
        )
    if any(entry["replicated"] != by_rank[0]["replicated"] for entry in by_rank):
        lists = [list(map(Header.from_json, entry)) for entry in all_gather_json(comm, replicated)]
        raise CheckpointError(
            f"the ranks' replicated tensors differ: {explain_difference(lists)}", agreed=True
        )
    return make_plan(
        replicated=[header for header in headers if header.box is None],
        shards_by_rank=_shards_of_all(different, number_of_rank),
        file_of_rank=file_of_rank,
    )


def _shards_of_all(
    different: Sequence[Mapping[str, Any]], number_of_rank: Sequence[int]
) -> Sequence[Sequence[Header]]:
    """Returns the shards of each rank. different: what the ranks have sent, and the number of each rank's in it."""
    num_ranks = len(number_of_rank)
    listed = [tuple(map(Header.from_json, entry["shards"])) for entry in different]
    if len(different) == 1 and different[0]["even"]:
        return EvenShards(listed[0], num_ranks)
    return [
        EvenShards(listed[number], num_ranks)[rank] if different[number]["even"] else listed[number]
        for rank, number in enumerate(number_of_rank)
    ]


def _document_difference(document: dict[str, Any], comm: Collective) -> str:
    """Returns a message with the top-level keys of the document that differ, and on which ranks. Collective."""
    hashes = {key: hash_of(json.dumps(value, sort_keys=True).encode()) for key, value in document.items()}
    by_rank = all_gather_json(comm, hashes)
    lines = []
    for key in sorted(set().union(*by_rank)):
        ranks = [comm.members[r] for r, entry in enumerate(by_rank) if entry.get(key) != by_rank[0].get(key)]
        if ranks:
            lines.append(f"{key!r} of {describe_ranks(ranks)} differs from rank {comm.members[0]}'s")
    return f"the checkpoint's document must be the same on every rank: {'; '.join(lines)}"
