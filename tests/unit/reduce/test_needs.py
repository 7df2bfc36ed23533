"""The formulas of what a reduction needs, against reducers that ran."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce.algorithms import Algorithm, Capabilities
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import run_to_end
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.needs import ReductionNeeds, reduction_needs, scatter_needs, sharded_sum
from hpctrain.reduce.zero.bucket_division import BucketDivision
from hpctrain.reduce.zero.zero_reducer import Gathered
from hpctrain.topology import Topology

SPECS = [GradientSpec(numel, torch.float32, shape) for numel, shape in
         [(200 * 300, (200, 300)), (1000, (1000,)), (12_000, (120, 100)), (40_000, (200, 200))]]  # fmt: skip
BUCKETS = plan_buckets(SPECS, bucket_bytes=200_000)
ELEMENTS = sum(spec.numel for spec in SPECS)


def topology_of(names: str) -> Topology:
    return Topology.from_node_names(list(names))


def needs(names: str, algorithm: Algorithm, wire: str) -> ReductionNeeds:
    capabilities = Capabilities(backend="threads", topology=topology_of(names), messages=True)
    return reduction_needs(BUCKETS, algorithm=algorithm, wire=wire, capabilities=capabilities)


@pytest.mark.parametrize("names", ["ab", "aabb", "abc", "aabbcc"])
@pytest.mark.parametrize(
    ("algorithm", "wire"),
    [
        *((a, w) for a in (Algorithm.DIRECT, Algorithm.HIERARCHICAL) for w in ("fp32", "fp16", "bf16", "int8")),
        (Algorithm.RING, "fp32"), (Algorithm.HIERARCHICAL_RING, "fp16"), (Algorithm.FLAT, "fp32"),
        (Algorithm.HIERARCHICAL_FLAT, "fp32"),
    ],
)  # fmt: skip
def test_as_much_leaves_the_nodes_as_reducers_count(names: str, algorithm: Algorithm, wire: str) -> None:
    topology = topology_of(names)

    def rank_main(world: World) -> int:
        maker = ReducerMaker(world, topology=topology)
        reducer = maker.make(algorithm, wire=wire)
        reducer.plan(BUCKETS, device=torch.device("cpu"))
        run_to_end([reducer.reduce(number) for number in range(len(BUCKETS))])
        sent = reducer.bytes_sent()
        reducer.close()
        return sent

    sent = run_threads(len(names), rank_main)
    expected = needs(names, algorithm, wire).sent_between_nodes
    assert sum(sent) / len(sent) == pytest.approx(expected, rel=0.01)


def test_ranks_of_one_node_send_nothing_where_they_share_memory() -> None:
    assert needs("aaaa", Algorithm.HIERARCHICAL, "fp32").sent == 0
    flat = needs("aaaa", Algorithm.FLAT, "fp32")
    assert flat.sent == pytest.approx(2 * 3 / 4 * flat.buckets, rel=1e-6)
    assert flat.sent_between_nodes == 0
    alone = needs("a", Algorithm.HIERARCHICAL, "int8")
    assert (alone.sent, alone.wire, alone.residuals) == (0, 0, 0)


def test_buckets_hold_all_gradients_and_error_feedback_holds_them_twice_more() -> None:
    found = needs("ab", Algorithm.DIRECT, "int8")
    assert 4 * ELEMENTS < found.buckets < 1.02 * 4 * ELEMENTS
    assert found.residuals == 2 * 4 * ELEMENTS
    # Carriers of a node share the residuals.
    assert needs("aabb", Algorithm.HIERARCHICAL, "int8").residuals == 4 * ELEMENTS
    assert needs("ab", Algorithm.DIRECT, "fp16").residuals == 0
    for wire in ("top-k", "low-rank"):
        assert needs("ab", Algorithm.FLAT, wire).residuals == 2 * 4 * ELEMENTS


def test_ranks_that_share_memory_have_some_to_spare_for_other_buckets() -> None:
    for names in ("aa", "aabb"):
        found = needs(names, Algorithm.HIERARCHICAL, "fp32")
        assert found.spare == pytest.approx(found.buckets / 16 + (1 << 16), abs=64)
        owners = of_owners(names)
        assert owners.spare == pytest.approx(owners.buckets / 16 + (1 << 16), abs=64)
    assert needs("ab", Algorithm.HIERARCHICAL, "fp32").spare == of_owners("ab").spare == 0
    assert needs("aa", Algorithm.FLAT, "fp32").spare == 0


def test_sparse_wires_send_what_their_messages_hold() -> None:
    top_k = needs("ab", Algorithm.FLAT, "top-k")
    assert top_k.sent == pytest.approx(8 * 0.01 * ELEMENTS, rel=0.05)
    low_rank = needs("ab", Algorithm.FLAT, "low-rank")
    # Matrices of 200 x 300, 200 x 200 and 120 x 100 as factors of 16 columns, the vector unchanged.
    assert low_rank.sent == pytest.approx(4 * (16 * (500 + 400 + 220) + 1000), rel=0.01)


def test_a_cast_of_the_library_keeps_a_copy() -> None:
    found = needs("ab", Algorithm.FLAT, "fp16")
    assert found.wire == found.buckets // 2
    assert needs("ab", Algorithm.FLAT, "fp32").wire == 0


UNIT_BYTES = 200_000


def of_owners(
    names: str, *, wire: str = "fp32", algorithm: str = "auto", keeps: bool = True
) -> ReductionNeeds:
    capabilities = Capabilities(backend="threads", topology=topology_of(names), messages=True)
    return scatter_needs(
        BUCKETS, keeps_gradients=keeps, parameter_bytes=4 * ELEMENTS, algorithm=algorithm, wire=wire,
        bucket_bytes=UNIT_BYTES, capabilities=capabilities,
    )  # fmt: skip


@pytest.mark.parametrize("names", ["aa", "ab", "aabb", "abc", "aabbcc"])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_a_sharded_optimizer_sends_to_other_nodes_what_its_reducer_counts(names: str, wire: str) -> None:
    def rank_main(world: World) -> int:
        reducer = ReducerMaker(world, topology=topology_of(names)).make_zero("auto", wire=wire)
        plan = BucketDivision.of(BUCKETS, num_ranks=world.num_ranks, unit_bytes=UNIT_BYTES)
        outs = [torch.zeros(shares[world.rank].numel) for shares in plan.shares]
        parameters = [
            Gathered(num_bytes=[4 * part.numel for part in unit.parts], read=lambda out: None, write=lambda *_: None)
            for unit in plan.units
        ]  # fmt: skip
        reducer.plan(plan, num_slots=len(plan.units), outs=outs, gathered=parameters)
        for number in range(len(plan.units)):
            memory = reducer.claim(number)
            assert memory is not None
            memory.zero_()
            run_to_end([reducer.reduce_scatter(number)])
            run_to_end([reducer.all_gather(number)])
        sent = reducer.bytes_sent()
        reducer.close()
        return sent

    sent = run_threads(len(names), rank_main)
    assert sum(sent) / len(sent) == pytest.approx(of_owners(names, wire=wire).sent_between_nodes, rel=0.02)


def test_a_sharded_optimizer_sends_as_much_as_an_all_reduce_and_half_of_it_encoded() -> None:
    whole = 4 * ELEMENTS
    assert of_owners("abcd").sent == pytest.approx(2 * 3 / 4 * whole, rel=1e-3)
    assert of_owners("abcd", wire="fp16").sent == pytest.approx(1.5 * 3 / 4 * whole, rel=1e-3)
    assert of_owners("aaaa").sent == 0
    # `direct` sends within nodes too: of three other ranks two are elsewhere.
    direct = of_owners("aabb", algorithm="direct")
    assert direct.sent == pytest.approx(2 * 3 / 4 * whole, rel=1e-3)
    assert direct.sent_between_nodes == pytest.approx(direct.sent * 2 / 3, rel=1e-3)


def test_gradients_that_are_sharded_have_room_for_a_few_units() -> None:
    all_of_them, few = of_owners("ab"), of_owners("ab", keeps=False)
    assert all_of_them.buckets == pytest.approx(4 * ELEMENTS, rel=1e-3)
    assert few.buckets == min(all_of_them.buckets, few.buckets)
    many = plan_buckets([GradientSpec(50_000, torch.float32)] * 40, bucket_bytes=UNIT_BYTES)
    capabilities = Capabilities(backend="threads", topology=topology_of("ab"), messages=True)
    found = scatter_needs(
        many, keeps_gradients=False, parameter_bytes=0, algorithm="auto", wire="fp32",
        bucket_bytes=UNIT_BYTES, capabilities=capabilities,
    )  # fmt: skip
    assert found.buckets == 2 * 200_000
    assert of_owners("ab", wire="int8").residuals == pytest.approx(2 * 4 * ELEMENTS, rel=1e-3)
    assert of_owners("aabb", wire="int8").residuals == pytest.approx(4 * ELEMENTS, rel=1e-3)


def test_sums_of_sharded_gradients_send_what_the_guide_says() -> None:
    gradients, topology = 8_000_000, topology_of("aaaabbbb")

    def sent(algorithm: str, wire: str, within: str = "world") -> tuple[float, float]:
        return tuple(sharded_sum(gradients, algorithm=algorithm, wire=wire, within=within, topology=topology))  # type: ignore[arg-type, return-value]

    assert sent("auto", "fp32") == (7 / 8 * gradients, 7 / 8 * gradients / 4)
    assert sent("direct", "fp16") == (7 / 8 * gradients / 2, 4 / 8 * gradients / 2)
    between = gradients / 2 / 4 * 1 / 2
    assert sent("hierarchical", "fp16") == (3 / 4 * gradients + between, between)
    assert sent("auto", "fp16", "node") == (3 / 4 * gradients + 2 * between, 2 * between)
    assert sharded_sum(
        gradients, algorithm="hierarchical", wire="fp32", within="world", topology=topology_of("ab")
    )[0] == (gradients / 2)
