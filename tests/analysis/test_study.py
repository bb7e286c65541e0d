"""A program under a plan: closed forms of simulated times, the work of its calls, one driver under every plan."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.analysis.placed_graph import placed_graph
from flowrl.analysis.row_lengths import Tokens
from flowrl.cli.arguments.script import load_script
from flowrl.errors import UsageError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.cost_model import GivenCosts
from flowrl.placement.cost.length_distribution import Lengths, read_lengths
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

ALGORITHMS = Path(__file__).parents[2] / "algorithms"
GIVEN = {
    "actor.generate": 6.0,
    "reward.score": 1.0,
    "ref.logprobs": 2.0,
    "critic.values": 1.5,
    "critic.update": 2.5,
    "actor.update": 3.0,
    "actor.publish": 0.5,
}
COSTS = GivenCosts(GIVEN)
CLUSTER = Cluster.of("h100-80:2x8")


@pytest.fixture
def ppo():
    return load_script(str(ALGORITHMS / "ppo.py"))


@pytest.fixture
def grpo():
    return load_script(str(ALGORITHMS / "grpo.py"))


def colocated(**pipeline) -> Plan:
    pool = {"all": Pool("all", devices=tuple(range(16)))}
    wide = Place("all", Mesh.of("fsdp=16"), "fsdp2")
    actor = {"train": wide, "generate": Place("all", Mesh.of("dp=8,tp=2"), "vllm")}
    return Plan(pool, {"actor": actor, "ref": wide, "reward": Place("all")}, CLUSTER, Pipeline(**pipeline))


def disaggregated(**pipeline) -> Plan:
    pools = {
        "train": Pool("train", devices=tuple(range(8))),
        "rollout": Pool("rollout", devices=tuple(range(8, 16))),
        "cpu": Pool("cpu", processes=4),
    }
    train = Place("train", Mesh.of("fsdp=8"), "fsdp2")
    actor = {"train": train, "generate": Place("rollout", Mesh.of("dp=4,tp=2"), "vllm")}
    return Plan(pools, {"actor": actor, "ref": train, "reward": Place("cpu")}, CLUSTER, Pipeline(**pipeline))


def split(**pipeline) -> Plan:
    """The actor in one pool, those that only look in another."""
    pools = {"actor": Pool("actor", devices=tuple(range(8))), "others": Pool("others", devices=tuple(range(8, 16)))}
    mine, theirs = Place("actor", Mesh.of("fsdp=8"), "fsdp2"), Place("others", Mesh.of("fsdp=8"), "fsdp2")
    actor = {"train": mine, "generate": Place("actor", Mesh.of("dp=4,tp=2"), "vllm")}
    return Plan(
        pools,
        {"actor": actor, "ref": theirs, "critic": theirs, "reward": Place("others")},
        CLUSTER,
        Pipeline(**pipeline),
    )


def test_colocated_is_the_sum_and_a_publish_inside_a_pool_costs_nothing(grpo):
    simulation = grpo.study(colocated(), costs=COSTS).simulate(5)
    assert simulation.makespan == 5 * (6 + 1 + 2 + 3) and simulation.step_seconds == 12
    assert [p.busy for p in simulation.pools] == [1.0]
    assert simulation.lags == {0: 5 * 64} and simulation.cost_source == "given"


def test_a_prompt_of_a_step_is_counted_once_whatever_the_chunks(grpo):
    study = grpo.study(disaggregated(chunks=4, staleness=1), costs=COSTS, prompts_per_step=1, steps=10)
    assert study.simulate().lags == {0: 1, 1: 9}


def test_split_is_the_longer_of_the_branches(ppo):
    """PPO's critic and actor train side by side; reward, reference and values share the other pool."""
    simulation = ppo.study(split(), costs=COSTS).simulate(4)
    assert simulation.makespan == 4 * (6 + (1 + 2 + 1.5) + max(2.5, 3))


@pytest.mark.parametrize(("staleness", "step"), [(0, 6 + 2 + 3 + 0.5), (1, 6.5), (4, 6.5)])
def test_one_driver_under_three_stalenesses_by_the_plan_alone(grpo, staleness, step):
    simulation = grpo.study(disaggregated(staleness=staleness), costs=COSTS).simulate(30)
    assert simulation.step_seconds == pytest.approx(step)
    assert simulation.lag_max <= staleness and simulation.staleness == staleness


def test_chunks_fill_and_drain(grpo):
    """Four pieces of 6 s, then the last pieces of the reference (2/4 s); the reward is hidden behind it."""
    simulation = grpo.study(disaggregated(chunks=4), costs=COSTS).simulate(3)
    assert simulation.makespan == pytest.approx(3 * (6 + 2 / 4 + 3 + 0.5))


def test_spans_name_nodes_and_pools(grpo):
    record = grpo.study(disaggregated(), costs=COSTS).simulate(2).to_json()
    spans = [(s["node"], s["step"], s["pool"], s["start_s"], s["end_s"]) for s in record["spans"] if s["step"] == 0]
    assert spans == [
        ("actor.generate", 0, "rollout", 0.0, 6.0),
        ("reward.score", 0, "cpu", 6.0, 7.0),
        ("ref.logprobs", 0, "train", 6.0, 8.0),
        ("actor.update", 0, "train", 8.0, 11.0),
        ("actor.publish", 0, "rollout", 11.0, 11.5),
    ]
    assert record["lag"] == {"max": 0, "mean": 0.0, "histogram": {"0": 128}}
    assert record["pools"]["rollout"]["busy"] == pytest.approx(6.5 / 11.5)
    assert record["pools"]["rollout"]["idle"] == {"actor.update": 10.0}


def test_a_node_with_a_price_of_its_own(grpo):
    costs = GivenCosts({**GIVEN, "actor.generate#2": 50.0})
    assert grpo.study(colocated(), costs=costs).simulate(2).makespan == 24, "this program has no second generate"


def test_lengths_let_the_tail_of_one_step_overlap_the_next(grpo):
    fixed = grpo.study(disaggregated(staleness=2, publish="interrupt"), costs=COSTS).simulate(30)
    drawn = grpo.study(
        disaggregated(staleness=2, publish="interrupt"), costs=COSTS, tokens=Tokens(512, "lognormal", (4, 0.8))
    ).simulate(30)
    assert fixed.step_seconds == pytest.approx(6.5)  # running requests stand still for the 0.5 s of a publish
    generates = [b for b in drawn.bars if b.node == "actor.generate"]
    assert any(b.start < a.end for a, b in itertools.pairwise(generates))
    again = grpo.study(
        disaggregated(staleness=2, publish="interrupt"), costs=COSTS, tokens=Tokens(512, "lognormal", (4, 0.8))
    ).simulate(30)
    assert drawn == again, "the same seed draws the same lengths"


def test_the_work_of_calls(ppo):
    ppo.use_model("actor", "llama-7b")
    works = ppo.study(split(), tokens=Tokens(1024, "fixed", (512,)), prompts_per_step=96).works
    assert list(works) == [
        "actor.generate",
        "reward.score",
        "ref.logprobs",
        "critic.values",
        "critic.update",
        "actor.update",
    ]
    generate = works["actor.generate"]
    assert (generate.kind, generate.load.rows, generate.load.prompt, generate.load.response) == (
        "generate",
        96,
        1024,
        512,
    )
    assert str(generate.mesh) == "dp=4,tp=2" and generate.devices == tuple(range(8))
    assert works["actor.update"].role.model.name == "llama-7b" == works["ref.logprobs"].role.model.name
    assert works["critic.update"].role.head == "scalar" and works["reward.score"].role.model is None


def test_the_placed_graph_has_pools_bytes_and_versions(grpo):
    grpo.use_model("actor", "llama-7b")
    study = grpo.study(disaggregated(staleness=1), tokens=Tokens(512))
    record = placed_graph(study, grpo.graph("grpo")).to_json()
    nodes = {n["id"]: n for n in record["nodes"]}
    assert nodes["actor.generate"]["pool"] == "rollout" and nodes["actor.generate"]["mesh"] == "dp=4,tp=2"
    assert nodes["actor.update"]["layout"] == "rows over fsdp, weights over fsdp, fsdp2"
    assert nodes["rl.advantages"]["pool"] == "rollout"  # it runs where its rows are
    assert [n["id"] for n in record["nodes"] if n["kind"] != "op"] == ["actor.publish"]
    edges = {(e["src"], e["dst"]): e for e in record["edges"]}
    publish = edges[("actor.update", "actor.publish")]
    assert publish["transport"] == "network" and publish["bytes"] == pytest.approx(4 * 2 * 6738415616, rel=1e-2)
    arrives = edges[("actor.publish", "actor.generate")]
    assert (arrives["lag"], arrives["version"]) == (1, "v(k-1)")
    rows = edges[("actor.generate", "ref.logprobs")]
    tokens = 64 * 8 * (512 + 8)
    assert rows["bytes"] == tokens * 4 + 64 * 8 * (8 + 4) and rows["transport"] == "network"
    assert ("actor.update", "actor.generate") not in edges


def test_weights_go_into_the_layers_that_the_engine_gives_a_rank(grpo):
    """On one mesh both have the same stages, but of 94 layers the engine gives the second and third the longer ones."""
    grpo.use_model("actor", "qwen3-235b-a22b")
    seconds, received = {}, {}
    for engine in ("vllm", "sglang"):
        mesh = Mesh.of("pp=4,tp=4")
        actor = {"train": Place("all", mesh, "megatron"), "generate": Place("all", mesh, engine)}
        plan = Plan(colocated().pools, {**colocated().place, "actor": actor}, CLUSTER, Pipeline())
        study = grpo.study(plan, tokens=Tokens(512))
        move = next(e for e in placed_graph(study, grpo.graph("grpo")).edges if e.kind == "weights" and e.bytes)
        received[engine], seconds[engine] = move.bytes, study.cost_model.seconds(study.publish("actor"))
    model = study.roles["actor"].model
    layer = sum(stack.weight.elements * (4 if stack.weight.kind == "replicated" else 1) for stack in model.stacks[1:-2])
    # The trainer has 24, 24, 23, 23 layers: the third stage gets one that the second passes on, and so does the second.
    assert received["vllm"] == 2 * layer * 2
    assert received["sglang"] == 4 * layer * 2  # its longer stages are the last two
    assert 0 < seconds["vllm"] < seconds["sglang"]


def test_after_a_simulation_the_graph_has_times_and_utilisation(grpo):
    study = grpo.study(disaggregated(), costs=COSTS)
    graph = placed_graph(study, grpo.graph("grpo"), study.simulate(4))
    assert graph.node("actor.generate").seconds == 6 and graph.node("actor.publish").seconds == 0.5
    assert graph.node("actor.generate").share == pytest.approx(6 / 11.5)
    assert {p.name: round(p.busy or 0, 3) for p in graph.pools} == {"train": 0.435, "rollout": 0.565, "cpu": 0.087}


def test_a_graph_without_a_plan_has_no_word_of_one(grpo):
    record = grpo.graph("grpo").to_json()
    assert "pools" not in record and all("pool" not in n for n in record["nodes"])
    assert all("bytes" not in e and "transport" not in e for e in record["edges"])


def test_lengths():
    assert read_lengths("lognormal:800,1.0") == ("lognormal", (800.0, 1.0), 0.0)
    assert read_lengths("lognormal:800,1.0,alike=0.6") == ("lognormal", (800.0, 1.0), 0.6)
    assert read_lengths("uniform:1,9,alike=1") == ("uniform", (1.0, 9.0), 1.0)
    drawn = Lengths(10, 4096, "lognormal", (800.0, 0.5)).draw(20000, "seed")
    assert sum(drawn) / len(drawn) == pytest.approx(800, rel=0.03)
    assert max(Lengths(10, 900, "lognormal", (800.0, 2.0)).draw(1000, "s")) == 900
    assert set(Lengths(10, 64).draw(3, "s")) == {64}
    uniform = Lengths(10, 64, "uniform", (2.0, 6.0))
    assert uniform.mean == 4 and all(2 <= n <= 6 for n in uniform.draw(100, "s"))


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths(10, 4096, "lognormal", (800.0, 1.0)),
        Lengths(10, float("inf"), "lognormal", (800.0, 0.7)),
        Lengths(10, 500, "lognormal", (800.0, 1.0)),
        Lengths(10, 700, "uniform", (100.0, 900.0)),
        Lengths(10, 50, "uniform", (100.0, 900.0)),
        Lengths(10, 8, "measured", (1.0, 2.0, 2.0, 9.0)),
        Lengths(10, 64, "lognormal", (32.0, 0.0)),
        Lengths(10, 64),
    ],
)
def test_the_mean_of_lengths_is_that_of_their_quantiles(lengths):
    spread = lengths.spread(100_000)
    assert spread == sorted(spread) and spread[-1] <= lengths.most
    assert lengths.mean == pytest.approx(sum(spread) / len(spread), rel=2e-3)
    assert lengths.running == pytest.approx(sum(n * n for n in spread) / sum(spread) / 2, rel=2e-2)
    assert lengths.longest(1000) == pytest.approx(lengths.quantile(0.9995))


def test_the_most_tokens_of_a_call_end_a_long_tail():
    assert read_lengths("lognormal:800,1.0,4096") == ("lognormal", (800.0, 1.0, 4096.0), 0.0)
    words = "lognormal, mean 800, sigma 1, at most 4096"
    assert Lengths(10, 4096, "lognormal", (800.0, 1.0)).words == words
    assert Lengths(10, 4096, "lognormal", (800.0, 1.0), 0.6).words == f"{words}, correlated by 0.6 within a prompt"


@pytest.mark.parametrize("said", ["1.5", "-0.1", "x", "nan", "0.5,9"])
def test_a_correlation_that_is_none(said):
    with pytest.raises(UsageError, match="alike is the correlation of rows to one prompt, from 0 to 1, not"):
        read_lengths(f"uniform:1,9,alike={said}")
    with pytest.raises(UsageError, match="rows of one length have no correlation"):
        read_lengths("fixed:9,alike=0.5")


@pytest.mark.parametrize(
    "text",
    ["lognormal:800", "lognormal", "uniform:9,3", "fixed:-1", "fixed:x", "fixed:nan", "fixed:1,2", "lognormal:1,2,3,4"],
)
def test_lengths_that_are_none(text):
    with pytest.raises(UsageError, match="these are no lengths"):
        read_lengths(text)


def test_a_distribution_that_is_not_there():
    with pytest.raises(UsageError) as error:
        read_lengths("lognorml:800,1")
    assert error.value.fix == "Did you mean lognormal?"


def test_a_number_that_is_carried_makes_no_row_older(monkeypatch):
    """A multiplier made of earlier rows is no row that is trained on."""
    monkeypatch.syspath_prepend(ALGORITHMS)
    flow = load_script(str(ALGORITHMS / "safe_rlhf.py"))
    assert set(flow.study(None, steps=4).simulate().lags) == {0}


def test_one_worker_that_makes_way_alone_leaves_before_the_turns_of_the_others_and_comes_back_for_its_own(grpo):
    """Nobody else takes turns: the engine has its memory for keys and values, in its own turns, all the same."""
    for name in ("actor", "ref"):
        if grpo.handles[[h.name for h in grpo.handles].index(name)].arguments.get("model") is not None:
            grpo.use_model(name, "llama-7b")
    pools = {"all": Pool("all", devices=(0, 1, 2, 3)), "cpu": Pool("cpu", processes=4)}
    wide = Place("all", Mesh.of("fsdp=4"), "fsdp2")
    engine = Place("all", Mesh.of("dp=4"), "hf")
    actor = {"train": wide, "generate": engine}
    plan = Plan(pools, {"actor": actor, "ref": wide, "reward": Place("cpu")}, Cluster.of("a100-80:1x4"))
    study = grpo.study(plan, tokens=Tokens(512, "fixed", (1024.0,)), steps=6, prompts_per_step=64)
    assert set(study.memory["all"].sizes) == {"actor.train"}
    flown = study.simulate()
    steady = [bar for bar in flown.bars if bar.step == 4 and bar.pool == "all"]
    assert [bar.node for bar in steady if "publish" not in bar.node] == [
        "actor.train.offload",
        "actor.generate",
        "ref.logprobs",
        "actor.train.onload",
        "actor.update",
    ]
    moments = study.pool_memory["all"].timeline(study.turns("all")).moments
    assert [(m.title, m.offloaded, m.onloaded) for m in moments if m.offloaded or m.onloaded] == [
        ("actor.generate", ("actor.train",), ()),
        ("actor.update", (), ("actor.train",)),
    ]
    assert flown.step_seconds == pytest.approx(sum(bar.end - bar.start for bar in steady))


def test_parameters_of_a_program_may_be_called_as_what_a_study_is_told():
    flow = fl.Flow("any")
    actor = flow.worker(fl.Actor, "qwen3-0.6b", name="actor", max_tokens=8)

    @flow.program
    def sample(steps: int = 2, tokens: int = 5, costs: float = 1.0) -> None:
        for _, batch in flow.steps(fl.data.rows([{"prompt": "1+1="}] * 4, batch=2), steps):
            actor.generate(batch, max_tokens=tokens)

    study = flow.study_with({"tokens": 7, "steps": 3}, Plan.one_process(), "sample")
    assert study.parameters == {"steps": 3, "tokens": 7, "costs": 1.0}
    (work,) = study.works.values()
    assert work.load.response == 7 and study.simulate().steps == 3
