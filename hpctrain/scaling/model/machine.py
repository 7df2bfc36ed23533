"""Speeds of a machine, from which costs are computed: links, nodes, wire formats. Pure."""

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
    """A link in one direction, in the model of Hockney 1994 (doi:10.1016/S0167-8191(06)80021-9) with one term more.

    latency_s: from the end of sending to the end of receiving an empty message; passes while others are sent.
    bytes_per_s: rate of a large message. per_message_s: time for which a message occupies its sender, in addition to
    its bytes; of several messages these times add up, unlike latencies. sigma: standard deviation of the logarithm of
    the rates of such links: of many the slowest counts. turns: share of the exchanges between two ranks, each of which
    sends to the other, that go in one direction after the other, see `exchange_factor`.
    """

    latency_s: float
    bytes_per_s: float
    per_message_s: float = 0.0
    sigma: float = 0.0
    turns: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.turns <= 1:
            raise UsageError(f"the share of exchanges that take turns is {self.turns}: give 0 to 1")
        if self.latency_s < 0 or self.per_message_s < 0 or not self.bytes_per_s > 0:
            raise UsageError(
                f"a link of {self.latency_s} s, {self.bytes_per_s} bytes/s and {self.per_message_s} s per message: "
                "the rate must be above 0, the times at least 0"
            )

    def exchange_factor(self, pairs: int) -> float:
        """Returns by what factor exchanges with `pairs` partners at once take longer than the bytes of one direction.

        Where the confirmation that a message can be received waits in the same TCP connection behind the data that go
        the other way, an exchange takes twice as long, unless both ranks begin within the latency. Several pairs share
        a link: of m pairs, k have the direction out, with equal chances, and the busier direction counts, so 1 + E|2 k
        - m| / m, which is 2 for one pair and 1 + sqrt(2 / (pi m)) for many.
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
    """A node, all of whose ranks do the same.

    cores: their number. cores_shared_by: number of nodes that share these cores; 1 on a real cluster, more where a
    machine plays several nodes. threads: of a rank's computation. sum_bytes_per_s: bytes of float32 that one rank
    adds to others in a second. code_bytes_per_s: bytes of float32 that one rank encodes or decodes in a second.
    wire_bytes_per_s: encoded bytes that one core moves between a buffer and the network in a second, both directions
    counted. engine_message_s: processor time of each message of hpctrain's own algorithms, in addition to a link's.
    engine_turns: of hpctrain's own algorithms, in place of a link's `turns`.
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
                f"a node with {self.cores} cores, shared by {self.cores_shared_by}: give at least 1"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of nodes, and of ranks on each of them."""

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
    """network: of one node, towards all others. local: between two ranks of a node."""

    network: Link
    local: Link
    node: Node

    def oversubscription(self, layout: Layout) -> float:
        """Returns by what factor work that all ranks do at once takes longer, since they outnumber the cores."""
        if self.node.offloaded:
            return 1.0
        return max(
            1.0, layout.ranks_per_node * min(layout.nodes, self.node.cores_shared_by) / self.node.cores
        )

    def for_own_algorithms(self) -> Machine:
        """The same, with the engine's time for each message added to that of the links, and its share of turns."""
        extra_s, turns = self.node.engine_message_s, self.node.engine_turns
        network, local = (
            replace(link, per_message_s=link.per_message_s + extra_s, turns=turns)
            for link in (self.network, self.local)
        )
        return replace(self, network=network, local=local)

    def oversubscribed(self, layout: Layout) -> Machine:
        """The same as each rank sees it: all that processors do takes longer by `oversubscription`."""
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
        """The same with the rate that `pairs` exchanges at once through a node's link leave of it."""
        return self.with_rate(self.network.bytes_per_s / self.network.exchange_factor(pairs))

    def with_rate(self, bytes_per_s: float) -> Machine:
        return replace(self, network=replace(self.network, bytes_per_s=bytes_per_s))


def parse_rate(text: str) -> float:
    """Returns the bytes/s of `100gbit`, `25Gbit/s` or `300mbit`, as tc writes rates. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]) > 0:
        raise UsageError(f"{text!r} is no rate of a link: write 300mbit, 25gbit or 1.6tbit")
    return float(match[1]) * _UNITS[match[2].lower()] / 8


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parses `1,2,8` or `1..4096`, the powers of two in that range and its ends. Returns them ascending.

    Raises UsageError.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise UsageError(f"--nodes {text!r}: write numbers as 1,2,8 or a range 1..4096")
        low, high = int(first), int(last) if dots else int(first)
        if not 1 <= low <= high:
            raise UsageError(f"--nodes {text!r}: the range must begin at 1 or above, and end above its begin")
        found |= {low, high} | {2**k for k in range(high.bit_length()) if low <= 2**k <= high}
    return tuple(sorted(found))


def wire_share(wire: str) -> float:
    """Returns the encoded bytes for each byte of float32. Raises UsageError for wires whose size varies."""
    share = share_of_float32(wire)
    if share is None:
        raise UsageError(
            f"the wire format {wire} cannot be predicted: its bytes depend on the gradients; choose among "
            f"{', '.join(CODEC_WIRES)}"
        )
    return share
