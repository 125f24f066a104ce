"""Which rank has which role, which ranks a micro-batch meets, and that no order of meetings can block: on one node and
on several, of equal sizes or not, in both placements."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch.distributed as dist
import train_dflash_pipeline as pipeline
from helpers import arguments
from train_dflash_pipeline import Topology, UserError, place_targets

ONE_NODE = [((targets + drafters,), targets) for targets, drafters in itertools.product(range(1, 9), range(1, 9))]
NODES = [((2, 2), 1), ((2, 2), 2), ((2, 2), 3), ((8, 8), 10), ((4, 4), 5), ((5, 3), 4), ((3, 5), 4), ((1, 1, 2), 2),
         ((8, 8, 8), 15), ((8, 16), 15), ((1, 7), 5), ((4, 2, 1), 3), ((8, 8, 8, 8), 21)]  # fmt: skip


def ranks_of(sizes, num_targets, placement):
    """Every rank's topology on nodes of the given sizes."""
    nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
    targets = place_targets(nodes, num_targets, placement)
    local = [(rank, size) for size in sizes for rank in range(size)]
    return [
        Topology(rank, len(nodes), *local[rank], num_targets, nodes=nodes, target_ranks=targets)
        for rank in range(len(nodes))
    ]


@pytest.fixture(params=["spread", "targets-first"])
def layouts(request):
    """Every rank's topology, for each layout."""
    return [ranks_of(sizes, targets, request.param) for sizes, targets in ONE_NODE + NODES]


def test_roles_cover_every_rank(layouts):
    for ranks in layouts:
        own = {role: [r.rank for r in ranks if r.role == role] for role in ("target", "drafter")}
        assert len(own["target"]) == ranks[0].num_targets and len(own["drafter"]) == ranks[0].num_drafters
        for rank in ranks:
            same = own[rank.role]
            assert same[rank.role_rank] == rank.rank, "in the order of global ranks"
            assert rank.global_rank(rank.role, rank.role_rank) == rank.rank
            assert rank.role_peers() == [other for other in same if other != rank.rank]
            assert str(rank) == f"{rank.role} {rank.role_rank} (rank {rank.rank})"


def test_one_node_deals_the_micro_batches_round(layouts):
    for ranks in layouts:
        any_rank = ranks[0]
        if len(set(any_rank.nodes)) == 1:
            assert [any_rank.target_of(m) for m in range(300)] == [m % any_rank.num_targets for m in range(300)]
            assert [rank.rank for rank in ranks if rank.role == "target"] == [*range(any_rank.num_targets)]
            assert any_rank.crossings().mean() == 0


def test_every_target_has_the_same_load_and_states_stay_where_that_allows(layouts):
    for ranks in layouts:
        any_rank = ranks[0]
        targets, drafters = any_rank.num_targets, any_rank.num_drafters
        period = math.lcm(targets, drafters)
        table = [any_rank.target_of(m) for m in range(period)]
        assert sorted(Counter(table).items()) == [(target, period // targets) for target in range(targets)]
        assert table == [any_rank.target_of(m + 3 * period) for m in range(period)]
        node = {(r.role, r.role_rank): r.nodes[r.rank] for r in ranks}
        homes = {role: Counter(n for (r, _), n in node.items() if r == role) for role in ("target", "drafter")}
        share = {(role, n): Fraction(homes[role][n], size) for role, size in (("target", targets), ("drafter", drafters))
                 for n in node.values()}  # fmt: skip
        stay = {n: min(share["target", n], share["drafter", n]) for n in node.values()}
        cross = sum(node["target", table[m]] != node["drafter", any_rank.drafter_of(m)] for m in range(period))
        assert Fraction(cross, period) == 1 - sum(stay.values())
        assert any_rank.crossings().mean() == cross / period


def test_a_targets_numbers_come_evenly(layouts):
    """So that no target computes far ahead of what is needed next: within three micro-batches of its share."""
    for ranks in layouts:
        any_rank, done = ranks[0], Counter()
        for m in range(3 * math.lcm(any_rank.num_targets, any_rank.num_drafters)):
            done[any_rank.target_of(m)] += 1
            share = Fraction(m + 1, any_rank.num_targets)
            assert all(abs(done[target] - share) < 3 for target in range(any_rank.num_targets))


def test_every_micro_batch_has_a_link_made_at_start(layouts):
    for ranks in layouts:
        pairs = ranks[0].pairs()
        assert all(rank.pairs() == pairs for rank in ranks), "links must be made in one order"
        used = {(ranks[0].target_of(m), ranks[0].drafter_of(m)) for m in range(2000)}
        assert used == set(pairs) and len(pairs) == len(set(pairs))


def target_program(topology, target, end_m):
    """The numbers at which a target meets drafters, as run_target_rank: those below the end, then a period of ends."""
    beyond = next(m for m in itertools.count(end_m) if topology.target_of(m) == target)
    last = beyond + math.lcm(topology.num_targets, topology.num_drafters)
    return list(itertools.takewhile(lambda m: m < last, topology.micro_batches_of(target, 0)))


def has_ended(topology, depth, end_m) -> bool:
    """Run all programs as far as they go. A transfer needs both sides at its m and a free slot; a micro-step of the
    drafters needs one micro-batch on each. Whether everything was trained on, and every stream ended on both sides."""
    drafters, streams = topology.num_drafters, set(topology.pairs())
    programs = {target: target_program(topology, target, end_m) for target in range(topology.num_targets)}
    awaited, received, trained, progress = list(range(drafters)), [0] * drafters, 0, True
    while progress:
        before = (sum(map(len, programs.values())), sum(awaited), trained)
        for target, program in programs.items():
            while program and program[0] >= end_m and (target, program[0] % drafters) not in streams:
                program.pop(0)  # its stream is over
            drafter = program[0] % drafters if program else 0
            if program and awaited[drafter] == program[0] and received[drafter] - trained < depth:
                if program.pop(0) < end_m:
                    received[drafter] += 1
                else:
                    streams.remove((target, drafter))
                awaited[drafter] += drafters
        for drafter in range(drafters):  # passes over targets whose stream is over, until all of its are
            if any(d == drafter for _, d in streams):
                while (topology.target_of(awaited[drafter]), drafter) not in streams:
                    awaited[drafter] += drafters
        trained += min(received) > trained
        progress = before != (sum(map(len, programs.values())), sum(awaited), trained)
    return trained == end_m // drafters and not streams and not any(programs.values())


@pytest.mark.parametrize("depth", [1, 3])
def test_sends_and_receives_follow_one_order_without_deadlock(layouts, depth):
    assert all(has_ended(ranks[0], depth, end_m=7 * ranks[0].num_drafters) for ranks in layouts)


def test_drafter_0_lives_on_the_first_node_when_roles_are_spread():
    for sizes, targets in NODES:
        ranks = ranks_of(sizes, targets, "spread")
        assert ranks[0].nodes[ranks[0].global_rank("drafter", 0)] == 0


# Nodes as torchrun's agents tell them ---------------------------------------------------------------------------------


@pytest.fixture()
def two_nodes(monkeypatch):
    """A store on which ranks 1 to 3 of two nodes of two have said where they are; this process is rank 0."""
    for name, value in dict(GROUP_WORLD_SIZE=2, GROUP_RANK=0, MASTER_ADDR="127.0.0.1").items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = dist.HashStore()
    for rank in (1, 2, 3):
        store.set(f"node/{rank}", f'[{rank // 2}, "host-{"ab"[rank // 2]}", "127.0.0.1"]')
    return store


def test_nodes_and_hosts_are_exchanged(two_nodes, monkeypatch):
    monkeypatch.setattr(pipeline.socket, "gethostname", lambda: "host-a")
    topology = pipeline.lay_over_nodes(Topology(0, 4, 0, 2, 2), two_nodes, "spread", limit_s=5)
    assert topology.nodes == (0, 0, 1, 1) and topology.target_ranks == (0, 2)
    assert str(topology.of(2)) == "target 1 (rank 2 on host-b)"
    assert "GLOO_SOCKET_IFNAME" not in pipeline.os.environ  # all on one machine: the loopback will do


def test_a_rank_that_never_starts_or_failed_before_is_named(two_nodes):
    topology = Topology(0, 5, 0, 2, 2)
    with pytest.raises(UserError, match="rank 4 did not start within 0 s"):
        pipeline.lay_over_nodes(topology, two_nodes, "spread", limit_s=0.2)
    with pytest.raises(UserError, match="rank 0 did not start within"):
        pipeline.lay_over_nodes(topology.of(1), two_nodes, "spread", limit_s=-4.9)
    two_nodes.set("failure", "[rank 4 on host-c] --seed -1: must be at least 0")
    with pytest.raises(UserError, match=r"^\[rank 4 on host-c\] --seed -1"):
        pipeline.lay_over_nodes(topology, two_nodes, "spread", limit_s=5)


@pytest.mark.parametrize("name_leads_to, addresses, named, chosen", [
    ("127.0.1.1", ["10.9.0.1", "10.9.0.2"], None, "eth7"),  # the trap: a host's own name is its loopback
    (None, ["10.9.0.1", "10.9.0.2"], None, "eth7"),  # a name that nothing resolves
    ("10.9.0.2", ["10.9.0.1", "10.9.0.2"], None, None),  # sound: as torch does it
    ("127.0.1.1", ["127.0.0.1", "127.0.0.1"], None, None),  # two agents on one machine
    ("127.0.1.1", ["10.9.0.1", "10.9.0.2"], "ib0", "ib0"),  # the user's word counts
    ("127.0.1.1", ["10.9.0.1", "127.0.1.1"], None, "eth7"),  # the rendezvous is here: the way towards the others counts
])  # fmt: skip
def test_gloo_listens_where_others_can_reach_it(monkeypatch, name_leads_to, addresses, named, chosen):
    from collections import namedtuple

    import psutil

    address = namedtuple("address", "address")
    interfaces = {"lo": [address("127.0.0.1")], "eth0": [address("192.168.1.5")],
                  "eth7": [address("fe80::1%eth7"), address("10.9.0.2")]}  # fmt: skip

    def resolve(host, port, *more, **kwargs):
        if name_leads_to is None:
            raise OSError("unknown name")
        return [(2, 1, 6, "", (name_leads_to, 0))]

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(pipeline.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(pipeline, "address_towards", lambda host: "10.9.0.2")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    try:
        pipeline.choose_gloo_interface(addresses)
        assert pipeline.os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    finally:
        pipeline.os.environ.pop("GLOO_SOCKET_IFNAME", None)


# What must be the same everywhere -------------------------------------------------------------------------------------


def test_differences_are_grouped_by_host():
    topology = Topology(0, 4, 0, 2, 2, dict(enumerate(["a", "a", "b", "c"])))
    reference = {"--seed": "0", "torch": '"2.13"', "NCCL": '"2.27"'}
    assert pipeline.describe_differences(reference, [{}, {}, {}, {}], topology) == ""
    differences = [{}, {}, {"--seed": "1"}, {"--seed": "1", "torch": '"2.12"'}]
    assert pipeline.describe_differences(reference, differences, topology) == (
        'ranks disagree: --seed is 0 on a but 1 on b, c; torch is "2.13" on a, b but "2.12" on c'
    )
    on_one = Topology(0, 2, 0, 2, 1)
    assert pipeline.describe_differences(reference, [{}, {"NCCL": '"2.28"'}], on_one) == (
        'ranks disagree: NCCL is "2.27" on rank 0 but "2.28" on rank 1'
    )
    many = {f"--flag-{number}": "1" for number in range(7)}
    line = pipeline.describe_differences(dict.fromkeys(many, "0"), [{}, many], on_one)
    assert line.count(";") == 4 and line.endswith("; and 3 more")


def test_a_set_up_counts_contents_not_paths(tmp_path):
    import torch

    config = tmp_path / "zero.json"
    config.write_text("{}")
    args = arguments(output_dir="a", target="b", deepspeed=str(config))
    before = pipeline.set_up_of(args, torch.device("cpu"))
    args.run.output_dir, args.target.target = "c", "d"
    assert pipeline.set_up_of(args, torch.device("cpu")) == before
    config.write_text("{ }")
    args.optimization.learning_rate *= 2
    after = pipeline.set_up_of(args, torch.device("cpu"))
    assert {name for name in before if before[name] != after[name]} == {"--deepspeed (contents)", "--learning-rate"}
    assert {"code version", "torch", "transformers", "deepspeed", "NCCL", "--seed"} <= before.keys()
