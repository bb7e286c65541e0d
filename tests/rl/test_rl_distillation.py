"""Divergences to a teacher against slow loops, against trl, and against their estimates on sampled tokens."""

import math

import pytest
import torch

from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.errors import FlowError, ProgramError

torch.set_num_threads(1)
SEEDS = range(3)
INF = math.inf
KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.95)]
VOCAB, TOKENS = 7, 5


def logits(seed, spread=1.5):
    """Logits of a student and of a teacher [tokens, vocab]."""
    draw = torch.Generator().manual_seed(seed)
    return spread * torch.randn(2, TOKENS, VOCAB, generator=draw, dtype=torch.float64)


def inputs(student, teacher):
    mask = torch.tensor([True, True, False, True, True])
    lengths = torch.tensor([3, 2])
    row = torch.repeat_interleave(torch.arange(2), lengths)
    fields = {"ref_distribution": teacher}
    return rl.LossInputs(student[:, 0], mask, fields, lengths, row, distribution=student)


def loss_of(kind, beta):
    return rl.divergence(kind, beta=beta) if kind == "jsd" else rl.divergence(kind)


def shares(numbers):
    total = sum(math.exp(x) for x in numbers)
    return [math.exp(x) / total for x in numbers]


def slow(student, teacher, kind, beta):
    """The divergence of two lists of logits."""
    p, q = shares(student), shares(teacher)
    m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]

    def kl(one, other):
        return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    if kind == "reverse_kl":
        return kl(p, q)
    return kl(q, p) if kind == "forward_kl" else beta * kl(q, m) + (1 - beta) * kl(p, m)


def slopes(student, teacher, kind, beta, step=1e-5):
    """The gradient by a row of student's logits, by central differences."""
    found = []
    for v in range(len(student)):
        up, down = list(student), list(student)
        up[v], down[v] = up[v] + step, down[v] - step
        found.append((slow(up, teacher, kind, beta) - slow(down, teacher, kind, beta)) / (2 * step))
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_divergence_is_the_sum_over_the_vocabulary(kind, beta, seed):
    student, teacher = logits(seed)
    student.requires_grad_()
    losses, reports = loss_of(kind, beta).compute(inputs(student.log_softmax(-1), teacher.log_softmax(-1)))
    assert reports == {}
    losses.sum().backward()
    for t in range(TOKENS):
        given = (student[t].tolist(), teacher[t].tolist(), kind, beta)
        assert float(losses[t].detach()) == pytest.approx(slow(*given), abs=1e-9)
        assert student.grad[t].tolist() == pytest.approx(slopes(*given), abs=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_it_is_the_generalised_jsd_of_trl(kind, beta, seed):
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    student, teacher = logits(seed)
    student.requires_grad_()
    x = inputs(student.log_softmax(-1), teacher.log_softmax(-1))
    losses, _ = loss_of(kind, beta).compute(x)
    mean = (losses * x.mask).sum() / x.mask.sum()
    (found,) = torch.autograd.grad(mean, student)
    labels = torch.where(x.mask, 1, -100)[None]
    theirs = {"reverse_kl": 1, "forward_kl": 0, "jsd": beta}[kind]
    wanted = gkd.GKDTrainer.generalized_jsd_loss(student[None], teacher[None], labels, beta=theirs)
    (slope,) = torch.autograd.grad(wanted, student)
    assert float(mean.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert torch.allclose(found, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kind", "limit", "near"), [("forward_kl", 1e-7, 1e-7), ("reverse_kl", 1 - 1e-7, 1e-7)])
def test_the_two_kls_are_the_limits_of_the_jsd(kind, limit, near):
    student, teacher = (part.log_softmax(-1) for part in logits(0))
    between, _ = rl.divergence("jsd", beta=limit).compute(inputs(student, teacher))
    wanted, _ = rl.divergence(kind).compute(inputs(student, teacher))
    assert torch.allclose(between / near, wanted, rtol=1e-4)


def test_the_full_kl_is_the_reverse_one():
    student, teacher = (part.log_softmax(-1) for part in logits(1))
    one, other = rl.full_kl(), rl.divergence()
    assert torch.equal(one.compute(inputs(student, teacher))[0], other.compute(inputs(student, teacher))[0])
    assert (str(one), str(other)) == ("full_kl()", "divergence(kind=reverse_kl)")
    for loss in (one, other, rl.divergence("jsd", aggregate="seq-mean-token-mean")):
        assert loss.needs_distribution and loss.corrects_stale
        assert loss.reads == "ref_distribution: f32[*response, vocab], response_mask"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_what_one_of_them_never_takes_is_finite(kind, beta, dtype):
    p, q = (part.to(dtype) for part in logits(2))
    p[0, 1] = q[1, 0] = p[2, 2] = q[2, 2] = -INF
    p[3, 0] = q[4, 0] = 1e4
    p, q = p.log_softmax(-1).requires_grad_(), q.log_softmax(-1)
    losses, _ = loss_of(kind, beta).compute(inputs(p, q))
    losses.sum().backward()
    assert losses.dtype == dtype and torch.isfinite(losses).all() and torch.isfinite(p.grad).all()
    assert (losses > -1e-6).all()
    if kind == "jsd":
        assert float(losses.max()) <= math.log(2) + 1e-6


def test_the_forward_kl_pulls_where_the_student_is_all_but_zero():
    """Beyond the bound of log-ratios elsewhere, where its gradient is the whole point."""
    student = torch.tensor([[0.0, -60.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.3, 0.7]], dtype=torch.float64).log()
    from flowrl.rl.math.distillation import forward

    forward(student.log_softmax(-1), teacher).sum().backward()
    assert student.grad.tolist()[0] == pytest.approx([0.7, -0.7])


# -- sampled tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("anchor", ["rollout", "old"])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_advantages_of_sampled_tokens_have_the_gradient_of_the_divergence_on_average(kind, beta, anchor, seed):
    """A token per entry of the vocabulary, weighed by how likely the student takes it: the mean over all samples."""
    student, teacher = logits(seed)[:, 0]
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    mask = Column.packed(torch.ones(VOCAB, dtype=torch.bool), [VOCAB], "response")
    columns = {f"{anchor}_logprobs": mask.with_values(p), "ref_logprobs": mask.with_values(q)}
    batch = Batch.of(1, response_mask=mask, **columns)
    found = rl.teacher_advantages(batch, kind=kind, beta=beta, anchor=anchor).advantages.values.double()
    leaf = student.clone().requires_grad_()
    (-(p.exp() * found * leaf.log_softmax(-1)).sum()).backward()
    assert leaf.grad.tolist() == pytest.approx(slopes(student.tolist(), teacher.tolist(), kind, beta), abs=1e-5)


def graded(student, teacher, mask):
    column = Column.packed(torch.tensor(mask), [len(mask)], "response")
    return Batch.of(
        1,
        response_mask=column,
        rollout_logprobs=column.with_values(torch.tensor(student)),
        ref_logprobs=column.with_values(torch.tensor(teacher)),
    )


def test_the_reverse_kl_of_sampled_tokens_is_a_kl_penalty_of_weight_1():
    batch = graded([-1.0, -2.0, -3.0, -60.0], [-1.5, -0.5, -9.0, -1.0], [True, True, False, True])
    found = rl.teacher_advantages(batch).advantages
    assert found.values.tolist() == [-0.5, 1.5, 0.0, 20.0]
    assert torch.equal(found.values, rl.kl_penalty(batch, coef=1.0).token_rewards.values)


def test_advantages_by_a_teacher_are_finite():
    batch = graded([-INF, -1.0, -INF], [-1.0, -INF, -INF], [True, True, True])
    for kind, beta in KINDS:
        assert torch.isfinite(rl.teacher_advantages(batch, kind=kind, beta=beta).advantages.values).all()


# -- what makes no sense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "what", "fix"),
    [
        ({"kind": "kl"}, "kind='kl' is none of reverse_kl, forward_kl, jsd", 'Write kind="reverse_kl".'),
        ({"kind": "jsd", "beta": 0.0}, "beta=0.0 is not between 0 and 1", None),
        ({"kind": "jsd", "beta": 1}, "beta=1 is not between 0 and 1", None),
    ],
)
def test_it_is_refused_before_it_runs(said, what, fix):
    limits = 'Write kind="forward_kl" for the limit at 0, kind="reverse_kl" for that at 1.'
    with pytest.raises(ProgramError, match=f"rl.divergence: {what}") as error:
        rl.divergence(**said)
    assert error.value.fix == (fix or limits) and error.value.at.file == __file__
    with pytest.raises(FlowError, match=f"rl.teacher_advantages: {what}") as error:
        rl.teacher_advantages(graded([-1.0], [-1.0], [True]), **said)
    assert error.value.fix == (fix or limits) and error.value.at.file == __file__
