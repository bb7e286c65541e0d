"""Updates: their gradient against plain autograd over whole rows, and what must not change it."""

import math

import pytest
import tiny as T
import torch

from flowrl import rl
from flowrl.backends.hf.train import learning_rate
from flowrl.backends.hf.update_passes import Data
from flowrl.backends.team import Team
from flowrl.backends.update_rows import Table
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import ModelError, ProgramError, RunError
from flowrl.workers.model_options import Lora, Optim


def mini_batches(batch, rows, tokens, epoch, *, together=False):
    table = Table.of(Team(), batch, rl.sft())
    return [table.local(part) for part in table.mini_batches(rows, tokens, epoch, together=together)]


def trained(kind="qwen2", **build):
    return T.engine(kind, **{"optim": T.OPTIM, **build})


def some_batch(opened, **fields):
    """Rollouts with what a loss with all its terms reads; some tokens are observations."""
    batch = T.rollouts(opened, n=4)
    mask = batch.response_mask
    noise = torch.randn(2, len(mask.values), generator=torch.Generator().manual_seed(0))
    seen = mask.with_values(torch.arange(len(mask.values)) % 5 != 3)
    batch = batch.drop("response_mask", "advantages").with_columns({"response_mask": seen})
    batch = rl.group_advantages(batch)
    old = batch.rollout_logprobs
    more = {"ref_logprobs": old + 0.2 * old.with_values(noise[0]), "returns": old.with_values(noise[1]), **fields}
    return batch.drop("rollout_logprobs").with_columns(
        {**more, "rollout_logprobs": old + 0.1 * old.with_values(noise[1])}
    )


def gradient(opened, batch, loss, micro_tokens=10**6, rows=None):
    """The loss and its gradient by name, through the trainer."""
    trainer = opened.trainer
    chosen = torch.arange(len(batch)) if rows is None else rows
    report = trainer.gradient(Data(opened.net, batch, loss), chosen, micro_tokens)
    found = {n: w.grad.clone() for n, w in trainer.named.items()}
    trainer.adamw.zero_grad(set_to_none=True)
    return float(report.loss), found, report


def plain_gradient(opened, batch, loss):
    """The same by plain autograd: each row alone through the model's own forward, all logits at once."""
    model, total = opened.net.model, 0.0
    masked = sum(sum(m) for m in batch.response_mask.to_list())
    for i in range(len(batch)):
        row = batch.take([i])
        ids, mask = row.tokens.to_list()[0], row.response_mask.values
        first = len(ids) - len(mask)
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1]
        every = (logits / row.temperature.values if "temperature" in row else logits).log_softmax(-1)
        predicted = every.gather(-1, torch.tensor(ids[first:])[:, None]).squeeze(-1)
        inputs = rl.LossInputs(
            predicted=predicted,
            mask=mask,
            fields={n: row[n].values for n in row.fields},
            lengths=row.response_mask.lengths,
            row=torch.zeros(len(mask), dtype=torch.int64),
            entropy=-(every.exp() * every).sum(-1) if loss.needs_entropy else None,
            by_row=frozenset({"rewards"}),
        )
        total = total + (loss.compute(inputs)[0] * mask).sum() / masked
    found = torch.autograd.grad(total, list(opened.trainer.named.values()))
    return float(total.detach()), dict(zip(opened.trainer.named, found, strict=True))


def distance(a, b):
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-6)) for n in b)


FULL = rl.ppo_clip(kl=0.05, entropy=0.02)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "phi", "mistral-window"])
@pytest.mark.parametrize("micro_tokens", [1, 40, 10**6])
@pytest.mark.parametrize("hot", [False, True])
def test_the_gradient_is_that_of_plain_autograd_in_float64(kind, micro_tokens, hot):
    opened = trained(kind, dtype="fp64")
    batch = some_batch(opened)
    if hot:  # every row at a temperature of its own
        heats = [0.5 + 0.1 * i for i in range(len(batch))]
        batch = batch.with_columns({"temperature": Column.of(heats, dtype="f32")})
    value, found, _ = gradient(opened, batch, FULL, micro_tokens)
    wanted_value, wanted = plain_gradient(opened, batch, FULL)
    assert value == pytest.approx(wanted_value, abs=1e-7)
    assert distance(found, wanted) < 1e-6


@pytest.fixture(scope="module")
def opened():
    return trained()


def test_micro_batches_change_neither_loss_nor_gradient_nor_reports_in_float32(opened):
    batch = some_batch(opened)
    value, wanted, report = gradient(opened, batch, FULL)
    for micro_tokens in (1, 17, 60, 200):
        other, found, again = gradient(opened, batch, FULL, micro_tokens)
        assert other == pytest.approx(value, abs=1e-5)
        assert distance(found, wanted) < 1e-5
        assert again.tokens == report.tokens
        for name, total in report.sums.items():
            assert float(again.sums[name]) == pytest.approx(float(total), rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("aggregate", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_rows_without_advantage_are_left_out_and_still_counted(opened, aggregate):
    batch = some_batch(opened)
    spread = batch.advantages.values.clone()
    spread[: int(batch.response_mask.offsets[5])] = 0.0
    batch = batch.drop("advantages").with_columns({"advantages": batch.advantages.with_values(spread)})
    skips = rl.ppo_clip(aggregate=aggregate)
    value, found, report = gradient(opened, batch, skips)
    keeps = rl.Loss(**{**vars(skips), "zero_advantage_is_zero": False})
    wanted_value, wanted, whole = gradient(opened, batch, keeps)
    assert report.rows < whole.rows == 16
    assert value == pytest.approx(wanted_value, rel=1e-5, abs=1e-6)
    assert distance(found, wanted) < 1e-5


def test_without_any_advantage_the_step_is_that_of_a_zero_gradient():
    first, second = trained(), trained()
    batch = T.rollouts(first)
    nothing = batch.drop("advantages").with_columns({"advantages": batch.advantages * 0.0})
    for opened, loss in (
        (first, rl.ppo_clip()),
        (second, rl.Loss(**{**vars(rl.ppo_clip()), "zero_advantage_is_zero": False})),
    ):
        opened.update(batch, rl.ppo_clip())
        metrics = opened.update(nothing, loss)
        assert metrics["grad_norm"] == 0 and metrics["loss"] == 0
    assert first.digest() == second.digest()


def test_the_order_of_rows_does_not_matter():
    first, second = trained(), trained()
    batch = T.rollouts(first)
    turned = batch.take(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))
    a = first.update(batch, rl.ppo_clip(), minibatch=5, epochs=2)
    b = second.update(turned, rl.ppo_clip(), minibatch=5, epochs=2)
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for name, weight in first.weights().items():
        assert torch.allclose(weight, second.weights()[name], atol=2e-5)


def ragged(lengths, seed=1):
    column = Column.packed(torch.zeros(sum(lengths), dtype=torch.bool), lengths, "response")
    return Batch.of(len(lengths), response_mask=column).with_call(CallInfo(seed=seed))


def test_mini_batches_hold_every_row_once_in_an_order_of_the_epoch():
    batch = ragged([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    epochs = [mini_batches(batch, 4, None, e) for e in range(3)]
    for parts in epochs:
        assert [len(p) for p in parts] == [4, 4, 2]
        assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert len({tuple(torch.cat(parts).tolist()) for parts in epochs}) == 3
    again = mini_batches(ragged([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], seed=2), 4, None, 0)
    assert torch.cat(again).tolist() != torch.cat(epochs[0]).tolist()


def test_mini_batches_by_tokens():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    parts = mini_batches(ragged(lengths), None, 8, 0)
    sizes = [sum(lengths[i] for i in part.tolist()) for part in parts]
    assert sum(sizes) == sum(lengths)
    assert all(size <= 8 or len(part) == 1 for size, part in zip(sizes, parts, strict=True))


def test_without_a_limit_all_rows_are_one_mini_batch_in_the_order_of_keys():
    batch = ragged([1, 2, 3]).take([2, 0, 1])
    assert [p.tolist() for p in mini_batches(batch, None, None, 0)] == [[1, 2, 0]]
    assert list(mini_batches(ragged([]), None, None, 0)) == []


def test_steps_are_those_of_adamw_written_out():
    optim = Optim(lr=1e-2, weight_decay=0.1, grad_clip=0.5, warmup=2, betas=(0.8, 0.9))
    opened = trained(optim=optim, dtype="fp64")
    batch = T.rollouts(opened)
    weights = {n: w.clone() for n, w in opened.weights().items()}
    first = {n: torch.zeros_like(w) for n, w in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in (1, 2, 3):
        _, slopes, _ = gradient(opened, batch, rl.ppo_clip())
        norm = math.sqrt(sum(float(g.square().sum()) for g in slopes.values()))
        metrics = opened.update(batch, rl.ppo_clip())
        lr = 1e-2 * min(1, step / 2)
        assert metrics["grad_norm"] == pytest.approx(norm) and metrics["lr"] == pytest.approx(lr)
        for name, w in weights.items():
            g = slopes[name] * min(1.0, 0.5 / (norm + 1e-6))
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.9 * second[name] + 0.1 * g * g
            step_size = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-8)
            w.mul_(1 - lr * 0.1 if w.dim() > 1 else 1).sub_(lr * step_size)
    for name, weight in opened.weights().items():
        assert torch.allclose(weight, weights[name], atol=1e-8)


def test_learning_rates():
    linear = Optim(lr=1.0, schedule="linear", warmup=2, total=6, min_lr=0.1)
    assert [learning_rate(linear, s) for s in range(8)] == pytest.approx([0.5, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1])
    cosine = Optim(lr=2.0, schedule="cosine", total=4)
    assert [learning_rate(cosine, s) for s in (0, 1, 2, 4)] == pytest.approx([2, 1 + math.cos(math.pi / 4), 1, 0])
    assert learning_rate(Optim(lr=0.3), 10**6) == 0.3


def test_the_rate_of_a_call_goes_before_the_schedule(opened):
    assert opened.update(T.rollouts(opened), rl.ppo_clip(), lr=0.0)["lr"] == 0.0


def test_supervised_training_learns():
    opened = trained(optim=Optim(lr=1e-2))
    batch = T.rollouts(opened).select("tokens", "response_mask").with_call(CallInfo(seed=1))
    losses = [opened.update(batch, rl.sft(), minibatch_tokens=40)["loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_critic_learns_its_returns():
    opened = trained(head="scalar", optim=Optim(lr=1e-2))
    batch = some_batch(trained())
    batch = batch.with_columns({"values": opened.values(batch)})
    errors = [opened.update(batch, rl.value_clip(clip=None), epochs=4)["value_error"] for _ in range(5)]
    assert errors[-1] < 0.3 * errors[0]


def test_numbers_that_are_not_finite_stop_before_the_weights_change(opened):
    batch, before = T.rollouts(opened), opened.digest()
    bad = batch.drop("advantages").with_columns({"advantages": batch.advantages * float("nan")})
    with pytest.raises(
        RunError, match="the loss is nan, the gradient's norm nan: the field 'advantages' is not finite in row 0"
    ):
        opened.update(bad, rl.ppo_clip())
    assert opened.digest() == before


def test_state_resumes_exactly():
    opened = trained(optim=Optim(lr=1e-2, schedule="linear", total=10))
    batch = T.rollouts(opened)
    opened.update(batch, rl.ppo_clip(), minibatch=4)
    tensors, meta = opened.state()
    kept = {n: t.clone() for n, t in tensors.items()}
    wanted = [opened.update(batch, rl.ppo_clip(), minibatch=4), opened.digest()]
    other = trained(optim=Optim(lr=1e-2, schedule="linear", total=10))
    other.load_state(kept, meta)
    assert [other.update(batch, rl.ppo_clip(), minibatch=4), other.digest()] == wanted
    assert {t.dtype for t in kept.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_recomputed_activations_change_nothing_and_leave_generation_alone(kind):
    plain, saving = trained(kind), trained(kind, gradient_checkpointing=True)
    assert saving.net.recomputed
    batch = T.rollouts(plain)
    assert T.rollouts(saving).tokens.equal(batch.tokens)
    assert plain.update(batch, rl.ppo_clip()) == pytest.approx(saving.update(batch, rl.ppo_clip()), abs=1e-6)
    for name, weight in plain.weights().items():
        assert torch.allclose(weight, saving.weights()[name], atol=1e-5)
    assert T.rollouts(saving, n=2).tokens.equal(T.rollouts(plain, n=2).tokens)


def test_bfloat16_trains_float32_weights():
    opened = trained(dtype="bf16")
    batch = T.rollouts(opened)
    assert float(abs(opened.logprobs(batch) - batch.rollout_logprobs).max()) < 0.2
    metrics = opened.update(batch, rl.ppo_clip())
    exact = trained().update(batch, rl.ppo_clip())
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert {w.dtype for w in opened.weights().values()} == {torch.float32}
    frozen = T.engine(dtype="bf16")
    assert {w.dtype for w in frozen.weights().values()} == {torch.bfloat16}
    assert float(abs(frozen.logprobs(batch) - opened.logprobs(batch)).max()) < 1.0


def test_adapters_alone_are_trained_and_are_merged_on_the_way_out(tmp_path):
    base = T.engine()
    base.save(tmp_path / "base")
    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build, Model

    model = Model(str(tmp_path / "base"))
    opened = open_engine("hf", Build(model, lora=Lora(r=4), optim=Optim(lr=1e-2)))
    batch = T.rollouts(base)
    assert torch.equal(opened.logprobs(batch).values, base.logprobs(batch).values)  # no change to begin with
    before = {n: w.clone() for n, w in opened.weights().items()}
    opened.update(batch, rl.ppo_clip(), epochs=2)
    changed = {n for n, w in opened.weights().items() if not torch.equal(w, before[n])}
    assert changed == set(opened.trainer.named) and all(".lora_" in n for n in changed)
    opened.save(tmp_path / "tuned")
    saved = open_engine("hf", Build(Model(str(tmp_path / "tuned"))))
    assert set(saved.weights()) == set(base.weights())
    assert torch.allclose(saved.logprobs(batch).values, opened.logprobs(batch).values, atol=1e-5)
    base.copy_weights_from(opened)
    assert torch.allclose(base.logprobs(batch).values, opened.logprobs(batch).values, atol=1e-5)
    with pytest.raises(ModelError, match="Adapters cannot be put into"):
        open_engine("hf", Build(model, lora=Lora(targets=("q_prj",)), optim=T.OPTIM))


def test_what_cannot_be_trained_says_so(opened):
    batch = T.rollouts(opened)
    with pytest.raises(ProgramError, match="was opened without an optimizer"):
        T.engine().update(batch, rl.ppo_clip())
    with pytest.raises(ProgramError, match="has the head 'lm'; update with value_clip needs 'scalar'"):
        opened.update(batch, rl.value_clip())


@pytest.mark.parametrize("kind", ["gpt2", "phi"])
def test_float64_trains_with_shared_prompts_as_with_rows_alone(kind):
    """Models whose norms are computed in the dtype of the model; transformers takes others in float32."""
    found = []
    for shared in (True, False):
        opened = trained(kind, dtype="fp64")
        assert opened.net.grouped
        opened.net.grouped = shared
        batch = T.rollouts(T.engine(kind, dtype="fp64"), n=4)
        for _ in range(2):
            metrics = opened.update(batch, rl.ppo_clip(entropy=0.01))
        found.append((metrics, opened.plain_weights()))
    (metrics, weights), (others, wanted) = found
    assert metrics == pytest.approx(others, rel=1e-9, abs=1e-9)
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < 1e-9
