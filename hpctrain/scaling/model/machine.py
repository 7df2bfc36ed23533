"""Speeds of a machine, from which costs are computed: links, nodes, wire formats. Pure functions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from hpctrain.errors import UsageError
from hpctrain.reduce import CODEC_WIRES, share_of_float32

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]bit)(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link in one direction, in the model of Hockney 1994 (doi:10.1016/S0167-8191(06)80021-9) with one more term.

    latency_s: seconds from the end of sending an empty message to the end of receiving this message; latencies of
    several messages overlap. bytes_per_s: rate of a large message. per_message_s: seconds for which a message occupies
    its sender, in addition to the time of its bytes; these seconds add up over messages. sigma: standard deviation of
    the logarithm of the rates of such links; a layout is limited by its slowest link. turns: fraction of the exchanges
    between two ranks in which one direction is sent after the other instead of at the same time, see `exchange_factor`.
    """

    latency_s: float
    bytes_per_s: float
    per_message_s: float = 0.0
    sigma: float = 0.0
    turns: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.turns <= 1:
            raise UsageError(
                f"turns, a fraction of the exchanges, is {self.turns}: give a number from 0 to 1"
            )
        if self.latency_s < 0 or self.per_message_s < 0 or not self.bytes_per_s > 0:
            raise UsageError(
                f"a link of {self.latency_s} s, {self.bytes_per_s} bytes/s and {self.per_message_s} s per message: "
                "the rate must be above 0, the times at least 0"
            )

    def exchange_factor(self, pairs: int) -> float:
        """Returns the time of `pairs` exchanges at once, divided by the time of sending the bytes of one direction.

        In a fraction `turns` of the exchanges, the two directions follow each other: in a TCP connection, the
        confirmation that a message can be received waits behind the data that go the other way. Such an exchange takes
        twice as long, unless both ranks begin within the latency. If m such exchanges share a link, k of them send
        outward at a time, each with probability 1/2, and the busier direction counts. The m exchanges take 1 + E|2 k -
        m| / m times as long, which is 2 for one exchange and 1 + sqrt(2 / (pi m)) for many.
        """
        if pairs < 1:
            return 1.0
        half = (pairs - 1) // 2
        excess = (
            math.comb(pairs - 1, half) / 2.0 ** (pairs - 1)
            if pairs <= 64
            else math.sqrt(2 / (math.pi * pairs))
        )
        return 1 + self.turns * excess


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node. All ranks of the node do the same work.

    cores: number of cores of the node. cores_shared_by: number of nodes that share the same cores; 1 on a real cluster,
    more if one machine emulates several nodes. threads: number of threads of a rank's computation. sum_bytes_per_s:
    bytes of float32 that one rank adds to other float32 values per second. code_bytes_per_s: bytes of float32 that one
    rank encodes or decodes per second. wire_bytes_per_s: encoded bytes that one core moves between a buffer and the
    network per second, both directions counted. engine_message_s: processor seconds per message of hpctrain's own
    algorithms, in addition to the link's `per_message_s`. engine_turns: `Link.turns` of hpctrain's own algorithms.
    offloaded: True if communication takes no time of the cores that compute, as on GPUs.
    """

    cores: int
    cores_shared_by: int = 1
    threads: int = 1
    sum_bytes_per_s: float = float("inf")
    code_bytes_per_s: float = float("inf")
    wire_bytes_per_s: float = float("inf")
    engine_message_s: float = 0.0
    engine_turns: float = 0.0
    offloaded: bool = False

    def __post_init__(self) -> None:
        if min(self.cores, self.cores_shared_by, self.threads) < 1:
            raise UsageError(
                f"a node with cores = {self.cores}, cores_shared_by = {self.cores_shared_by}, threads = {self.threads}"
                ": each must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of nodes, and the number of ranks on each node."""

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise UsageError(f"{self.nodes} nodes of {self.ranks_per_node} ranks: give at least 1 of each")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a prediction: links and nodes. All nodes are equal.

    network: link of one node to all others. local: link between two ranks of a node.
    """

    network: Link
    local: Link
    node: Node

    def oversubscription(self, layout: Layout) -> float:
        """Returns the factor by which work of all ranks at once takes longer due to more ranks than cores."""
        if self.node.offloaded:
            return 1.0
        return max(
            1.0, layout.ranks_per_node * min(layout.nodes, self.node.cores_shared_by) / self.node.cores
        )

    def for_own_algorithms(self) -> Machine:
        """Returns the machine for hpctrain's own algorithms: links with the engine's time per message and `turns`."""
        extra_s, turns = self.node.engine_message_s, self.node.engine_turns
        network, local = (
            replace(link, per_message_s=link.per_message_s + extra_s, turns=turns)
            for link in (self.network, self.local)
        )
        return replace(self, network=network, local=local)

    def oversubscribed(self, layout: Layout) -> Machine:
        """Returns the machine as each rank sees it: work of processors takes `oversubscription` times as long."""
        factor, node = self.oversubscription(layout), self.node
        network, local = (
            replace(link, per_message_s=factor * link.per_message_s) for link in (self.network, self.local)
        )
        return replace(
            self, network=network, local=local,
            node=replace(
                node, sum_bytes_per_s=node.sum_bytes_per_s / factor, code_bytes_per_s=node.code_bytes_per_s / factor,
                wire_bytes_per_s=node.wire_bytes_per_s / factor,
            ),
        )  # fmt: skip

    def exchanging(self, pairs: int) -> Machine:
        """Returns the machine with its link rate reduced as if `pairs` exchanges used a node's link at once."""
        return self.with_rate(self.network.bytes_per_s / self.network.exchange_factor(pairs))

    def with_rate(self, bytes_per_s: float) -> Machine:
        return replace(self, network=replace(self.network, bytes_per_s=bytes_per_s))


def parse_rate(text: str) -> float:
    """Returns the bytes/s of `100gbit`, `25Gbit/s` or `300mbit`, as tc writes rates. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]) > 0:
        raise UsageError(f"{text!r} is not a link rate: write 300mbit, 25gbit or 1.6tbit")
    return float(match[1]) * _UNITS[match[2].lower()] / 8


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parses numbers of nodes such as `1,2,8` or `1..4096`. Returns the numbers, ascending.

    A range stands for its two ends and the powers of two between them. Raises UsageError for other texts.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise UsageError(f"--nodes {text!r}: write numbers as 1,2,8 or a range 1..4096")
        low, high = int(first), int(last) if dots else int(first)
        if not 1 <= low <= high:
            raise UsageError(
                f"--nodes {text!r}: a range must start at 1 or above, and end at its start or above"
            )
        found |= {low, high} | {2**k for k in range(high.bit_length()) if low <= 2**k <= high}
    return tuple(sorted(found))


def wire_share(wire: str) -> float:
    """Returns the encoded bytes per byte of float32. Raises UsageError if the format's size depends on the values."""
    share = share_of_float32(wire)
    if share is None:
        raise UsageError(
            f"the wire format {wire} cannot be predicted: its bytes depend on the gradients; choose among "
            f"{', '.join(CODEC_WIRES)}"
        )
    return share
