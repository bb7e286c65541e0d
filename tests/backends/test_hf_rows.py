"""Updates whose loss is per row, compares rows of a prompt, or is on scores; rows trained along; averaged weights."""

import pytest
import tiny as T
import torch

import flowrl as fl
from flowrl import rl
from flowrl.backends.hf.update_passes import Data, parts_of
from flowrl.backends.team import Team
from flowrl.backends.update_rows import Table
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import ModelError, ProgramError
from flowrl.workers.model_options import Lora


def mini_batches(batch, rows, tokens, epoch, *, together=False):
    table = Table.of(Team(), batch, rl.sft())
    return [table.local(part) for part in table.mini_batches(rows, tokens, epoch, together=together)]


def trained(**build):
    return T.engine(**{"optim": T.OPTIM, **build})


def pairs(prompts=5, seed=0):
    """A better and a worse response to each prompt, of uneven lengths; some tokens are not trained."""
    chance = torch.Generator().manual_seed(seed)

    def draw(low, high):
        count = int(torch.randint(low, high, (), generator=chance))
        return torch.randint(2, T.VOCAB, (count,), generator=chance).tolist()

    keys, tokens, masks, references = [], [], [], []
    for uid in range(prompts):
        prompt = draw(2, 7)
        for sample in (0, 1):
            response = draw(2, 9)
            keys.append((uid, sample))
            tokens.append(prompt + response)
            masks.append([i % 4 != 3 for i in range(len(response))])
            references.append([-1.0 - 0.1 * i for i in range(len(response))])
    return Batch.of(
        keys,
        tokens=Column.of(tokens, dim="token", dtype="i32"),
        response_mask=Column.of(masks, dim="response", dtype="bool"),
        ref_logprobs=Column.of(references, dim="response", dtype="f32"),
        preferred=Column.of([sample == 0 for _, sample in keys], dtype="bool"),
    ).with_call(CallInfo(seed=1))


def gradient(opened, batch, loss, micro_tokens=10**6, rows=None):
    chosen = torch.arange(len(batch)) if rows is None else rows
    report = opened.trainer.gradient(Data(opened.net, batch, loss), chosen, micro_tokens)
    found = {n: w.grad.clone() for n, w in opened.trainer.named.items()}
    opened.trainer.adamw.zero_grad(set_to_none=True)
    return float(report.loss), found, report


def same(left, right, tolerance=1e-5):
    assert left[0] == pytest.approx(right[0], abs=tolerance)
    scale = max(float(g.abs().max()) for g in right[1].values())
    for name in right[1]:
        assert torch.allclose(left[1][name], right[1][name], atol=tolerance * max(scale, 1)), name


def row_logprobs(model, batch):
    """The sum of log-probabilities of each row's trained tokens, with gradient, by the model's own forward."""
    found = []
    for i in range(len(batch)):
        row = batch.take([i])
        ids, mask = row.tokens.to_list()[0], row.response_mask.values
        first = len(ids) - len(mask)
        every = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1].log_softmax(-1)
        found.append((every.gather(-1, torch.tensor(ids[first:])[:, None]).squeeze(-1) * mask).sum())
    return torch.stack(found)


# -- losses that compare rows ------------------------------------------------------------------------------------------


def test_dpo_is_plain_autograd_over_pairs():
    opened, batch = trained(), pairs()
    reference = torch.stack([(c.take([0]).values * m.take([0]).values).sum() for c, m in _rows(batch)])
    policy = row_logprobs(opened.net.model, batch)
    ratio = policy - reference
    wanted = -torch.nn.functional.logsigmoid(0.3 * (ratio[0::2] - ratio[1::2])).mean()
    wanted.backward()
    plain = {n: w.grad.clone() for n, w in opened.trainer.named.items()}
    opened.trainer.adamw.zero_grad(set_to_none=True)
    same(gradient(opened, batch, rl.dpo(beta=0.3)), (wanted.item(), plain), 1e-4)


def _rows(batch):
    parts = [batch.take([i]) for i in range(len(batch))]
    return [(p.ref_logprobs, p.response_mask) for p in parts]


@pytest.mark.parametrize("loss", [rl.dpo(), rl.ipo(), rl.orpo(), rl.kto()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("micro_tokens", [1, 24, 60])
def test_neither_micro_batches_nor_the_order_of_rows_change_the_gradient(loss, micro_tokens):
    opened, batch = trained(), pairs()
    whole = gradient(opened, batch, loss)
    same(gradient(opened, batch, loss, micro_tokens), whole)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3)).tolist()
    same(gradient(opened, batch.take(order), loss, micro_tokens), whole)


def test_rows_of_a_prompt_share_a_mini_batch():
    batch = pairs(7)
    for epoch in range(3):
        parts = list(mini_batches(batch, 4, None, epoch, together=True))
        assert sorted(i for part in parts for i in part.tolist()) == list(range(14))
        for part in parts:
            assert len(part) <= 4
            uids = [batch.keys[i][0] for i in part.tolist()]
            assert all(uids.count(uid) == 2 for uid in uids)
    assert [p.tolist() for p in mini_batches(batch, 1, None, 0, together=True)] != [], "a pair is never divided"
    assert all(len(p) == 2 for p in mini_batches(batch, 1, None, 0, together=True))


def test_their_order_is_that_of_the_keys_alone():
    batch = pairs(6)
    order = [7, 2, 11, 0, 5, 9, 1, 4, 10, 3, 8, 6]
    shuffled = batch.take(order)
    parts = [[batch.keys[i] for i in p.tolist()] for p in mini_batches(batch, 4, None, 1, together=True)]
    assert parts == [[shuffled.keys[i] for i in p.tolist()] for p in mini_batches(shuffled, 4, None, 1, together=True)]


def test_parts_keep_groups_and_the_budget():
    lengths, group = torch.tensor([5, 9, 2, 2, 7, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
    for together in (True, False):
        parts = parts_of(group, lengths, torch.arange(6), 14, together=together)
        assert sorted(i for p in parts for i in p.tolist()) == list(range(6))
        for part in parts:
            fits = len(part) * int(lengths[part].max()) <= 14
            assert fits or len({int(group[i]) for i in part}) == 1
    assert parts_of(group, lengths, torch.arange(0), 14, together=True) == []


def test_a_torn_pair_is_an_error():
    opened, batch = trained(), pairs()
    with pytest.raises(ProgramError, match="preferred"):
        opened.update(batch.take([0, 1, 2]), rl.dpo())


def test_reports_of_rows_are_means_over_rows():
    opened, batch = trained(), pairs()
    told = opened.update(batch, rl.dpo(), minibatch=4)
    assert told["steps"] == 3 and told["rows"] == 10
    assert 0 <= told["reward_accuracy"] <= 1


# -- reward models -----------------------------------------------------------------------------------------------------


def test_bradley_terry_is_plain_autograd_over_scores():
    opened, batch = trained(head="scalar"), pairs()
    net, scores = opened.net, []
    for ids in batch.tokens.to_list():
        scores.append(net.values(net.hidden(torch.tensor([ids]))[0, -1:])[0])
    scores = torch.stack(scores)
    wanted = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()
    wanted.backward()
    plain = {n: w.grad.clone() if w.grad is not None else torch.zeros_like(w) for n, w in opened.trainer.named.items()}
    opened.trainer.adamw.zero_grad(set_to_none=True)
    for micro_tokens in (1, 30, 10**6):
        same(gradient(opened, batch, rl.bradley_terry(), micro_tokens), (wanted.item(), plain))


def test_a_reward_model_learns_which_is_better():
    model = fl.Model(config=T.CONFIGS["qwen2"])
    judge = fl.open(fl.RewardModel(model, lr=3e-3))
    batch = pairs(8)
    before = judge.update(batch, loss=rl.bradley_terry())
    for _ in range(30):
        after = judge.update(batch, loss=rl.bradley_terry())
    assert after["loss"] < 0.3 * before["loss"] and after["accuracy"] == 1.0
    scored = judge.score(batch.drop("ref_logprobs"))
    assert scored.rewards.values[0::2].min() > scored.rewards.values[1::2].min()


def test_a_frozen_reward_model_cannot_be_trained():
    judge = fl.open(fl.RewardModel(fl.Model(config=T.CONFIGS["qwen2"])))
    with pytest.raises(ProgramError, match="without an optimizer"):
        judge.update(pairs(), loss=rl.bradley_terry())


def test_losses_go_to_the_worker_that_predicts_what_they_are_on():
    model = fl.Model(config=T.CONFIGS["qwen2"])
    with pytest.raises(ProgramError, match="one of scores"):
        fl.open(fl.Actor(model)).update(pairs(), loss=rl.bradley_terry())
    with pytest.raises(ProgramError, match="one of logprobs"):
        fl.open(fl.RewardModel(model, lr=1e-3)).update(pairs(), loss=rl.dpo())


# -- rows that are trained along ---------------------------------------------------------------------------------------


def test_rows_trained_along_add_their_cross_entropy():
    batch, more = pairs(4).drop("preferred"), pairs(3, seed=5).drop("preferred", "ref_logprobs")
    opened = trained()
    rows, others = (gradient(opened, b, rl.sft()) for b in (batch, more))
    step = opened.trainer.step(
        [
            (Data(opened.net, batch, rl.sft()), torch.arange(8), 1.0),
            (Data(opened.net, more, rl.sft()), torch.arange(6), 0.25),
        ],
        10**6,
    )
    assert float(step.loss) == pytest.approx(rows[0] + 0.25 * others[0], abs=1e-6)
    wanted = torch.sqrt(sum(((rows[1][n] + 0.25 * others[1][n]) ** 2).sum() for n in rows[1]))
    assert float(step.norm) == pytest.approx(float(wanted), rel=1e-5)


def test_they_are_shared_among_mini_batches():
    batch, more = pairs(4).drop("preferred"), pairs(3, seed=5).drop("preferred", "ref_logprobs")
    told = trained().update(batch, rl.sft(), minibatch=4, pretraining=more, pretraining_weight=0.5)
    assert told["steps"] == 2 and told["pretraining_loss"] > 0 and told["rows"] == 8
    empty = trained().update(batch, rl.sft(), pretraining=more.take([]), pretraining_weight=0.5)
    assert empty["pretraining_loss"] == 0
    alone = trained().update(batch.take([]), rl.sft(), pretraining=more)
    assert alone["steps"] == 1 and alone["pretraining_loss"] > 0 and alone["grad_norm"] > 0


# -- averaged weights --------------------------------------------------------------------------------------------------


def test_weights_follow_those_of_another_worker():
    model = fl.Model(config=T.CONFIGS["qwen2"])
    actor, average = fl.open(fl.Actor(model, lr=1e-2)), fl.open(fl.Actor(model, seed=1))
    assert average.follow(actor)["distance"] >= 0
    assert average.digest() == actor.digest(), "decay=0 copies"
    start = {n: w.clone() for n, w in actor.engine.weights().items()}
    for _ in range(3):
        actor.update(pairs().drop("preferred", "ref_logprobs"), loss=rl.sft())
    moved = average.follow(actor, decay=0.75)["distance"]
    now = actor.engine.weights()
    for name, weight in average.engine.weights().items():
        assert torch.allclose(weight, 0.75 * start[name] + 0.25 * now[name], atol=1e-6)
    total = sum(float(((now[n] - start[n]).double() ** 2).sum()) for n in now) ** 0.5
    assert moved == pytest.approx(0.25 * total, rel=1e-4)


def test_adapters_are_merged_on_the_way():
    model = fl.Model(config=T.CONFIGS["qwen2"])
    actor, average = fl.open(fl.Actor(model, lr=1e-2, lora=Lora(r=2))), fl.open(fl.Actor(model))
    actor.update(pairs().drop("preferred", "ref_logprobs"), loss=rl.sft())
    average.follow(actor)
    rows = pairs().drop("preferred", "ref_logprobs")
    left, right = (w.logprobs(rows).old_logprobs.values for w in (actor, average))
    assert torch.allclose(left, right, atol=1e-5)


def test_adapters_and_half_precision_cannot_average():
    model = fl.Model(config=T.CONFIGS["qwen2"])
    plain = fl.open(fl.Actor(model))
    with pytest.raises(ModelError, match="has adapters here"):
        fl.open(fl.Actor(model, lora=Lora(r=2))).follow(plain, decay=0.9)
    low = fl.open(fl.Reference(model, dtype="bf16"))
    with pytest.raises(ModelError, match="small steps of an average are lost") as caught:
        low.follow(plain, decay=0.9)
    assert "fp32" in (caught.value.fix or "")
    assert low.follow(plain)["distance"] >= 0, "a copy needs no small steps"


def test_another_model_cannot_be_followed():
    small, other = (fl.open(fl.Actor(fl.Model(config=T.CONFIGS[kind]))) for kind in ("qwen2", "gpt2"))
    with pytest.raises(ModelError, match="do not fit"):
        small.follow(other)
    with pytest.raises(ProgramError, match="decay=1.5 is not a number from 0 to 1"):
        small.follow(small, decay=1.5)


# -- whole distributions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "cohere", "phi"])
def test_a_distribution_has_the_log_probability_of_each_token(kind):
    opened, batch = T.engine(kind), pairs().drop("preferred", "ref_logprobs")
    every = opened.distribution(batch)
    assert every.type == f"f32[*response, {T.VOCAB}]"
    assert torch.allclose(every.values.exp().sum(-1), torch.ones(len(every.values)), atol=1e-5)
    chosen = torch.cat([torch.tensor(ids[-len(m) :]) for ids, m in _ids(batch)])
    single = every.values.gather(-1, chosen[:, None]).squeeze(-1)
    assert torch.allclose(single, opened.logprobs(batch).values, atol=1e-4)


def _ids(batch):
    return zip(batch.tokens.to_list(), batch.response_mask.to_list(), strict=True)


@pytest.mark.parametrize("micro_tokens", [1, 10**6])
def test_the_whole_kl_is_plain_autograd(micro_tokens):
    opened, teacher, batch = trained(), T.engine("llama"), pairs(3).drop("preferred", "ref_logprobs")
    batch = batch.with_columns({"ref_distribution": teacher.distribution(batch)})
    total, count, at = 0.0, 0, 0
    for ids, mask in _ids(batch):
        first = len(ids) - len(mask)
        p = opened.net.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1].log_softmax(-1)
        q = batch.ref_distribution.values[at : at + len(mask)]
        total = total + ((p.exp() * (p - q)).sum(-1) * torch.tensor(mask)).sum()
        count, at = count + sum(mask), at + len(mask)
    (total / count).backward()
    plain = {n: w.grad.clone() for n, w in opened.trainer.named.items()}
    opened.trainer.adamw.zero_grad(set_to_none=True)
    same(gradient(opened, batch, rl.full_kl(), micro_tokens), ((total / count).item(), plain), 1e-4)
    fields = {n: batch.response_mask.with_values(torch.zeros(at)) for n in ("advantages", "rollout_logprobs")}
    with_kl = rl.ppo_clip(kl=1.0, kl_kind="full")
    assert "ref_distribution" in with_kl.reads and "ref_logprobs" not in with_kl.reads
    same(gradient(opened, batch.with_columns(fields), with_kl, micro_tokens), ((total / count).item(), plain), 1e-4)


# -- metrics of an update that trains nothing --------------------------------------------------------------------------


def test_an_update_without_a_gradient_has_the_metrics_of_its_loss():
    opened, batch = trained(), pairs(3).drop("preferred", "ref_logprobs")
    zero = batch.response_mask.with_values(torch.zeros(len(batch.response_mask.values)))
    batch = batch.with_columns({"advantages": zero, "rollout_logprobs": zero})
    for rows in (batch, batch.take([])):
        told = opened.update(rows, rl.ppo_clip())
        assert {"ratio", "approx_kl", "clip_fraction"} <= set(told)
        assert told["approx_kl"] != told["approx_kl"], "no number: no row was computed"
