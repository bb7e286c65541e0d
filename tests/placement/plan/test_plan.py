"""Plans: what a file means, the same in Python, and each mistake with file, line and the nearest right word."""

import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import PlanError, UsageError
from flowrl.placement.backends import names_of
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.device_specs import KINDS
from flowrl.placement.cluster.mesh import AXES, Mesh
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import resident
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.placement.plan.plan_file import read
from flowrl.placement.plan.rules import numbers
from flowrl.valid_names import name_problem

ONE_PROCESS = """\
# two pools of this process
pools:
  gpu: {device: "cuda:0"}
  cpu: {device: cpu}
  spare: {}
place:
  actor:
    pool: gpu
    backend: hf
  reward: {pool: cpu}
  ref: {backend: hf}
pipeline: {staleness: 0}
"""
SPLIT = """\
cluster: {device: h100-80, nodes: 2, devices_per_node: 8}
pools:
  train:   {devices: "0-7"}
  rollout: {devices: "8-15"}
  cpu:     {processes: 4}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: 4, tp: 2}, backend: fsdp2}
    generate: {pool: rollout, mesh: {dp: 4, tp: 2}, engine: vllm}
  ref: {pool: train, mesh: {fsdp: 8}}
  reward: {pool: cpu}
pipeline: {staleness: 1, order: fifo, publish: drain, chunks: 4}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text):
        (tmp_path / "plan.yaml").write_text(text, encoding="utf-8")
        return Plan.load("plan.yaml")

    return read


# what a plan means


def test_a_plan_says_where_each_worker_runs(load):
    plan = load(ONE_PROCESS)
    assert {n: p.device for n, p in plan.pools.items()} == {"gpu": "cuda:0", "cpu": "cpu", "spare": "auto"}
    assert (plan.pool("actor"), plan.device("actor"), plan.backend("actor")) == ("gpu", "cuda:0", "hf")
    assert (plan.pool("reward"), plan.device("reward")) == ("cpu", "cpu")
    assert plan.pool("ref") == plan.pool("critic") == "gpu", "the first pool takes whoever is not placed"
    assert plan.backend("critic") == "hf" and plan.devices("critic") == () and not plan.split("actor")
    assert plan.cluster is None and plan.pipeline == Pipeline() and plan.file == "plan.yaml"


def test_a_plan_puts_two_copies_of_a_worker_on_a_cluster(load):
    plan = load(SPLIT)
    assert plan.cluster == Cluster.of("h100-80:2x8")
    assert plan.pools["rollout"] == Pool("rollout", devices=tuple(range(8, 16))) and plan.pools["cpu"].processes == 4
    assert plan.place_of("actor") == Place("train", Mesh.of("fsdp=4,tp=2"), "fsdp2")
    assert plan.place_of("actor", "generate") == Place("rollout", Mesh.of("dp=4,tp=2"), "vllm")
    assert plan.split("actor") and not plan.split("ref")
    assert plan.devices("actor", "generate") == tuple(range(8, 16)) and plan.devices("reward") == ()
    assert plan.place_of("ref", "generate") == plan.place_of("ref", "train") == Place("train", Mesh.of("fsdp=8"))
    assert plan.place_of("critic") == Place("train", Mesh.of("dp=8")), "replicas fill a pool"
    assert plan.pool_of("actor", "generate").size == 8 and plan.pool_of("reward").size == 4
    assert [(w, u) for w, u, _ in plan.roles()] == [
        ("actor", "train"),
        ("actor", "generate"),
        ("ref", "train"),
        ("reward", "train"),
    ]
    assert [plan.device("actor", u) for u in ("train", "generate")] == ["cuda:0", "cuda:8"]
    assert plan.device("reward") == "cpu"
    assert plan.pipeline == Pipeline(staleness=1, chunks=4)
    assert plan.to_yaml() == SPLIT


def test_the_same_in_python():
    train, rollout = Pool("train", tuple(range(8))), Pool("rollout", tuple(range(8, 16)))
    plan = Plan(
        {"train": train, "rollout": rollout, "cpu": Pool("cpu", processes=4)},
        {
            "actor": {
                "train": Place("train", Mesh.of("fsdp=4,tp=2"), "fsdp2"),
                "generate": Place("rollout", Mesh.of("dp=4,tp=2"), "vllm"),
            },
            "ref": Place("train", Mesh.of("fsdp=8")),
            "reward": Place("cpu"),
        },
        Cluster.of("h100-80:2x8"),
        Pipeline(staleness=1, chunks=4),
    )
    assert plan == read(SPLIT) and plan.to_json() == read(SPLIT).to_json()


def test_no_plan_is_one_pool():
    plan = Plan.one_process()
    assert plan.pools == {"main": Pool("main", device="auto")} and plan == Plan({"main": "auto"})
    assert plan.pool("anybody") == "main" and plan.device("anybody", "generate") == "auto"


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "{}\n", "place: {}\n", "---\n", "place:\npipeline:\n", "\ufeff# nothing\n"]
)
def test_an_empty_plan_is_no_plan(load, text):
    assert load(text) == Plan.one_process()


def test_a_cluster_alone_is_one_pool_of_all_of_it():
    plan = read("cluster: a100-80:2x4\n")
    assert plan.pools == {"main": Pool("main", tuple(range(8)))} and plan.place_of("actor").mesh == Mesh.of("dp=8")


@pytest.mark.parametrize(
    ("said", "devices"),
    [
        ('"0-3"', (0, 1, 2, 3)),
        ("5", (5,)),
        ('"0,2,4-6"', (0, 2, 4, 5, 6)),
        ("all", tuple(range(8))),
        ("[0, 3, 5-6]", (0, 3, 5, 6)),
        ('" 3 , 1 - 2 "', (3, 1, 2)),
    ],
)
def test_devices_are_numbers_and_ranges(said, devices):
    assert read(f"cluster: h200:1x8\npools: {{a: {{devices: {said}}}}}\n").pools["a"].devices == devices


@pytest.mark.parametrize(
    ("said", "cluster"),
    [
        ("h100-80:4x8", "h100-80:4x8"),
        ("{device: cpu, nodes: 1, devices_per_node: 2}", "cpu:1x2"),
        ("{device: b200}", "b200:1x1"),
        (
            "[{device: a100-80, nodes: 2, devices_per_node: 8}, {device: l40s, devices_per_node: 4}]",
            "a100-80:2x8+l40s:1x4",
        ),
    ],
)
def test_a_cluster_is_text_or_a_mapping_or_several(said, cluster):
    assert read(f"cluster: {said}\n").cluster == Cluster.of(cluster)


def test_a_cluster_may_say_its_network():
    cluster = read("cluster: {device: a100-80, nodes: 16, devices_per_node: 8, network: 200}\n").cluster
    assert cluster == Cluster((Nodes("a100-80", 16, 8, 200),)) != Cluster.of("a100-80:16x8")


def test_a_cluster_may_say_what_passes_between_its_switches():
    said = "device: h100-80, nodes: 16, devices_per_node: 8, oversubscription: 2.5, nodes_per_switch: 4, rails: true"
    plan = read(f"cluster: {{{said}}}\npools: {{all: {{devices: all}}}}\n")
    assert plan.cluster == Cluster((Nodes("h100-80", 16, 8, None, 2.5, 4, True),))
    assert read(plan.to_yaml()).cluster == plan.cluster


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "oversubscription: 0.5",
            "oversubscription is how many times less passes between switches, from 1 up, not 0.5",
        ),
        ("oversubscription: .inf", "from 1 up, not .inf"),
        ("oversubscription: much", "oversubscription is a number from 1 up, not much"),
        ("oversubscription: 2, nodes_per_switch: 0", "nodes_per_switch is a whole number from 1 up, not 0"),
        ("oversubscription: 2, rails: 8", "rails is true or false, not 8"),
        ("rails: true", "rails changes nothing without oversubscription"),
        ("nodes_per_switch: 4", "nodes_per_switch changes nothing without oversubscription"),
    ],
)
def test_what_passes_between_switches_is_said_rightly(said, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        read(f"cluster: {{device: h100-80, nodes: 4, {said}}}\n")


def test_this_machine_is_a_cluster():
    plan = read("cluster: auto\npools: {all: {devices: all}}\n")
    assert (
        plan.cluster is not None
        and plan.cluster == Cluster.auto()
        and len(plan.pools["all"].devices) == plan.cluster.size
    )


def test_the_device_of_a_cpu_cluster_is_cpu():
    assert read("cluster: cpu:1x4\npools: {a: {devices: 2-3}}\n").device("actor") == "cpu"


def test_replicas_fill_the_pool_when_no_mesh_is_said():
    plan = read("cluster: h100-80:1x8\npools: {a: {devices: 0-3}}\nplace: {actor: {pool: a}, ref: {mesh: {}}}\n")
    assert plan.place_of("actor").mesh == plan.place_of("ref").mesh == Mesh.of("dp=4")


def test_a_worker_that_only_generates_has_one_place():
    plan = read("place:\n  judge:\n    generate: {engine: sglang}\n")
    assert plan.backend("judge") == plan.backend("judge", "generate") == "sglang" and not plan.split("judge")
    assert plan.to_json()["place"] == {"judge": {"generate": {"pool": "main", "engine": "sglang"}}}


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_steps_may_overlap(staleness):
    said = f"pipeline: {{staleness: {staleness}, order: window, window: 0.5, publish: interrupt, chunks: 2}}\n"
    assert read(said).pipeline == Pipeline(staleness, "window", 0.5, "interrupt", 2)


def test_the_record_says_all_of_it(load):
    pipeline = {"staleness": 0, "order": "fifo", "publish": "drain", "chunks": 1}
    assert load("pools: {a: {device: cpu}}\nplace: {actor: {pool: a}}\n").to_json() == {
        "pools": {"a": {"device": "cpu"}},
        "place": {"actor": {"pool": "a", "backend": "hf"}},
        "pipeline": pipeline,
    }
    assert read(SPLIT).to_json() == {
        "cluster": [{"device": "h100-80", "nodes": 2, "devices_per_node": 8}],
        "pools": {"train": {"devices": "0-7"}, "rollout": {"devices": "8-15"}, "cpu": {"processes": 4}},
        "place": {
            "actor": {
                "train": {"pool": "train", "mesh": {"fsdp": 4, "tp": 2}, "backend": "fsdp2"},
                "generate": {"pool": "rollout", "mesh": {"dp": 4, "tp": 2}, "engine": "vllm"},
            },
            "ref": {"pool": "train", "mesh": {"fsdp": 8}, "backend": "hf"},
            "reward": {"pool": "cpu", "backend": "hf"},
        },
        "pipeline": {**pipeline, "staleness": 1, "chunks": 4},
    }


def test_a_large_cluster_is_read_at_once():
    text = "cluster: h100-80:128x8\npools:\n  train: {devices: 0-511}\n  rollout: {devices: 512-1023}\n"
    text += "place:\n" + "".join(f"  w{i}: {{pool: train, mesh: {{fsdp: 64, tp: 8}}}}\n" for i in range(50))
    start = time.perf_counter()
    plan = read(text)
    assert time.perf_counter() - start < 0.5
    assert len(plan.devices("w7")) == 512 and plan.pool_of("w7").size == 512


# there and back


names = st.text(min_size=1, max_size=8).filter(lambda t: t.isprintable()) | st.sampled_from(
    ["yes", "null", "1", "a: b", "0x1", "~", "-", "'", '"', "#", "{", "é", "模型", "🙂", " "]
)

#: Files and actors have the names of pools too.
pool_names = st.sampled_from(["yes", "null", "1", "0x1", "é", "模型", "a-b", "_"]) | st.from_regex(r"\A\w[\w-]{0,7}\Z")
pool_names = pool_names.filter(lambda name: name_problem(name, number=True) is None)


@st.composite
def plans(draw):
    groups = st.builds(
        Nodes,
        st.sampled_from(list(KINDS)),
        st.integers(1, 3),
        st.integers(1, 8),
        st.none() | st.floats(1e-6, 1e20) | st.integers(1, 3200),
    )
    cluster = draw(st.none() | st.lists(groups, min_size=1, max_size=3).map(lambda g: Cluster(tuple(g))))
    free = draw(st.permutations(range(cluster.size))) if cluster else []
    pools = {}
    for name in draw(st.lists(pool_names, min_size=1, max_size=4, unique=True)):
        take = draw(st.integers(0, min(len(free), 8)))
        if take:
            pools[name], free = Pool(name, tuple(free[:take])), free[take:]
        else:
            processes = st.integers(1, 9).map(lambda n, name=name: Pool(name, processes=n))
            device = st.sampled_from(["", "cpu", "cuda", "cuda:3", "auto"]).map(lambda d, n=name: Pool(n, device=d))
            pools[name] = draw(processes | device)

    def place(use):
        pool = pools[draw(st.sampled_from(list(pools)))]
        axes, left = {}, len(pool.devices) or 1
        for axis in draw(st.permutations(AXES)):
            size = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
            axes[axis], left = size, left // size
        mesh = Mesh({**axes, "dp": axes["dp"] * left})
        return Place(pool.name, mesh, draw(st.sampled_from(names_of(use))))

    uses = st.sampled_from([("train",), ("generate",), ("train", "generate")])
    workers = draw(st.lists(names, max_size=4, unique=True))
    order = draw(st.sampled_from(["fifo", "window"]))
    pipeline = Pipeline(
        draw(st.integers(0, 9)),
        order,
        draw(st.floats(1e-9, 1)) if order == "window" else 0.3,
        draw(st.sampled_from(["drain", "interrupt", "continue"])),
        draw(st.integers(1, 64)),
    )
    return Plan(pools, {w: {u: place(u) for u in draw(uses)} for w in workers}, cluster, pipeline)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_what_is_written_is_read_back(plan):
    again = read(plan.to_yaml())
    assert again == plan
    assert list(again.pools) == list(plan.pools), "the first pool is that of whoever has no place"
    assert (again.to_json(), again.to_yaml()) == (plan.to_json(), plan.to_yaml())


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_numbers_are_read_back(devices):
    assert read(f"cluster: cpu:1x31\npools: {{a: {{devices: '{numbers(devices)}'}}}}").pools["a"].devices == tuple(
        devices
    )


def test_where_it_stands_in_a_file_is_not_what_a_plan_is(load):
    assert load(SPLIT) == load("# moved down\n\n" + SPLIT) == read(SPLIT)


# mistakes

HEAD = "cluster: h100-80:2x8\npools:\n  train: {devices: 0-7}\n  rollout: {devices: 8-15}\n  cpu: {processes: 4}\n"
KEYS = "have backend, engine, generate, mesh, offload, pool, train"
HAVE_KINDS = "have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x"
NUMBERS = 'fix  Write numbers from 0 and ranges: devices: "0-7", "0,2,4-6", or all.'
MAPPING = "fix  Write key: value lines, or {key: value}."
MISTAKES = [
    # words
    (
        "pool:\n  main: {}\n",
        1,
        "a plan has no 'pool'.",
        "have cluster, pipeline, place, pools",
        "fix  Did you mean 'pools'?",
    ),
    (
        "pools: {main: {}}\nmesh: 4\n",
        2,
        "a plan has no 'mesh'.",
        "have cluster, pipeline, place, pools",
        "fix  Take it out.",
    ),
    (
        "pools:\n  main: {devise: cpu}\n",
        2,
        "pool 'main' has no 'devise'.",
        "have device, devices, least, processes",
        "fix  Did you mean 'device'?",
    ),
    ("place:\n  actor:\n    pol: main\n", 3, "the place of 'actor' has no 'pol'.", KEYS, "fix  Did you mean 'pool'?"),
    ("place:\n  actor: {trian: {}}\n", 2, "the place of 'actor' has no 'trian'.", KEYS, "fix  Did you mean 'train'?"),
    (
        "place:\n  actor:\n    generate: {backend: vllm}\n",
        3,
        "actor.generate has no 'backend'.",
        "have engine, mesh, pool",
        "fix  Write engine: vllm.",
    ),
    (
        "pools:\n  b: {processes: 2, least: 3}\n",
        2,
        "pool 'b': 3 ranks at least, but it has 2.",
        "fix  Write a number from 1 to 2, or give it more.",
    ),
    (
        "pools:\n  b: {processes: 2, least: 0}\n",
        2,
        "least is a whole number from 1 up, not 0.",
        "fix  Write least: 1, or more.",
    ),
    (
        "pools:\n  b: {device: cpu, least: 1}\n",
        2,
        "pool 'b' has a least number of ranks, and is a queue of one process.",
        "fix  Take least out, or give the pool devices or processes.",
    ),
    (
        'cluster: cpu:1x2\npools:\n  b: {devices: "0-1", least: 1}\nplace:\n  actor: {mesh: {fsdp: 2}, backend: fsdp2}\n',
        5,
        "'actor' needs all ranks of pool 'b', and least: 1 lets some be missing.",
        "fix  Take least out, or place it in a pool of its own.",
    ),
    (
        'cluster: cpu:1x2\npools:\n  b: {devices: "0-1", least: 1}\nplace:\n  actor: {generate: {pool: b, mesh: {tp: 2}, engine: vllm}}\n',
        5,
        "'actor' needs all ranks of pool 'b', and least: 1 lets some be missing.",
        "fix  Take least out, or place it in a pool of its own.",
    ),
    (
        'cluster: cpu:1x8\npools:\n  b: {devices: "0-7", least: 3}\nplace:\n  actor: {generate: {pool: b, mesh: {dp: 4, tp: 2}, engine: vllm}}\n',
        5,
        "2 ranks split an engine of 'actor', and least: 3 of its pool is no multiple.",
        "fix  Write least: 4, or take it out.",
    ),
    (
        'cluster: cpu:1x4\npools:\n  b: {devices: "0-3", least: 2}\nplace:\n'
        "  actor: {generate: {pool: b, mesh: {dp: 2, tp: 2}, engine: vllm}}\n  judge: {generate: {pool: b, mesh: {dp: 1, tp: 4}, engine: vllm}}\n",
        6,
        "'judge' needs all ranks of pool 'b', and least: 2 lets some be missing.",
        "fix  Take least out, or place it in a pool of its own.",
    ),
    (
        'cluster: cpu:1x8\npools:\n  b: {devices: "0-7", least: 4}\nplace:\n'
        "  actor: {generate: {pool: b, mesh: {dp: 4, tp: 2}, engine: vllm}}\n  judge: {generate: {pool: b, mesh: {dp: 2, tp: 4}, engine: vllm}}\n",
        6,
        "ranks of pool 'b' split 'judge' (dp=2,tp=4) and 'actor' (dp=4,tp=2), and least: 4 lets some be missing.",
        "fix  Give both the same mesh, or take least out.",
    ),
    (
        "pipeline:\n  restart: -1\n",
        2,
        "pipeline: restart is a number of seconds, not -1.",
        "fix  Write restart: 120, or 0 to go on without a lost replica at once.",
    ),
    (
        "pipeline:\n  restart: soon\n",
        2,
        "pipeline: restart is a number of seconds, not soon.",
        "fix  Write restart: 120, or 0 to go on without a lost replica at once.",
    ),
    (
        "pipeline:\n  hang: never\n",
        2,
        "pipeline: hang is a number of seconds, not never.",
        "fix  Write hang: 1800, or 0 to wait for ever.",
    ),
    (
        "pipeline:\n  stalenes: 0\n",
        2,
        "pipeline has no 'stalenes'.",
        "have chunks, copies, deadline, hang, order, publish, restart, staleness, window",
        "fix  Did you mean 'staleness'?",
    ),
    (
        "cluster:\n  device: h100-80\n  devices_pro_node: 8\n",
        3,
        "cluster has no 'devices_pro_node'.",
        "have cores_per_node, device, devices_per_node, host_memory, network, nodes, nodes_per_switch, oversubscription, rails",
        "fix  Did you mean 'devices_per_node'?",
    ),
    (
        HEAD + "place:\n  actor:\n    mesh: {fdsp: 8}\n",
        8,
        "actor: a mesh has no 'fdsp'.",
        "have cp, dp, ep, folded_ep, fsdp, pp, tp",
        "fix  Did you mean 'fsdp'?",
    ),
    (
        "place:\n  actor: {backend: fsdp2, offload: yes}\n",
        2,
        "actor: offload is true or false, not yes.",
        "fix  Write offload: true.",
    ),
    (
        "place:\n  actor: {offload: true}\n",
        2,
        "'actor': hf does not offload.",
        "fix  Write backend: fsdp2, or take offload out.",
    ),
    ("pools:\n  a: {}\n  a: {}\n", 3, "pools has 'a' twice.", "fix  Take one out."),
    ("pools: {a: {}}\npools: {b: {}}\n", 2, "a plan has 'pools' twice.", "fix  Take one out."),
    ("place:\n  actor: {pool: main, pool: main}\n", 2, "the place of 'actor' has 'pool' twice.", "fix  Take one out."),
    # shapes
    ("pools:\n  main: {device: [0, 1]}\n", 2, "a device is a single word."),
    ("pools:\n", 1, "a plan needs a pool.", "fix  Write main: {device: auto}."),
    ("pools: {}\n", 1, "a plan needs a pool.", "fix  Write main: {device: auto}."),
    ("pools: [main]\n", 1, "pools is a mapping of names.", MAPPING),
    ("- pools\n", 1, "a plan is a mapping of names.", MAPPING),
    ("pools\n", 1, "a plan is a mapping of names.", MAPPING),
    ("? [a, b]\n: 1\n", 1, "a name is a single word."),
    ("place:\n  actor: main\n", 2, "the place of 'actor' is a mapping of names.", MAPPING),
    ("place:\n  actor: {mesh: 4}\n", 2, "actor: a mesh is a mapping of names.", MAPPING),
    ("place:\n  actor: {pool: &a {b: *a}}\n", 2, "a pool is a single word."),
    # clusters
    ("cluster: h100:2x8\n", 1, "there is no device 'h100'.", HAVE_KINDS, "fix  Did you mean 'h100-80'?"),
    (
        "cluster:\n  nodes: 2\n  device: h10-80\n",
        3,
        "there is no device 'h10-80'.",
        HAVE_KINDS,
        "fix  Did you mean 'h100-80'?",
    ),
    ("cluster: {nodes: 2}\n", 1, "cluster says no device.", "fix  Add device: h100-80."),
    ("cluster: []\n", 1, "a cluster has nodes.", "fix  Write {device: h100-80, nodes: 1, devices_per_node: 8}."),
    (
        "cluster: {device: l40s, nodes: 0}\n",
        1,
        "nodes is a whole number from 1 up, not 0.",
        "fix  Write nodes: 1, or more.",
    ),
    (
        "cluster: {device: l40s, nodes: two}\n",
        1,
        "nodes is a whole number from 1 up, not two.",
        "fix  Write nodes: 1, or more.",
    ),
    (
        "cluster: {device: l40s, network: .nan}\n",
        1,
        "network is Gb/s of a node, a number above 0, not .nan.",
        "fix  Write network: 3200, or leave it out.",
    ),
    # pools
    (
        "pools:\n  main:\n    device: gpu\n",
        3,
        "pool 'main': 'gpu' is no device.",
        "fix  Write auto, cpu, cuda, or cuda:1.",
    ),
    (
        "pools:\n  main:\n    device: ''\n",
        3,
        "pool 'main': 'nothing' is no device.",
        "fix  Write auto, cpu, cuda, or cuda:1.",
    ),
    (
        "pools:\n  main: {devices: 0-7}\n",
        2,
        "pool 'main' has devices, but the plan has no cluster.",
        "fix  Add cluster: {device: h100-80, nodes: 1, devices_per_node: 8}, or cluster: auto.",
    ),
    (
        "cluster: cpu:1x8\npools:\n  main:\n    devices: 0-7\n    device: cpu\n",
        5,
        "pool 'main' has both devices and device.",
        "fix  Take one out.",
    ),
    (
        "pools:\n  cpu: {processes: 0}\n",
        2,
        "processes is a whole number from 1 up, not 0.",
        "fix  Write processes: 1, or more.",
    ),
    (
        "pools:\n  cpu: {processes: 1.5}\n",
        2,
        "processes is a whole number from 1 up, not 1.5.",
        "fix  Write processes: 1, or more.",
    ),
    ("cluster: cpu:1x8\npools:\n  a: {devices: 7-0}\n", 3, "pool 'a': '7-0' are no devices.", NUMBERS),
    ("cluster: cpu:1x8\npools:\n  a: {devices: '0,,1'}\n", 3, "pool 'a': '' are no devices.", NUMBERS),
    ("cluster: cpu:1x8\npools:\n  a: {devices: -1}\n", 3, "pool 'a': '-1' are no devices.", NUMBERS),
    ("cluster: cpu:1x8\npools:\n  a: {devices: some}\n", 3, "pool 'a': 'some' are no devices.", NUMBERS),
    ("cluster: cpu:1x8\npools:\n  a: {devices: '0-2,2'}\n", 3, "pool 'a' has device 2 twice.", "fix  Take one out."),
    (
        "cluster: h100-80:1x8\npools:\n  a: {devices: 4-99999999999}\n",
        3,
        "pool 'a': there is no device 99999999999 in h100-80:1x8, which has 8.",
        "fix  Write numbers from 0 to 7, or add nodes.",
    ),
    (
        "cluster: h100-80:1x8\npools:\n  a: {devices: 0-3}\n  b:\n    devices: 2-4\n",
        5,
        "pools 'a' and 'b' share devices 2-3.",
        "fix  Give each device to one pool; workers that share devices are placed in the same pool.",
    ),
    (
        "cluster: h100-80:1x8\npools:\n  a: {devices: all}\n  b: {devices: 7}\n",
        4,
        "pools 'a' and 'b' share device 7.",
        "fix  Give each device to one pool; workers that share devices are placed in the same pool.",
    ),
    # places
    (
        "pools: {train: {}}\nplace:\n  actor: {pool: trian}\n",
        3,
        "'actor' is placed in pool 'trian', which the plan does not have.",
        "have train",
        "fix  Did you mean 'train'?",
    ),
    (
        HEAD + "place:\n  actor:\n    train: {pool: train}\n    generate:\n      pool: rolout\n",
        10,
        "'actor.generate' is placed in pool 'rolout', which the plan does not have.",
        "have cpu, rollout, train",
        "fix  Did you mean 'rollout'?",
    ),
    (
        "place:\n  actor:\n    train: {}\n    mesh: {tp: 2}\n",
        4,
        "the place of 'actor' has both train and mesh.",
        "fix  Write mesh below train.",
    ),
    (
        "place:\n  judge: {engine: vllm}\n",
        2,
        "the place of 'judge' has an engine for no use.",
        "fix  Write generate: {pool: ..., engine: ...}.",
    ),
    (
        "place:\n  actor:\n    backend: hff\n",
        3,
        "'actor': there is no backend 'hff'.",
        "have fsdp2, hf, megatron",
        "fix  Did you mean 'hf'?",
    ),
    (
        "place:\n  actor:\n    backend: vllm\n",
        3,
        "'actor': there is no backend 'vllm'.",
        "have fsdp2, hf, megatron",
        "fix  An engine generates: write generate: {engine: vllm}.",
    ),
    (
        "place:\n  actor: {generate: {engine: fsdp2}}\n",
        2,
        "'actor': there is no engine 'fsdp2'.",
        "have hf, sglang, vllm",
        "fix  A backend trains: write train: {backend: fsdp2}.",
    ),
    (
        HEAD + "place:\n  actor:\n    train: {mesh: {fsdp: 4, tp: 3}}\n    generate: {pool: rollout}\n",
        8,
        "actor.train: mesh fsdp=4 x tp=3 needs 12 devices, but pool 'train' has 8.",
        "fix  Change an axis size.",
    ),
    (
        "cluster: h100-80:2x8\npools: {train: {devices: 0-7}}\nplace:\n  actor:\n    pool: train\n    mesh: {fsdp: 4, tp: 3}\n",
        6,
        "actor: mesh fsdp=4 x tp=3 needs 12 devices, but pool 'train' has 8.",
        "fix  Change an axis size, or give 'train' the devices 0-11.",
    ),
    (
        HEAD + "place:\n  ref: {pool: train, mesh: {tp: 2}}\n",
        7,
        "ref: mesh tp=2 takes 2 devices, but pool 'train' has 8.",
        "fix  Add dp: 4: the rest holds replicas.",
    ),
    (
        HEAD + "place:\n  ref: {pool: train, mesh: {dp: 2, tp: 2}}\n",
        7,
        "ref: mesh dp=2 x tp=2 takes 4 devices, but pool 'train' has 8.",
        "fix  Write dp: 4: the rest holds replicas.",
    ),
    (
        HEAD + "place:\n  ref: {pool: train, mesh: {tp: 1}}\n",
        7,
        "ref: mesh tp=1 takes 1 device, but pool 'train' has 8.",
        "fix  Add dp: 8: the rest holds replicas.",
    ),
    (
        HEAD + "place:\n  ref: {pool: train, mesh: {tp: 3}}\n",
        7,
        "ref: mesh tp=3 needs 3 devices, but pool 'train' has 8.",
        "fix  Change an axis size, or give 'train' the devices 0-2.",
    ),
    (
        HEAD + "place:\n  reward: {pool: cpu, mesh: {dp: 4}}\n",
        7,
        "reward: mesh dp=4 needs devices, but pool 'cpu' has processes.",
        "fix  Take the mesh out, or name a pool with devices.",
    ),
    (
        "place:\n  actor: {mesh: {tp: 2}}\n",
        2,
        "actor: mesh tp=2 needs 2 devices, but pool 'main' has 1.",
        "fix  Change an axis size.",
    ),
    ("place:\n  actor: {mesh: {tp: 0}}\n", 2, "tp is a whole number from 1 up, not 0.", "fix  Write tp: 1, or more."),
    (
        "place:\n  actor: {mesh: {tp: two}}\n",
        2,
        "tp is a whole number from 1 up, not two.",
        "fix  Write tp: 1, or more.",
    ),
    # pipeline
    (
        "pipeline:\n  staleness: -1\n",
        2,
        "pipeline: staleness is a whole number from 0 up, not -1.",
        "fix  Write staleness: 0.",
    ),
    (
        "pipeline:\n  staleness: true\n",
        2,
        "pipeline: staleness is a whole number from 0 up, not true.",
        "fix  Write staleness: 0.",
    ),
    (
        "pipeline:\n  copies: 3\n",
        2,
        "pipeline: copies is 3, and rows are kept on one rank more: 2 at most.",
        "fix  Write copies: 2.",
    ),
    (
        "pipeline:\n  deadline: .nan\n",
        2,
        "pipeline: deadline is a number of seconds, not .nan.",
        "fix  Write deadline: 600, or take it out to wait for ever.",
    ),
    ("pipeline:\n  chunks: 0\n", 2, "pipeline: chunks is a whole number from 1 up, not 0.", "fix  Write chunks: 1."),
    (
        "pipeline:\n  order: fiffo\n",
        2,
        "pipeline: there is no order 'fiffo'.",
        "have fifo, window",
        "fix  Did you mean 'fifo'?",
    ),
    (
        "pipeline:\n  publish: dran\n",
        2,
        "pipeline: there is no publish 'dran'.",
        "have continue, drain, interrupt",
        "fix  Did you mean 'drain'?",
    ),
    (
        "pipeline:\n  staleness: 1\n  window: 0.3\n",
        3,
        "pipeline: a window needs order: window, not fifo.",
        "fix  Write order: window, or take the window out.",
    ),
    (
        "pipeline:\n  order: window\n  window: 1.5\n",
        3,
        "pipeline: window is a part of the open prompts, not 1.5.",
        "fix  Write a number above 0, up to 1: window: 0.3.",
    ),
    (
        "pipeline:\n  order: window\n  window: 0\n",
        3,
        "pipeline: window is a part of the open prompts, not 0.",
        "fix  Write a number above 0, up to 1: window: 0.3.",
    ),
    # no YAML
    ("pools:\n  main: {device: cpu\n", 3, "the plan is no YAML: expected ',' or '}', but got '<stream end>'."),
    (
        "pools:\n\tmain: {}\n",
        2,
        "the plan is no YAML: found character '\\t' that cannot start any token.",
        "fix  Indent with spaces.",
    ),
    (
        "pools: {}\n---\npools: {}\n",
        2,
        "the plan is no YAML: expected a single document in the stream, but found another document.",
    ),
]


@pytest.mark.parametrize(("text", "line", "what", "rest"), [(t, n, w, list(r)) for t, n, w, *r in MISTAKES])
def test_each_mistake_has_its_line(load, text, line, what, rest):
    with pytest.raises(PlanError) as found:
        load(text)
    shown = [*text.splitlines(), ""][line - 1].strip()
    at = f"  at   plan.yaml:{line}" + (f"   {shown}" if shown else "")
    assert str(found.value).splitlines() == [what, at, *(f"  {r}" for r in rest)]


def test_odd_bytes_are_no_plan(load, tmp_path):
    with pytest.raises(PlanError, match="the plan is no YAML: unacceptable character #x0000"):
        load("pools: {a\0: {}}")
    with pytest.raises(PlanError, match="the plan is nested too deeply."):
        load("[" * 20000)
    (tmp_path / "plan.yaml").write_bytes(b"pools: {\xff: {}}")
    with pytest.raises(PlanError, match="the plan plan.yaml cannot be read: 'utf-8' codec"):
        Plan.load("plan.yaml")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Plan({"a": "gpu"}), "pool 'a': 'gpu' is no device."),
        (lambda: Plan({"a": Pool("b")}), "pool 'b' is listed as 'a'."),
        (lambda: Pool("a", devices=(0,), processes=2), "pool 'a' has both devices and processes."),
        (lambda: Pool("a", processes=-2), "pool 'a': -2 processes are none."),
        (lambda: Plan({"a": Pool("a", (0, 1))}), "pool 'a' has devices, but the plan has no cluster."),
        (
            lambda: Plan({"a": Pool("a", (-1, 0))}, cluster=Cluster.of("cpu:1x2")),
            "pool 'a': there is no device -1 in cpu:1x2, which has 2.",
        ),
        (
            lambda: Plan({"a": Pool("a", (0, 1)), "b": Pool("b", (1,))}, cluster=Cluster.of("cpu:1x2")),
            "pools 'a' and 'b' share device 1.",
        ),
        (lambda: Plan({"a": "cpu"}, {"w": Place("b")}), "'w' is placed in pool 'b', which the plan does not have."),
        (lambda: Plan({"a": "cpu"}, {"w": {"trian": Place("a")}}), "the place of 'w' has no 'trian'."),
        (lambda: Plan({"a": "cpu"}, {"w": Place("a", backend="vllm")}), "'w': there is no backend 'vllm'."),
        (
            lambda: Plan({"a": "cpu"}, {"w": Place("a", Mesh.of("tp=2"))}),
            "w: mesh tp=2 needs 2 devices, but pool 'a' has 1.",
        ),
        (lambda: Pipeline(staleness=True), "pipeline: staleness is a whole number from 0 up, not True."),
        (lambda: Pipeline(window=0.5), "pipeline: a window needs order: window, not fifo."),
        (
            lambda: Pipeline(order="window", window=float("nan")),
            "pipeline: window is a part of the open prompts, not nan.",
        ),
    ],
)
def test_a_plan_made_in_python_is_checked_alike(make, what):
    with pytest.raises(PlanError) as found:
        make()
    assert found.value.what == what and found.value.at is None


# against a flow


def test_a_place_of_nobody(load):
    plan = load("place:\n  actor: {pool: main}\n  rewrad: {pool: main}\n")
    plan.check_workers(["actor", "rewrad"], ["hf"])
    with pytest.raises(PlanError) as found:
        plan.check_workers(["actor", "reward"], ["hf"])
    assert found.value.report() == (
        "PlanError: the plan places 'rewrad', which is no worker of this flow.\n"
        "  at   plan.yaml:3   rewrad: {pool: main}\n"
        "  have actor, reward\n"
        "  fix  Did you mean 'reward'?"
    )


def test_a_backend_that_is_not_there(load):
    plan = load("place:\n  actor:\n    backend: fsdp2\n")
    plan.check_workers(["actor"])
    with pytest.raises(PlanError) as found:
        plan.check_workers(["actor"], ["hf", "vllm"])
    assert found.value.report() == (
        "PlanError: 'actor' is placed with backend 'fsdp2', which is not there.\n"
        "  at   plan.yaml:3   backend: fsdp2\n"
        "  have hf, vllm"
    )


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "split.yaml").write_text(ONE_PROCESS)
    with pytest.raises(UsageError) as found:
        Plan.load(tmp_path / "splt.yaml")
    assert found.value.fix == f"Did you mean {tmp_path / 'split.yaml'}?"
    with pytest.raises(UsageError, match="there is no plan"):
        Plan.load(tmp_path / "nowhere" / "x.yaml")
    (tmp_path / "p_neg.yaml").write_text(ONE_PROCESS)
    with pytest.raises(UsageError) as found:
        Plan.load(tmp_path / "nofile.yaml")
    assert found.value.fix == "Name a YAML file.", "what the files share is their ending alone"


def test_offload_is_kept_and_leaves_the_device_to_the_layers_at_work():
    place = Place("main", Mesh.of("fsdp=8"), "fsdp2", offload=True)
    plan = Plan(place={"actor": place}, cluster=Cluster.of("h100-80:1x8"))
    assert plan.place_of("actor").offload and "offload: true" in plan.to_yaml()
    role, load = Role("actor", shape_named("llama-7b"), trains=True), Workload(64, 512, 512)
    kept, gone = (resident(role, "train", p, plan, load) for p in (replace(place, offload=False), place))
    assert kept.idle and not gone.idle and "gradients" not in gone.working
    assert {n: kept.working[n] for n in gone.working} == gone.working
