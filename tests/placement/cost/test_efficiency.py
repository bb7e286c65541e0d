"""Parts of a peak: what a file says of them, and what each changes."""

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.errors import PlanError, UsageError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.per_device_counts import sizes
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import shape_named

MODEL = shape_named("qwen3-30b-a3b")
SPARSE = Role("actor", MODEL, trains=True, generates=True)
FORWARD = Work("actor.logprobs", "actor.logprobs", "forward", SPARSE, Workload(64, 500, 500), Mesh(), devices=(0,))
NODE = Cluster.of("h100-80:1x8")


def test_a_file_says_some_and_leaves_the_others(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: 0.25\nslot_s: 0.001\n")
    found = Efficiency.load(file)
    assert (found.train, found.slot_s, found.forward) == (0.25, 0.001, Efficiency().forward)
    assert found.sources["train"].endswith("mine.yaml") and found.sources["forward"].startswith("assumed")
    assert Roofline(NODE, found).source == f"roofline (efficiencies: {found.name})"


def test_published_constants_have_a_name_and_a_source():
    found = Efficiency.load("published")
    assert found == Efficiency.published() and found.name == "published"
    changed = {n for n in found.sources if getattr(found, n) != getattr(Efficiency(), n)}
    assert changed == {n for n, source in found.sources.items() if "published" in source}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trian: 0.4\n", ["'trian'", "Did you mean 'train'"]),
        ("train: 1.5\n", ["no part of a peak"]),
        ("train: 0\n", ["no part of a peak"]),
        ("train: much\n", ["no part of a peak"]),
        ("train: .nan\n", ["no part of a peak"]),
        ("step_s: -1\n", ["no number of seconds"]),
        ("sources: 0.5\n", ["no efficiency 'sources'"]),
        ("- train\n", ["mapping"]),
        ("train: [0.4]\n", ["single value"]),
    ],
)
def test_mistakes_in_a_file_are_told_with_their_line(tmp_path, text, said):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(PlanError) as told:
        Efficiency.load(file)
    assert all(word in str(told.value) for word in said) and "mine.yaml:1" in str(told.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        Efficiency.load(tmp_path / "none.yaml")


def test_overlap_may_be_nothing(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("overlap: 0\n")
    assert Efficiency.load(file).overlap == 0


def test_products_of_experts_take_as_much_longer_as_they_reach_less():
    plain, slow = (Roofline(NODE, replace(Efficiency.ideal(), experts=part)) for part in (1.0, 0.25))
    parts = sizes(MODEL)
    operations = 2 * 64 * 1000 * parts.one_expert * 8  # of experts alone, 8 for each token
    assert slow.seconds(FORWARD) - plain.seconds(FORWARD) == pytest.approx(3 * operations / 989.4e12)


def test_every_row_of_a_token_takes_its_time():
    work = Work("actor.generate", "actor.generate", "generate", SPARSE, Workload(64, 0, 100), Mesh(), devices=(0,))
    plain, slow = (Roofline(NODE, replace(Efficiency.ideal(), slot_s=each)) for each in (0.0, 1e-4))
    assert slow.seconds(work) - plain.seconds(work) == pytest.approx(100 * 64 * 1e-4)


def test_a_cache_that_the_plan_names_holds_no_more_rows():
    work = Work("actor.generate", "actor.generate", "generate", SPARSE, Workload(64, 0, 100), Mesh(), devices=(0,))
    row = 100 * MODEL.kv_bytes_per_token
    own = Roofline(NODE)
    assert own.rows_at_once(work) > 64
    assert own.rows_at_once(replace(work, kv_cache=7.5 * row)) == 7
    assert own.rows_at_once(replace(work, kv_cache=7.5 * row, held=70e9)) == 7
    assert own.rows_at_once(replace(work, most_rows=3)) == 3
    assert own.rows_at_once(replace(work, kv_cache=0.1 * row)) == 1


def test_a_driver_that_recomputes_nothing_is_believed():
    flow = fl.Flow("example")
    model = fl.Model(config={"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64})  # fmt: skip
    silent = flow.worker(fl.Actor, model, name="silent")
    off = flow.worker(fl.Actor, model, gradient_checkpointing=False, name="off")
    on = flow.worker(fl.Actor, model, gradient_checkpointing=True, name="on")

    @flow.program
    def train(steps: int = 1) -> None:
        rows = fl.data.rows([{"prompt": "a", "response": "b"}], batch=1, response="response")
        for _, batch in flow.steps(rows, steps):
            for actor in (silent, off, on):
                actor.update(batch, loss=fl.rl.sft())

    roles = flow.study().roles
    assert [roles[n].recomputes("megatron") for n in ("silent", "off", "on")] == [True, False, True]
    assert [roles[n].assumes_recomputation("megatron") for n in ("silent", "off", "on")] == [True, False, False]
    assert not roles["silent"].recomputes("hf") and roles["on"].recomputes("hf")
