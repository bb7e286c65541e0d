"""What the gradient of a KL in a loss is on average, exactly, over a small vocabulary; and what is said of others."""

from __future__ import annotations

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.errors import ProgramError

VOCAB = 5


def expected_gradient(*, sampled_by_other=False, **parts):
    """The mean over one sampled token of the gradient by the logits, and that of KL(policy, reference)."""
    draw = torch.Generator().manual_seed(3)
    logits, ref, other = torch.randn(3, VOCAB, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    policy, ref = logits.log_softmax(-1), ref.log_softmax(-1)
    sampler = other.log_softmax(-1) if sampled_by_other else policy.detach()
    every = torch.arange(VOCAB)  # a row of each token, weighed by how often it is sampled
    x = rl.LossInputs(
        predicted=policy,
        mask=torch.ones(VOCAB, dtype=torch.bool),
        fields={
            "rollout_logprobs": sampler,
            "old_logprobs": policy.detach(),
            "ref_logprobs": ref,
            "advantages": torch.zeros_like(ref),
        },
        lengths=torch.ones(VOCAB, dtype=torch.int64),
        row=every,
    )
    losses, _ = rl.reinforce(kl=1.0, **parts).compute(x)
    (found,) = torch.autograd.grad((sampler.exp() * losses).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)
    return found, wanted


RIGHT = {
    # parts: whether the gradient is that of the KL for the policy's own samples, and for those of another
    "k2": ({"kl_kind": "k2"}, True, False),
    "k3": ({"kl_kind": "k3"}, False, False),
    "k3 weighted": ({"kl_kind": "k3", "kl_weighted": True}, True, True),
    "k1 weighted": ({"kl_kind": "k1", "kl_weighted": True}, True, True),
    "k1 weighted, anchor old": ({"kl_kind": "k1", "kl_weighted": True, "anchor": "old"}, True, True),
    "k3 weighted, anchor old": ({"kl_kind": "k3", "kl_weighted": True, "anchor": "old"}, True, True),
    "k3, gradient of k2": ({"kl_kind": "k3", "kl_bound": 1e-3, "kl_gradient": "k2"}, True, False),
    "the same weighted": ({"kl_kind": "k3", "kl_gradient": "k2", "kl_weighted": True}, True, True),
    "k1, gradient of k2, weighted": ({"kl_kind": "k1", "kl_gradient": "k2", "kl_weighted": True}, True, True),
}


@pytest.mark.parametrize("other", (False, True))
@pytest.mark.parametrize("name", RIGHT)
def test_whose_gradient_is_that_of_the_kl(name, other):
    parts, own, others = RIGHT[name]
    found, wanted = expected_gradient(sampled_by_other=other, **parts)
    assert torch.allclose(found, wanted, atol=1e-12) == (others if other else own)


def test_k1_has_no_gradient_on_average():
    found, wanted = expected_gradient(kl_kind="k1")
    assert found.abs().max() < 1e-12 < wanted.abs().max()


def test_k3_has_that_of_the_kl_from_the_reference():
    """GRPO's own: the gradient of KL(reference, policy), which is another one."""
    found, _ = expected_gradient(kl_kind="k3")
    draw = torch.Generator().manual_seed(3)
    logits, ref, _ = torch.randn(3, VOCAB, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    ref = ref.log_softmax(-1)
    (wanted,) = torch.autograd.grad((ref.exp() * (ref - logits.log_softmax(-1))).sum(), logits)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_weighted_k2_is_refused_with_the_reason():
    with pytest.raises(ProgramError) as told:
        rl.ppo_clip(kl=0.1, kl_kind="k2", kl_weighted=True)
    assert told.value.what == (
        "rl.ppo_clip: kl_weighted=True does not remove the bias of kl_kind='k2': the ratio times k2 is an estimate of "
        "E[(log p - log ref)^2] / 2 under the policy, which is not the KL, and neither is its gradient."
    )
    assert told.value.fix == (
        'Write kl_kind="k3"; or kl_kind="k3", kl_gradient="k2", which weighs the gradient of k2 alone.'
    )
    assert "test_rl_kl_gradient.py" in str(told.value)
    assert rl.ppo_clip(kl=0.0, kl_kind="k2", kl_weighted=True).reads == rl.ppo_clip().reads  # there is no KL


@pytest.mark.parametrize(
    ("parts", "what", "fix"),
    [
        ({"kl_kind": "k3+"}, "kl_kind='k3+' is none of k1, k2, k3, full", 'kl_bound=10.0, kl_gradient="k2".'),
        ({"kl_kind": "low_var_kl"}, "kl_kind='low_var_kl' is none of", 'Write kl_kind="k3", kl_bound=10.0.'),
        ({"kl_kind": "k4"}, "kl_kind='k4' is none of k1, k2, k3, full", 'Write kl_kind="k'),
        ({"kl_gradient": "k5"}, "kl_gradient='k5' is none of k1, k2, k3", 'Write kl_gradient="k'),
        ({"kl_kind": "full", "kl_gradient": "k2"}, "kl_kind='full' is no estimate", "Leave out kl_gradient=."),
        ({"kl_bound": 0.0}, "kl_bound=0.0 leaves nothing of the KL", "such as 10.0"),
        ({"kl_bound": -1}, "kl_bound=-1 leaves nothing of the KL", "such as 10.0"),
    ],
)
def test_errors_say_what_to_write(parts, what, fix):
    with pytest.raises(ProgramError) as told:
        rl.ppo_clip(kl=0.1, **parts)
    assert what in str(told.value) and fix in str(told.value)


def test_a_bound_holds_a_token_of_k3_that_would_be_half_a_billion():
    p, ref = torch.tensor([-30.0, -1.0], dtype=torch.float64), torch.tensor([-0.5, -1.5], dtype=torch.float64)

    def kl(**parts):
        predicted = p.clone().requires_grad_()
        fields = {"ref_logprobs": ref, "advantages": torch.zeros_like(p)}
        x = rl.LossInputs(predicted, torch.ones(2).bool(), fields, torch.tensor([2]), torch.zeros(2, dtype=torch.int64))
        losses, reports = rl.reinforce(kl=1.0, **parts).compute(x)
        losses.sum().backward()
        assert predicted.grad is not None
        return reports["kl"].tolist(), predicted.grad.tolist()

    value, gradient = kl()
    assert value[0] > 4e8 and gradient[1] != 0
    bounded, slope = kl(kl_bound=10.0)
    assert bounded == [10.0, value[1]] and slope == [0.0, gradient[1]]
    through, slope = kl(kl_bound=10.0, kl_gradient="k1")
    assert through == bounded and slope == [0.0, 1.0]  # a log-ratio beyond 20 has no gradient in any case


def test_the_graph_says_what_differs():
    loss = rl.ppo_clip(kl=0.1, kl_bound=10.0, kl_gradient="k2", only="selected", correction=rl.off_policy_mask())
    assert repr(loss) == (
        "ppo_clip(ppo(low=0.2, high=0.2), reject(k1, mean, limit=0.5, negative, of=policy), only=selected, kl=0.1, "
        "kl_bound=10.0, kl_gradient=k2)"
    )
    assert repr(rl.vespo()) == "vespo(vespo(positive=(2.0, 3.0), negative=(3.0, 2.0)), ratio=sequence)"
    assert repr(rl.m2po()) == "m2po(surrogate(), only=selected)"
    assert repr(rl.reinforce(correction="mine")) == "reinforce(reinforce(), weigh(mine))"


# -- what check says -----------------------------------------------------------------------------------------------------


def checked(loss):
    prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
    flow = fl.Flow("main")
    actor = flow.worker(fl.Actor, model="a/model", name="actor")
    ref = flow.worker(fl.Reference, of=actor, name="ref")
    reward = flow.worker(fl.RewardModel, model="a/model", name="reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(ref.logprobs(reward.score(actor.generate(batch, n=2))))
            flow.log(step, actor.update(batch, loss=loss()))

    return flow.check()


def test_check_remarks_on_a_k1_that_holds_nothing_back():
    report = checked(lambda: rl.ppo_clip(kl=0.1, kl_kind="k1"))
    assert report.errors == ()
    [lint] = report.lints
    assert lint.kind == "loss" and lint.at.text == "flow.log(step, actor.update(batch, loss=loss()))"
    assert lint.what == (
        "rl.ppo_clip: the gradient of k1 is grad log p, whose mean over the policy's own samples is 0: this KL holds "
        'nothing back. Write kl_kind="k2" or "k3", or kl_weighted=True; or pay k1 from the reward (rl.kl_penalty).'
    )


@pytest.mark.parametrize(
    ("parts", "remarks"),
    [
        ({}, 0),
        ({"kl_kind": "k1", "kl": 0.0}, 0),
        ({"kl_kind": "k1", "kl_weighted": True}, 0),
        ({"kl_kind": "k1", "kl_gradient": "k2"}, 0),
        ({"kl_kind": "k3", "kl_gradient": "k1"}, 1),
        ({"kl_kind": "k3", "kl_gradient": "k1", "kl_weighted": True}, 1),
        ({"kl_kind": "k2"}, 0),
    ],
)
def test_and_on_no_other(parts, remarks):
    assert len(rl.ppo_clip(**{"kl": 0.1, **parts}).remarks) == remarks


def test_a_kl_is_weighed_by_the_sampler_whatever_the_gate_is_to():
    loss = rl.decoupled_ppo(kl=0.1, kl_weighted=True)
    assert loss.reads == "old_logprobs, rollout_logprobs, advantages, response_mask, ref_logprobs"
    assert rl.ppo_clip(kl=0.1, kl_weighted=True, anchor="old").reads.startswith("old_logprobs, rollout_logprobs, ")
    assert "rollout_logprobs" not in rl.ppo_clip(kl=0.1, anchor="old").reads


def test_check_remarks_on_bounds_that_are_narrower_than_rounding():
    [lint] = [lint for lint in checked(rl.gspo).lints if lint.kind == "loss"]
    assert "in bf16 engine and trainer round further apart" in lint.what
    for loss in (rl.gspo(anchor="old"), rl.gspo(clip=0.1), rl.ppo_clip(clip=3e-4), rl.ppo_clip(ratio="geometric")):
        assert loss.remarks == ()


def test_a_wrong_kl_is_an_error_of_check_at_its_line():
    [error] = checked(lambda: rl.ppo_clip(kl=0.1, kl_kind="k2", kl_weighted=True)).errors
    assert error.at is not None and 'rl.ppo_clip(kl=0.1, kl_kind="k2", kl_weighted=True)' in error.at.text
