"""Columns know where they come from: marks stay with rows, and what they forbid is refused in the trace and for real."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import rl
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import CheckError, FieldError, ModelError, ProgramError
from flowrl.marks import marks, saved_vocabulary, spelled, unlike, values, vocabulary

WORDS = ["<pad>", *"abcdefgh", ";"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def tokenizer_of(words):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token=";")


def plain():
    return tokenizer_of(WORDS)


def same_again():
    return tokenizer_of(WORDS)


def permuted():
    return tokenizer_of([WORDS[0], *reversed(WORDS[1:-1]), WORDS[-1]])


def smaller():
    return tokenizer_of([*WORDS[:5], ";"])


def model(tokenizer=plain):
    ids = {"eos_token_id": len(tokenizer()) - 1, "pad_token_id": 0, "bos_token_id": None}
    config = {"model_type": "qwen2", "vocab_size": len(tokenizer()), **SIZES, "num_hidden_layers": 2, **ids}
    return fl.Model(config={**config, "max_position_embeddings": 64}, tokenizer=tokenizer)


def reward(response: str) -> float:
    return float("a" in response)


prompts = fl.data.rows([{"prompt": w} for w in ("ab", "ba", "cc", "db")], batch=4, repeat=True)


def advantaged(batch):
    ones = batch.response_mask.with_values(torch.ones(len(batch.response_mask.values)))
    return batch.with_columns({"advantages": ones})


def rows(actor, n=2, **how):
    batch = prompts.to_batch(prompts.cursor().draw(), 0, actor.tokenizer).with_call(CallInfo(seed=5))
    return advantaged(actor.generate(batch, n=n, **how))


@pytest.fixture(scope="module")
def actor():
    return fl.open(fl.Actor(model(), max_tokens=4))


# -- marks stay with rows -------------------------------------------------------------------------------------------


def test_rows_know_their_tokenizer_sampler_and_temperature(actor):
    made = rows(actor, temperature=0.6)
    who, which = actor.identity(), vocabulary(actor.tokenizer)
    assert made.prompt_ids.marks == marks(tokenizer=which)
    assert made.tokens.marks == made.response_ids.marks == marks(tokenizer=which, sampler=who, temperature="0.6")
    engine, trainer = ({"by": f"{who}.{op}", "dtype": "f32"} for op in ("generate", "logprobs"))
    assert made.rollout_logprobs.marks == marks(scale="row", temperature="0.6", **engine)
    assert made.sampling_logprobs.marks == made.rollout_logprobs.marks
    assert values(rows(actor, top_p=0.5).sampling_logprobs.marks, "cut") == {"top_p=0.5"}
    assert values(rows(actor, greedy=True, top_p=0.5).sampling_logprobs.marks, "cut") == {"greedy"}
    assert actor.logprobs(made).old_logprobs.marks == marks(scale="row", temperature="0.6", **trainer)
    assert actor.logprobs(made, temperature=1.0).old_logprobs.marks == marks(scale="1", **trainer)


def test_a_column_says_of_which_kind_its_log_probabilities_are(actor):
    made, who = rows(actor, temperature=0.6, top_k=3, top_p=0.9), actor.identity()
    assert made.rollout_logprobs.kind == f"by {who}.generate, at temperature 0.6, computed in f32"
    assert made.sampling_logprobs.kind == (
        f"by {who}.generate, at temperature 0.6, cut by top_p=0.9, top_k=3, computed in f32"
    )
    assert actor.logprobs(made).old_logprobs.kind == f"by {who}.logprobs, at temperature 0.6, computed in f32"
    assert made.response_ids.kind == made.versions.kind == ""


def test_marks_stay_while_rows_are_taken_written_down_and_sent(actor):
    made = rows(actor)
    tensors, meta = made.tensors(), json.loads(json.dumps(made.meta()))
    kept = [
        made.take([3, 1]),
        made.filter([True] * 3 + [False] * 5),
        made.split(3)[1],
        made.expand(2),
        made.rename(rollout_logprobs="before").rename(before="rollout_logprobs"),
        made.to("cpu"),
        Batch.from_record(json.loads(json.dumps(made.to_record()))),
        Batch.from_tensors(tensors, meta),
        copy.deepcopy(made),  # as it is sent
        made.filter([False] * 8),
    ]
    for other in kept:
        assert {n: other[n].marks for n in other.fields} == {n: made[n].marks for n in made.fields}


def test_rows_put_together_have_the_marks_of_all():
    a = Column.of([1.0], dtype="f32").marked(marks(sampler="a"))
    b = Column.of([2.0], dtype="f32").marked(marks(sampler="b"))
    whole = Batch.of([0], x=a).concat(Batch.of([1], x=b))
    assert values(whole.x.marks, "sampler") == {"a", "b"}


def test_what_is_computed_of_a_column_has_no_marks():
    made = Column.of([1.0], dtype="f32").marked(marks(sampler="a"))
    assert not (made * 2).marks and not made.with_values(made.values).marks and not (-made).marks


def test_a_record_without_marks_is_read():
    assert Column.from_record({"values": ["a"]}).marks == frozenset()


def test_numbers_are_told_to_six_digits_and_symbols_are_not_known():
    assert (spelled(0.6), spelled(1), spelled(1.0)) == ("0.6", "1", "1")
    assert spelled(object()).startswith("?")


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_log_probabilities_of_other_temperatures_are_not_compared(actor):
    made = rows(actor, temperature=0.6)
    ref = fl.open(fl.Reference(of=actor), name="ref")
    cold = ref.logprobs(made, temperature=1.0)
    said = "compares log-probabilities of different kinds: 'rollout_logprobs' at temperature 0.6, "
    with pytest.raises(FieldError, match=f"with loss ppo_clip {said}'ref_logprobs' at temperature 1"):
        actor.update(cold, loss=rl.ppo_clip(kl=0.1))
    with pytest.raises(FieldError, match=f"rl.kl_penalty {said}"):
        rl.kl_penalty(cold, coef=0.1)
    with pytest.raises(FieldError, match="a subtraction compares"):
        cold.rollout_logprobs - cold.ref_logprobs
    with pytest.raises(FieldError, match="its own at temperature 1"):
        actor.update(made, loss=rl.ppo_clip(), temperature=1.0)
    with pytest.raises(ProgramError, match=r"reinforce is trained at temperature 1, and the rows were sampled at 0.6"):
        actor.update(made, loss=rl.reinforce(), temperature=1.0, allow_stale=True)


def test_what_is_alike_is_compared(actor):
    ref = fl.open(fl.Reference(of=actor), name="ref")
    hot, plain_ = rows(actor, temperature=0.6), rows(actor)
    for batch in (ref.logprobs(hot), ref.logprobs(hot, temperature=0.6), ref.logprobs(plain_, temperature=1.0)):
        actor.update(batch, loss=rl.ppo_clip(kl=0.1), lr=0.0)
        assert len(batch.rollout_logprobs - batch.ref_logprobs)
    actor.update(hot, loss=rl.sft(), temperature=1.0, lr=0.0)
    actor.update(hot, loss=rl.reinforce(), temperature=1.0, foreign=True, allow_stale=True, lr=0.0)


def test_cut_distributions_are_not_compared_with_whole_ones(actor):
    made = rows(actor, top_p=0.5)
    with pytest.raises(FieldError, match="cut by"):
        made.sampling_logprobs - made.rollout_logprobs


CUTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.0, 1.0000001, 2]),
        "top_k": st.sampled_from([0, 2, 3]),
        "top_p": st.sampled_from([0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
    }
)


def told(how):
    """The settings of a call, those apart that change nothing; a temperature counts to six digits."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return f"{how['temperature']:.6g}", {name: how[name] for name, plain_ in off.items() if how[name] != plain_}


def errors_of(compare):
    """What check says of a program that compares columns of its rows."""
    flow = fl.Flow("mine")
    student = flow.worker(fl.Actor, model=model(), name="student")

    @flow.program
    def mine(steps: int = 1) -> None:
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, gap=compare(student, batch).mean())

    return whats(flow)


def refused(call):
    try:
        call()
    except FieldError as error:
        return error.what
    return ""


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=CUTS, other=CUTS)
def test_log_probabilities_are_compared_exactly_where_their_kinds_are_equal(actor, one, other):
    """Sampled for real and in the trace: of the distribution sampled from, and of the whole vocabulary."""
    alike, tempered = told(one) == told(other), told(one)[0] == told(other)[0]
    a, b = (rows(actor, n=1, max_tokens=1, **how) for how in (one, other))
    assert bool(refused(lambda: a.sampling_logprobs - b.sampling_logprobs)) is not alike
    assert bool(refused(lambda: a.rollout_logprobs - b.rollout_logprobs)) is not tempered
    assert bool(refused(lambda: a.sampling_logprobs - a.rollout_logprobs)) is bool(told(one)[1])

    for of, same in (("sampling_logprobs", alike), ("rollout_logprobs", tempered)):
        errors = errors_of(lambda s, b, of=of: s.generate(b, n=1, **one)[of] - s.generate(b, n=1, **other)[of])
        assert (errors == []) is same


def test_sums_negatives_and_masks_keep_the_kind(actor):
    """A ratio of whole responses is one of log-probabilities too, and so is a sum with a negative."""
    made = rows(actor, top_p=0.5)
    whole, cut, mask = made.rollout_logprobs, made.sampling_logprobs, made.response_mask
    for one, other in ((whole, cut), (whole.row_sum(), cut.row_sum()), (whole * mask, cut), (mask * whole, mask * cut)):
        assert one.kind == whole.kind and "cut by top_p=0.5" in other.kind
        with pytest.raises(FieldError, match="a subtraction compares"):
            one - other
        with pytest.raises(FieldError, match="an addition compares"):
            one + -other
        assert len(one - one) == len(one) and (one - one).kind == ""
    assert (whole * 2).kind == (whole - whole).kind == (made.versions * mask).kind == ""


def test_check_keeps_the_kind_of_sums_negatives_and_masks():
    def found(compare):
        return errors_of(lambda student, batch: compare(student.generate(batch, n=2, top_p=0.5)))

    [said] = found(lambda b: b.rollout_logprobs.row_sum() - b.sampling_logprobs.row_sum())
    assert (
        "'rollout_logprobs.row_sum()' at temperature 1, 'sampling_logprobs.row_sum()' at temperature 1, cut by" in said
    )
    assert len(found(lambda b: b.rollout_logprobs + -b.sampling_logprobs)) == 1
    assert len(found(lambda b: b.response_mask * b.rollout_logprobs - b.sampling_logprobs)) == 1
    assert found(lambda b: b.sampling_logprobs.row_sum() - b.sampling_logprobs.row_mean()) == []
    assert found(lambda b: b.rollout_logprobs * 2.0 - b.sampling_logprobs) == []


def test_all_columns_that_are_read_are_compared_with_each_other():
    one, other, unknown = marks(scale="1"), marks(scale="0.5"), marks(scale="row", temperature="?step")
    said = unlike("x", {"a": unknown, "b": one, "c": other})
    assert said is not None and "'b' at temperature 1, 'c' at temperature 0.5" in said.what
    assert unlike("x", {"a": unknown, "b": one, "c": one}) is None
    cut = unlike("x", {"a": unknown | marks(cut="top_p=0.9"), "b": one})
    assert cut is not None and "'a' at the temperature of each row, cut by top_p=0.9" in cut.what


def test_what_is_not_known_is_not_refused():
    unknown, said = marks(scale="row", temperature="?step"), marks(scale="1")
    assert unlike("x", {"a": unknown, "b": said}) is None
    assert unlike("x", {"a": marks(scale="row"), "b": said}) is None


# -- rows of another worker -----------------------------------------------------------------------------------------


def test_rows_of_another_worker_are_trained_on_where_that_is_meant(actor):
    other = fl.open(fl.Actor(model(), max_tokens=4, seed=3))
    made = rows(other)
    with pytest.raises(ProgramError, match=rf"sampled by {other.identity()}".replace("(", r"\(").replace(")", r"\)")):
        actor.update(made, loss=rl.ppo_clip())
    mixed = rows(actor).concat(Batch([(k[0] + 9, *k[1:]) for k in made.keys], dict(made.columns)))
    with pytest.raises(ProgramError, match="is one of the policy that sampled"):
        actor.update(mixed, loss=rl.ppo_clip())
    actor.update(made, loss=rl.ppo_clip(), foreign=True, lr=0.0)
    actor.update(made, loss=rl.sft(), lr=0.0)
    other.update(made, loss=rl.ppo_clip(), lr=0.0)


def test_workers_of_one_name_are_one_to_their_rows():
    one, two = (fl.open(fl.Actor(model(), max_tokens=4), name="student") for _ in range(2))
    two.update(rows(one), loss=rl.ppo_clip(), lr=0.0)


# -- tokenizers -----------------------------------------------------------------------------------------------------


def test_a_vocabulary_is_known_by_its_tokens(tmp_path):
    assert vocabulary(plain()) == vocabulary(same_again()) != vocabulary(permuted())
    plain().save_pretrained(tmp_path)
    assert saved_vocabulary(str(tmp_path)) == vocabulary(plain())
    assert saved_vocabulary(str(tmp_path / "nothing")) == "" == vocabulary(object())


def test_names_of_the_hub_are_compared_where_their_files_are_here(tmp_path, monkeypatch):
    """Two models of the local cache with other tokenizers are refused by check; without a network, and if that is sure."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name, tokenizer in (("some--policy", plain), ("some--teacher", permuted), ("some--twin", same_again)):
        folder = tmp_path / f"models--{name}"
        tokenizer().save_pretrained(folder / "snapshots" / "aaa")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("aaa")

    def errors(teacher):
        flow = fl.Flow("distilled")
        actor = flow.worker(fl.Actor, "some/policy", name="actor")
        ref = flow.worker(fl.Reference, teacher, name="ref")

        @flow.program
        def train(steps: int = 2) -> None:
            for step, batch in flow.steps(fl.data.rows([{"prompt": "a"}], batch=1), steps):
                batch = ref.logprobs(actor.generate(batch))
                flow.log(step, kl=(batch.rollout_logprobs - batch.ref_logprobs).mean())

        return [str(error) for error in flow.check("train").errors]

    [said] = errors("some/teacher")
    assert "ref.logprobs reads 'tokens', whose ids another tokenizer made: some/policy made them" in said
    assert errors("some/twin") == errors("some/unknown") == []
    (tmp_path / "models--some--teacher" / "refs" / "main").write_text("bbb")
    assert errors("some/teacher") == [], "another snapshot may have been published since"


@pytest.mark.parametrize("other", [permuted, smaller])
def test_ids_of_another_tokenizer_are_not_read(actor, other):
    made = rows(actor)
    for worker, read in (
        (fl.Reference(model(other)), lambda w: w.logprobs(made)),
        (fl.RewardModel(model(other)), lambda w: w.score(made)),
        (fl.Critic(model(other)), lambda w: w.values(made)),
        (fl.Actor(model(other)), lambda w: w.generate(made.select("prompt_ids"))),
        (fl.FunctionReward(reward, tokenizer=other), lambda w: w.score(made)),
    ):
        with pytest.raises(ModelError, match="whose ids another tokenizer made"):
            read(fl.open(worker, name="other"))


def test_the_same_tokenizer_under_another_name_reads_them(actor):
    made = rows(actor)
    assert "ref_logprobs" in fl.open(fl.Reference(model(same_again))).logprobs(made)
    assert len(fl.open(fl.FunctionReward(reward, tokenizer=same_again)).score(made))


# -- in a program ---------------------------------------------------------------------------------------------------


def flow_of(*, teacher=None, body):
    flow = fl.Flow("mine")
    student = flow.worker(fl.Actor, model=model(), max_tokens=4, name="student")
    other = flow.worker(*teacher[:1], **teacher[1], name="teacher") if teacher else None

    def mine(steps: int = 1):
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, body(student, other, batch))

    flow.program(mine)
    return flow


def whats(flow):
    return [e.report() for e in flow.check().errors]


def trained(student, batch, **how):
    return student.update(
        rl.group_advantages(batch.with_columns({"rewards": batch.response_ids.lengths_column() / 4})), **how
    )


ANOTHER = (fl.Actor, {"model": model(), "max_tokens": 4, "seed": 2})


def test_check_refuses_rows_of_another_worker():
    foreign = flow_of(teacher=ANOTHER, body=lambda s, t, b: trained(s, t.generate(b, n=2), loss=rl.ppo_clip()))
    [said] = whats(foreign)
    assert said.startswith(
        "ProgramError: student.update: loss ppo_clip is one of the policy that sampled the rows, and these were sampled "
        "by teacher."
    )
    assert "write foreign=True if they are meant" in said and "test_marks.py" in said


@pytest.mark.parametrize("how", [{"loss": rl.ppo_clip(), "foreign": True}, {"loss": rl.sft()}])
def test_rows_that_are_meant_show_on_the_graph(how):
    meant = flow_of(teacher=ANOTHER, body=lambda s, t, b: trained(s, t.generate(b, n=2), **how))
    assert whats(meant) == []
    [node] = [n for n in meant.graph().nodes if n.id == "student.update"]
    assert node.loss.endswith("on rows of teacher")


def test_check_refuses_log_probabilities_of_other_temperatures():
    frozen = (fl.Reference, {"model": model()})

    def body(student, teacher, batch):
        batch = student.generate(batch, n=2, temperature=0.6)
        return trained(student, teacher.logprobs(batch, temperature=1.0), loss=rl.ppo_clip(kl=0.1))

    [said] = whats(flow_of(teacher=frozen, body=body))
    assert "'rollout_logprobs' at temperature 0.6, 'ref_logprobs' at temperature 1" in said
    assert "Leave out temperature=" in said


def test_a_temperature_that_the_trace_does_not_know_is_held_to_when_it_runs(tmp_path):
    frozen = (fl.Reference, {"model": model()})

    def body(student, teacher, batch):
        hot = 0.5 + batch.count() * 0.1
        batch = student.generate(batch, n=2, temperature=hot)
        return trained(student, teacher.logprobs(batch, temperature=1.0), loss=rl.ppo_clip(kl=0.1))

    flow = flow_of(teacher=frozen, body=body)
    assert whats(flow) == []
    with pytest.raises(FieldError, match="'rollout_logprobs' at temperature 0.9, 'ref_logprobs' at temperature 1"):
        flow.run("mine", out=tmp_path / "run", quiet=True)


def test_another_tokenizer_is_refused_when_models_open(tmp_path):
    for other, good in ((permuted, False), (same_again, True)):
        frozen = (fl.Reference, {"model": model(other)})
        flow = flow_of(
            teacher=frozen,
            body=lambda s, t, b: trained(s, t.logprobs(s.generate(b, n=2)), loss=rl.ppo_clip(kl=0.1)),
        )
        assert whats(flow) == []  # nobody knows before they are loaded
        out = tmp_path / other.__name__
        if good:
            flow.run("mine", out=out, quiet=True)
            continue
        with pytest.raises(
            ModelError, match="teacher.logprobs reads 'tokens', whose ids another tokenizer made"
        ) as said:
            flow.run("mine", out=out, quiet=True)
        assert said.value.at is not None and Path(said.value.at.file).name == "test_marks.py"
        assert not (out / "metrics.jsonl").read_text()


def test_another_tokenizer_is_refused_by_check_where_files_tell(tmp_path):
    for name, made in (("one", plain()), ("copy", plain()), ("other", permuted())):
        made.save_pretrained(tmp_path / name)

    def flow(name):
        config = model().config
        flow = fl.Flow("mine")
        first = fl.Model(config=config, tokenizer=str(tmp_path / "one"))
        student = flow.worker(fl.Actor, model=first, max_tokens=4, name="student")
        judge = flow.worker(fl.RewardModel, model=fl.Model(config=config, tokenizer=str(tmp_path / name)), name="judge")

        def mine(steps: int = 1):
            for step, batch in flow.steps(prompts, steps):
                flow.log(step, reward=judge.score(student.generate(batch)).rewards.mean())

        flow.program(mine)
        return flow

    assert whats(flow("copy")) == []
    [said] = whats(flow("other"))
    assert "judge.score reads 'tokens', whose ids another tokenizer made" in said
    assert "fix  Write judge.score_text(batch), which reads the text of the rows in its own tokens." in said
    with pytest.raises(CheckError):
        flow("other").run("mine", out=tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "other")
