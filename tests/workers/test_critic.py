"""A reward model that scores the text of rows that a policy with another tokenizer wrote, held against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import flowrl as fl
from flowrl import rl
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import DataError, FieldError, ModelError, ProgramError

LETTERS = list("abcdefgh +=0123456789")
POLICY = ["<pad>", *LETTERS, "<end>"]
JUDGE = ["<begin>", "<turn>", "user", "assistant", "system", ":", *reversed(LETTERS), "<empty>"]
TEMPLATE = (
    "<begin>{% for m in messages %}{{ m.role }}:{{ m.content }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = 96


def policy_tokenizer():
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(POLICY)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def judge_tokenizer(template=TEMPLATE):
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(JUDGE)}, unk_token="<empty>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<begin>|<turn>|user|assistant|system|."), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<begin>", eos_token="<turn>", pad_token="<empty>", unk_token="<empty>"
    )
    found.chat_template = template
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model as the hub has them: its weights, its configuration, its tokenizer and the template of that."""
    folder = tmp_path_factory.mktemp("reward")
    save(folder)
    return folder


def save(folder, *, padding=None, template=TEMPLATE, positions=POSITIONS, kind=AutoModelForSequenceClassification):
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": len(JUDGE) - 1 if padding is None else padding}
    config = Qwen2Config(
        vocab_size=len(JUDGE), max_position_embeddings=positions, num_key_value_heads=2, num_labels=1, **SIZES, **ids
    )
    torch.manual_seed(5)
    kind.from_config(config).save_pretrained(folder)
    judge_tokenizer(template).save_pretrained(folder)


@pytest.fixture(scope="module")
def judge(folder):
    return fl.open(fl.RewardModel(str(folder)), name="judge")


def rows(answers=("3", "12+7=19", "abc"), prompts=("1+2=", "12+7=", "a b"), **more):
    """Rows of the policy: each response ends with its end token."""
    tokenizer = policy_tokenizer()
    made = [tokenizer(text + "<end>")["input_ids"] for text in answers]
    known = fl.marks.marks(tokenizer=fl.marks.vocabulary(tokenizer))
    ids = Column.of(made, dim="response", dtype="i32").marked(known)
    text = Column.of(list(prompts), dtype="any")
    return Batch.of([(i, 0) for i in range(len(made))], prompt=text, response_ids=ids, **more)


def by_hand(folder, chats):
    """The logits of transformers' own class, each conversation alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        return [
            float(model(**tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)).logits[0, 0])
            for chat in chats
        ]


def chat(*said, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * len(said)
    return [*first, *({"role": role, "content": text} for role, text in zip(roles, said, strict=False))]


def test_text_is_scored_as_transformers_does(judge, folder):
    found = judge.score_text(rows(), tokenizer=policy_tokenizer())
    wanted = by_hand(folder, [chat("1+2=", "3"), chat("12+7=", "12+7=19"), chat("a b", "abc")])
    assert found.rewards.to_list() == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == 3 and found.fields == ("prompt", "response_ids", "rewards")


def test_a_system_message_and_messages_of_the_data_are_put_before_the_response(judge, folder):
    asked = [chat("1", "2", "3"), chat("4", system="f"), chat("5")]
    messages = rows(messages=Column.of(asked, dtype="any"))
    found = judge.score_text(messages, system="g", tokenizer=policy_tokenizer())
    said = ("3", "12+7=19", "abc")
    wanted = [[*c, {"role": "assistant", "content": a}] for c, a in zip(asked, said, strict=True)]
    with_system = [c if c[0]["role"] == "system" else [*chat(system="g"), *c] for c in wanted]
    assert found.rewards.to_list() == pytest.approx(by_hand(folder, with_system), abs=1e-5)


def test_the_system_message_of_the_source_is_for_the_policy(judge, folder):
    """Whether prompts are text or messages; one that the data have themselves is what the row says."""
    tokenizer = policy_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="

    def scored(prompts, **how):
        source = fl.data.rows(
            [{"prompt": p} for p in prompts], batch=len(prompts), chat=True, system="c", shuffle=False
        )
        batch = source.to_batch(source.cursor().draw(), 0, tokenizer).expand(2)
        answers = rows().response_ids.take([0, 1])
        return judge.score_text(
            batch.with_columns({"response_ids": answers}), tokenizer=tokenizer, **how
        ).rewards.to_list()

    for how in ({}, {"system": "d"}):
        wanted = by_hand(folder, [chat("1+2=", said, **how) for said in ("3", "12+7=19")])
        for prompt in ("1+2=", chat("1+2=")):
            assert scored([prompt], **how) == pytest.approx(wanted, abs=1e-5)
    own = by_hand(folder, [chat("1", said, system="a") for said in ("3", "12+7=19")])
    assert scored([chat("1", system="a")], system="d") == pytest.approx(own, abs=1e-5)


def test_a_chat_of_ask_is_scored_by_its_messages(judge, folder):
    """Not by the text that the template of the model that was asked has made of it."""

    def built():
        tokenizer = policy_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}+{% endfor %}="
        return tokenizer

    config = {"model_type": "qwen2", "vocab_size": len(POLICY), **SIZES, "num_key_value_heads": 2}
    writer = fl.open(fl.Actor(fl.Model(config=config, tokenizer=built), lr=None, max_tokens=3))
    asked = writer.ask(rows(), "a {response}", chat=True, system="c", tokenizer=writer)
    assert asked.fields == ("prompt", "prompt_ids", "messages") and asked.prompt[0] == "c+a 3+="
    assert writer.ask(rows().take([]), "{response}", chat=True, tokenizer=writer).fields == asked.fields
    said = writer.generate(asked.with_call(CallInfo(seed=1)), n=2)
    answers = writer.tokenizer.batch_decode(said.response_ids.to_list(), skip_special_tokens=True)
    texts = [text for text in ("3", "12+7=19", "abc") for _ in range(2)]
    for how in ({}, {"system": "d"}):
        wanted = by_hand(folder, [chat(f"a {t}", a, **how) for t, a in zip(texts, answers, strict=True)])
        assert judge.score_text(said, tokenizer=writer, **how).rewards.to_list() == pytest.approx(wanted, abs=1e-5)


def test_the_conversation_of_an_episode_is_scored_as_it_is(judge, folder):
    told = [chat("1", "2", "3", "4"), chat("a", "b"), chat("0", "1", system="c")]
    turns = Column.of([[0], [0], [0]], dim="response", dtype="i32")
    kept = rows(conversation=Column.of(told, dtype="any"), turn_ids=turns)
    assert judge.score_text(kept).rewards.to_list() == pytest.approx(by_hand(folder, told), abs=1e-5)
    with pytest.raises(FieldError, match="score_text reads episodes") as lost:
        judge.score_text(kept.drop("conversation"), tokenizer=policy_tokenizer())
    assert "messages=True" in lost.value.fix


def test_plain_text_gets_what_the_tokenizer_puts_around_it(judge, folder):
    found = judge.score_text(rows(), chat=False, tokenizer=policy_tokenizer())
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        wanted = [
            float(model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, 0])
            for text in ("1+2=3", "12+7=12+7=19", "a babc")
        ]
    assert found.rewards.to_list() == pytest.approx(wanted, abs=1e-5)


def test_a_template_that_ends_with_padding_is_scored_before_it(tmp_path):
    """As transformers does: at the last token that is not the padding token of the configuration."""
    save(tmp_path, padding=JUDGE.index("<turn>"))
    judge = fl.open(fl.RewardModel(str(tmp_path)))
    found = judge.score_text(rows(), tokenizer=policy_tokenizer()).rewards.to_list()
    wanted = by_hand(tmp_path, [chat("1+2=", "3"), chat("12+7=", "12+7=19"), chat("a b", "abc")])
    assert found == pytest.approx(wanted, abs=1e-5)


def test_the_template_may_be_given_arguments(tmp_path):
    save(tmp_path, template=TEMPLATE + "{{ '=' if thinks }}")
    judge = fl.open(fl.RewardModel(str(tmp_path)))
    how = {"tokenizer": policy_tokenizer()}
    plain, other = (judge.score_text(rows(), chat_template_kwargs={"thinks": t}, **how).rewards for t in (False, True))
    assert plain.equal(judge.score_text(rows(), **how).rewards) and not plain.equal(other)


def test_no_rows_have_no_rewards(judge):
    found = judge.score_text(rows().take([]), tokenizer=policy_tokenizer())
    assert len(found) == 0 and "rewards" in found.fields


def test_a_row_that_is_too_long_is_named_and_not_cut(judge):
    long = rows(answers=("3", "1" * POSITIONS, "abc"))
    with pytest.raises(DataError, match=rf"The text of row \(1, 0\) has \d+ tokens .* the model has {POSITIONS} pos"):
        judge.score_text(long, tokenizer=policy_tokenizer())
    # <begin> user : a <turn> assistant : and, behind the answer, <turn> are 8 tokens
    edge = rows(answers=("1" * (POSITIONS - 8),), prompts=("a",))
    assert len(judge.score_text(edge, tokenizer=policy_tokenizer())) == 1
    with pytest.raises(DataError, match=f"has {POSITIONS + 1} tokens"):
        judge.score_text(rows(answers=("1" * (POSITIONS - 7),), prompts=("a",)), tokenizer=policy_tokenizer())


@pytest.mark.parametrize(
    ("how", "error", "what", "fix"),
    [
        ({"chat": False, "system": "x"}, ProgramError, "system= is for chats", "Leave out one"),
        (
            {"tokenizer": judge_tokenizer},
            ModelError,
            "reads 'response_ids', whose ids another tokenizer made",
            "tokeni",
        ),
        ({"chat": False, "chat_template_kwargs": {"x": 1}}, ProgramError, "kwargs= is for chats", "Leave out one"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            ProgramError,
            "score_text: chat_template_kwargs has",
            "Leave it",
        ),
        ({"chat_template_kwargs": {"thinks": True}}, ModelError, "reads no 'thinks'", "never read"),
        ({"chat": "yes"}, ProgramError, "chat='yes'", ""),
        ({"system": 3}, ProgramError, "system=3", ""),
    ],
)
def test_calls_that_cannot_be_are_refused(judge, how, error, what, fix):
    with pytest.raises(error) as caught:
        judge.score_text(rows(), **{"tokenizer": policy_tokenizer(), **how})
    assert what in caught.value.what and fix in (caught.value.fix or "")


def test_messages_that_have_their_answer_are_no_prompt(judge):
    whole = rows(messages=Column.of([chat("1"), chat("1", "2"), chat("3")], dtype="any"))
    with pytest.raises(DataError, match="end with an answer already") as caught:
        judge.score_text(whole, tokenizer=policy_tokenizer())
    assert "(1, 0)" in caught.value.report() and 'batch.drop("messages")' in caught.value.report()


def test_a_model_without_a_template_says_so(tmp_path):
    save(tmp_path, template=None)
    judge = fl.open(fl.RewardModel(str(tmp_path)), name="judge")
    with pytest.raises(ModelError, match="judge.score_text reads chats, and the tokenizer of this model has no chat"):
        judge.score_text(rows(), tokenizer=policy_tokenizer())
    assert len(judge.score_text(rows(), chat=False, tokenizer=policy_tokenizer())) == 3


# -- a model without the head -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """A language model, which has no scalar head."""
    folder = tmp_path_factory.mktemp("language")
    save(folder, kind=AutoModelForCausalLM)
    return str(folder)


@pytest.mark.parametrize("ask", ["score", "score_text", "values"])
def test_a_frozen_model_gives_no_numbers_of_a_head_that_nothing_has_trained(headless, judge, ask):
    kind = fl.Critic if ask == "values" else fl.RewardModel
    made = rows()
    ids = made.response_ids.to_list()
    mask = Column.of([[True] * (len(row) - 1) for row in ids], dim="response", dtype="bool")
    made = made.with_columns({"tokens": Column.of(ids, dim="token", dtype="i32"), "response_mask": mask})
    how = {"tokenizer": policy_tokenizer()} if ask == "score_text" else {}
    frozen = fl.open(kind(headless, lr=None))
    with pytest.raises(ModelError) as error:
        getattr(frozen, ask)(made, **how)
    assert error.value.what.startswith(f"'{headless}' holds no score.weight, the head that gives numbers")
    assert error.value.have == "lm_head.weight" and "give lr= to train one" in error.value.fix
    assert len(getattr(fl.open(kind(headless, lr=1e-5)), ask)(made, **how)) == 3, "one that is trained begins with it"
    frozen.follow(judge)
    found, wanted = (getattr(worker, ask)(made, **how) for worker in (frozen, fl.open(kind(judge.model, lr=None))))
    field = "values" if ask == "values" else "rewards"
    assert found[field].equal(wanted[field]), "one that follows another has the head of that"


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_flow_does_not_open_such_a_model_unless_it_may_follow_another(headless, folder, tmp_path, runtime):
    def run(*, handle=False, follows=False):
        flow = flow_of(headless, handle=handle, follows=str(folder) if follows else None)
        return flow.run(out=tmp_path / f"{handle}{follows}", runtime=runtime, quiet=True, save_models=False).out

    with pytest.raises(ModelError, match="holds no score.weight") as opened:
        run()
    assert "flow.worker(fl.RewardModel" in opened.value.at.text
    with pytest.raises(ModelError, match="holds no score.weight") as called:
        run(handle=True)
    assert "getattr(judge, op)" in called.value.at.text, "it might have followed the actor"
    assert len(numbers(run(follows=True))) == 2


# -- in a program ------------------------------------------------------------------------------------------------------


def flow_of(folder, *, op="score_text", handle=False, follows=None):
    ids = {"eos_token_id": len(POLICY) - 1, "pad_token_id": 0, "bos_token_id": None}
    config = {"model_type": "qwen2", "vocab_size": len(POLICY), **SIZES, "num_key_value_heads": 2, **ids}
    flow = fl.Flow("x")
    actor = flow.worker(fl.Actor, fl.Model(config=config, tokenizer=policy_tokenizer), max_tokens=4, name="actor")
    judge = flow.worker(fl.RewardModel, str(folder), name="judge")
    trained = None if follows is None else flow.worker(fl.RewardModel, follows, lr=1e-5, name="trained")
    prompts = fl.data.rows([{"prompt": f"{a}+1="} for a in range(8)], batch=4)

    @flow.program
    def x(steps: int = 2):
        for step, batch in flow.steps(prompts, steps):
            if trained is not None:
                judge.follow(trained)
            batch = actor.generate(batch, n=2)
            batch = getattr(judge, op)(batch, **({"tokenizer": actor} if handle else {}))
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())

    return flow


def numbers(out):
    return [json.loads(line)["reward"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_learns_from_a_model_of_another_tokenizer(folder, tmp_path):
    found = {}
    for runtime in ("eager", "local"):
        flow = flow_of(folder, handle=runtime == "local")
        assert flow.check().text() == "x: fine"
        out = flow.run(out=tmp_path / runtime, runtime=runtime, quiet=True, save_models=False).out
        found[runtime] = numbers(out)
    assert found["eager"] == found["local"] and len(found["eager"]) == 2


def test_the_ids_of_another_tokenizer_are_refused_with_the_op_that_reads_text(folder, tmp_path, judge):
    with pytest.raises(ModelError) as by_hand:
        made = rows()
        judge.score(made.with_columns({"tokens": made.response_ids}))
    assert "Write judge.score_text(batch), which reads the text of the rows" in by_hand.value.fix
    flow = flow_of(folder, op="score")
    with pytest.raises(ModelError, match="judge.score reads 'tokens', whose ids another tokenizer made") as opened:
        flow.run(out=tmp_path / "run", quiet=True)
    assert "Write judge.score_text(batch)" in opened.value.fix and opened.value.at is not None


def test_the_trace_knows_what_is_read():
    """Messages of the data where its prompts are such; a call that cannot be is an error with its line."""

    def flow_of_data(prompt, **how):
        flow = fl.Flow("x")
        actor = flow.worker(fl.Actor, "a/model", name="actor")
        judge = flow.worker(fl.RewardModel, "a/judge", name="judge")
        prompts = fl.data.rows([{"prompt": prompt}], batch=1, chat=True)

        @flow.program
        def x(steps: int = 2):
            for step, batch in flow.steps(prompts, steps):
                flow.log(step, reward=judge.score_text(actor.generate(batch), **how).rewards.mean())

        return flow

    for prompt, reads in (("1+2=", {"prompt", "response_ids"}), (chat("1+2="), {"messages", "response_ids"})):
        [node] = [n for n in flow_of_data(prompt).graph().nodes if n.id == "judge.score_text"]
        assert set(node.reads) == reads
    [error] = flow_of_data("1", chat=False, system="x").check().errors
    assert "system= is for chats" in error.what and error.at.text.startswith("flow.log(step, reward=judge.score_text")
