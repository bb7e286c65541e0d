"""Losses on preferences against slow loops over lists and against the trainers of trl; gradients in float64."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from flowrl import rl
from flowrl.errors import ProgramError
from flowrl.rl.preference import (
    OF_DIFFERENCE,
    OF_EACH,
    bradley_terry,
    cpo,
    dpo,
    ipo,
    kto,
    orpo,
    preference_loss,
    simpo,
)

torch.set_num_threads(1)
SEEDS = range(6)
PAIRED = {
    "dpo": dpo,
    "ipo": ipo,
    "orpo": orpo,
    "simpo": simpo,
    "cpo": cpo,
    "preference_loss": preference_loss,
    "bradley_terry": bradley_terry,
}
#: Every kind of a pair's loss, with what it needs.
KINDS = {kind: {"label_smoothing": 0.1} if kind == "exo" else {} for kind in (*OF_DIFFERENCE, *OF_EACH)}


def of_kind(kind, **parts):
    return lambda: preference_loss(kind, **{**KINDS[kind], **parts})


class Rows:
    """Random pairs as lists; ``inputs`` packs them in the order of ``shuffled``."""

    def __init__(self, seed, pairs=5, *, shortest=0, scale=1.0):
        draw = torch.Generator().manual_seed(seed)

        def numbers(n):
            return torch.randn(n, generator=draw, dtype=torch.float64)

        self.pairs = pairs
        self.lengths = [int(n) for n in torch.randint(shortest, 7, (2 * pairs,), generator=draw)]
        self.group = [i // 2 for i in range(2 * pairs)]
        flips = (torch.rand(pairs, generator=draw) < 0.5).tolist()
        self.preferred = [(i % 2 == 0) != flips[i // 2] for i in range(2 * pairs)]
        self.predicted = [-scale * numbers(n).abs() for n in self.lengths]
        self.ref = [-scale * numbers(n).abs() for n in self.lengths]
        self.mask = [torch.rand(n, generator=draw) < 0.8 for n in self.lengths]
        if shortest:
            for mask in self.mask:
                mask[0] = True
        self.scores = numbers(2 * pairs)
        self.margin = numbers(2 * pairs).abs()
        self.shuffled = torch.randperm(2 * pairs, generator=draw).tolist()

    def inputs(self, *, on="logprobs", order=None):
        order = self.shuffled if order is None else order
        lengths = torch.tensor([self.lengths[i] for i in order])
        row = torch.repeat_interleave(torch.arange(len(order)), lengths)
        predicted = self.scores[order] if on == "scores" else torch.cat([self.predicted[i] for i in order])
        fields = {
            "ref_logprobs": torch.cat([self.ref[i] for i in order]),
            "preferred": torch.tensor([self.preferred[i] for i in order]),
            "margin": self.margin[order],
        }
        _, group = torch.unique(torch.tensor([self.group[i] for i in order]), return_inverse=True)
        return rl.LossInputs(
            predicted.clone().requires_grad_(),
            torch.cat([self.mask[i] for i in order]),
            fields,
            lengths,
            row,
            by_row=frozenset({"preferred", "margin"}),
            group=group,
        )

    def sampled(self, values, i):
        """The numbers of a row's sampled tokens."""
        return [values[i][t] for t in range(self.lengths[i]) if self.mask[i][t]]

    def moved(self, i):
        return [p - r for p, r in zip(self.sampled(self.predicted, i), self.sampled(self.ref, i), strict=True)]

    def both(self, pair):
        """The better and the worse row of a pair."""
        rows = [i for i in range(2 * self.pairs) if self.group[i] == pair]
        return sorted(rows, key=lambda i: not self.preferred[i])

    def spread(self, gradients):
        """Gradients by row, packed in the order of ``inputs``."""
        return torch.cat([gradients[i] for i in self.shuffled])

    def padded(self):
        """As trl has it: the better rows and then the worse, [2 pairs, 1 + longest] with a token of prompt in front."""
        order = [self.both(p)[0] for p in range(self.pairs)] + [self.both(p)[1] for p in range(self.pairs)]
        longest = max(self.lengths)
        mask = torch.zeros(len(order), longest + 1, dtype=torch.long)
        predicted, ref = torch.zeros(len(order), longest).double(), torch.zeros(len(order), longest).double()
        for at, i in enumerate(order):
            mask[at, 1 : self.lengths[i] + 1] = self.mask[i]
            predicted[at, : self.lengths[i]], ref[at, : self.lengths[i]] = self.predicted[i], self.ref[i]
        return order, mask, predicted.requires_grad_(), ref * mask[:, 1:]

    def unpadded(self, gradient, order):
        """The gradient of padded rows, packed in the order of ``inputs``."""
        return self.spread({i: gradient[at, : self.lengths[i]] for at, i in enumerate(order)})


def mean_and_gradient(loss, x):
    """As an update aggregates it: the mean over rows."""
    found, reports = loss.compute(x)
    assert found.shape == x.lengths.shape
    assert all(report.shape == found.shape and not report.requires_grad for report in reports.values())
    found.mean().backward()
    gradient = x.predicted.grad
    assert gradient is not None
    return found.detach(), reports, gradient


def log_sigmoid(z):
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def sigmoid(z):
    return math.exp(log_sigmoid(z))


def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else 0.0


def by_token(rows, i, value):
    """A row's gradient: ``value`` at its sampled tokens."""
    return torch.where(rows.mask[i], torch.full((rows.lengths[i],), float(value), dtype=torch.float64), 0.0)


# -- slow loops: loss per pair, and its gradients by the sums or means of the two rows ---------------------------------


def slow_dpo(rows, pair, beta, smoothing):
    up, down = rows.both(pair)
    m = beta * float(sum(rows.moved(up)) - sum(rows.moved(down)))
    slope = beta * (-(1 - smoothing) * sigmoid(-m) + smoothing * sigmoid(m))
    loss = -(1 - smoothing) * log_sigmoid(m) - smoothing * log_sigmoid(-m)
    return loss, {up: by_token(rows, up, slope), down: by_token(rows, down, -slope)}


def slow_ipo(rows, pair, beta, average):
    up, down = rows.both(pair)
    size = [max(1, len(rows.moved(i))) if average else 1 for i in (up, down)]
    h = float(sum(rows.moved(up)) / size[0] - sum(rows.moved(down)) / size[1])
    away = h - 1 / (2 * beta)
    return away**2, {up: by_token(rows, up, 2 * away / size[0]), down: by_token(rows, down, -2 * away / size[1])}


def slow_orpo(rows, pair, weight):
    up, down = rows.both(pair)
    m = [float(mean(rows.sampled(rows.predicted, i))) for i in (up, down)]
    odds = [math.exp(z) / (1 - math.exp(z)) for z in m]
    z = math.log(odds[0]) - math.log(odds[1])
    slope = -weight * sigmoid(-z)
    dw = (-1 + slope / (1 - math.exp(m[0]))) / len(rows.moved(up))
    dl = -slope / (1 - math.exp(m[1])) / len(rows.moved(down))
    return -m[0] - weight * log_sigmoid(z), {up: by_token(rows, up, dw), down: by_token(rows, down, dl)}


def slow_kind(kind, high, low, beta, smoothing=0.0, margin=0.0, tau=0.05):
    """The loss of one pair as its paper writes it, on floats."""
    u, v, s = beta * high, beta * low, smoothing
    m = u - v - margin
    share = sigmoid(m / tau)
    return {
        "sigmoid": lambda: -(1 - s) * log_sigmoid(m) - s * log_sigmoid(-m),
        "robust": lambda: (-(1 - s) * log_sigmoid(m) + s * log_sigmoid(-m)) / (1 - 2 * s),
        "hinge": lambda: max(0.0, 1 - m),
        "exo": lambda: sigmoid(m) * math.log(sigmoid(m) / (1 - s)) + sigmoid(-m) * math.log(sigmoid(-m) / s),
        "discopop": lambda: -(1 - share) * log_sigmoid(m) + share * math.exp(-m),
        "ipo": lambda: (high - low - 1 / (2 * beta)) ** 2,
        "sppo": lambda: (high - 1 / (2 * beta)) ** 2 + (low + 1 / (2 * beta)) ** 2,
        "nca": lambda: -log_sigmoid(u) - 0.5 * log_sigmoid(-u) - 0.5 * log_sigmoid(-v),
        "bco": lambda: -log_sigmoid(u) - log_sigmoid(-v),
        "apo_zero": lambda: 1 - sigmoid(u) + sigmoid(v),
        "apo_down": lambda: sigmoid(u) + 1 - sigmoid(u - v),
    }[kind]()


def slow_pair(rows, pair, kind, *, reference_free=False, average=False, nll=0.0, **parts):
    """Loss and gradient of a pair: the slopes by central differences."""
    both = rows.both(pair)
    given = [rows.sampled(rows.predicted, i) if reference_free else rows.moved(i) for i in both]
    sizes = [max(1, len(tokens)) if average else 1 for tokens in given]
    high, low = (float(sum(tokens)) / size for tokens, size in zip(given, sizes, strict=True))
    step = 1e-5

    def loss(a, b):
        return slow_kind(kind, a, b, **parts)

    up = (loss(high + step, low) - loss(high - step, low)) / (2 * step) / sizes[0]
    down = (loss(high, low + step) - loss(high, low - step)) / (2 * step) / sizes[1]
    better = rows.sampled(rows.predicted, both[0])
    slopes = {both[0]: by_token(rows, both[0], up), both[1]: by_token(rows, both[1], down)}
    if better:
        slopes[both[0]] = slopes[both[0]] - by_token(rows, both[0], nll / len(better))
    return loss(high, low) - nll * float(mean(better)), slopes


def check_against_differences(rows, loss, **how):
    wanted = [slow_pair(rows, pair, **how) for pair in range(rows.pairs)]
    found, reports, gradient = mean_and_gradient(loss, rows.inputs())
    assert found.tolist() == pytest.approx([wanted[rows.group[i]][0] for i in rows.shuffled], abs=1e-9)
    gradients = {i: g / rows.pairs for _, by_row in wanted for i, g in by_row.items()}
    assert torch.allclose(gradient, rows.spread(gradients), rtol=1e-6, atol=1e-7)
    return reports


def check_pairs(rows, loss, slow):
    wanted = [slow(rows, pair) for pair in range(rows.pairs)]
    found, reports, gradient = mean_and_gradient(loss, rows.inputs())
    assert found.tolist() == pytest.approx([wanted[rows.group[i]][0] for i in rows.shuffled], abs=1e-9)
    gradients = {i: g / rows.pairs for _, by_row in wanted for i, g in by_row.items()}
    assert torch.allclose(gradient, rows.spread(gradients), rtol=1e-9, atol=1e-12)
    return reports


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.0), (2.0, 0.2)])
def test_dpo_is_the_formula_pair_by_pair(seed, beta, smoothing):
    rows = Rows(seed)
    loss = dpo(beta=beta, label_smoothing=smoothing)
    reports = check_pairs(rows, loss, lambda r, p: slow_dpo(r, p, beta, smoothing))
    rewards = {i: beta * float(sum(rows.moved(i))) for i in range(2 * rows.pairs)}
    high = [rewards[rows.both(rows.group[i])[0]] for i in rows.shuffled]
    low = [rewards[rows.both(rows.group[i])[1]] for i in rows.shuffled]
    assert reports["chosen_reward"].tolist() == pytest.approx(high)
    assert reports["rejected_reward"].tolist() == pytest.approx(low)
    assert reports["reward_margin"].tolist() == pytest.approx([a - b for a, b in zip(high, low, strict=True)])
    assert reports["reward_accuracy"].tolist() == [float(a > b) for a, b in zip(high, low, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("average", [True, False])
def test_ipo_is_the_formula_pair_by_pair(seed, average):
    check_pairs(Rows(seed), ipo(beta=0.3, average=average), lambda r, p: slow_ipo(r, p, 0.3, average))


@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("parts", [{}, {"average": True}, {"nll": 0.7}])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_its_formula_pair_by_pair(kind, parts, seed):
    loss = preference_loss(kind, beta=0.4, **KINDS[kind], **parts)
    smoothing = KINDS[kind].get("label_smoothing", 0.0)
    check_against_differences(Rows(seed), loss, kind=kind, beta=0.4, smoothing=smoothing, **parts)


@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("kind", [kind for kind in OF_DIFFERENCE if kind != "ipo"])
def test_parts_of_kinds_of_the_difference(kind, seed):
    loss = preference_loss(kind, beta=0.4, margin=0.3, reference_free=True, tau=0.5, **KINDS[kind])
    smoothing = KINDS[kind].get("label_smoothing", 0.0)
    how = {"margin": 0.3, "reference_free": True, "tau": 0.5}
    check_against_differences(Rows(seed), loss, kind=kind, beta=0.4, smoothing=smoothing, **how)


@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("kind", ["sigmoid", "robust", "exo"])
def test_kinds_that_know_of_wrong_preferences(kind, seed):
    loss = preference_loss(kind, beta=0.4, label_smoothing=0.3)
    check_against_differences(Rows(seed), loss, kind=kind, beta=0.4, smoothing=0.3)


@pytest.mark.parametrize("seed", SEEDS)
def test_simpo_and_cpo_are_parts_of_the_general_loss(seed):
    rows = Rows(seed)
    check_against_differences(
        rows, simpo(beta=2.0, margin=0.6), kind="sigmoid", beta=2.0, margin=0.6, reference_free=True, average=True
    )
    loss = cpo(beta=0.3, nll=0.5, label_smoothing=0.1)
    reports = check_against_differences(
        rows, loss, kind="sigmoid", beta=0.3, smoothing=0.1, nll=0.5, reference_free=True
    )
    nll = [-float(mean(rows.sampled(rows.predicted, rows.both(rows.group[i])[0]))) for i in rows.shuffled]
    assert reports["nll"].tolist() == pytest.approx(nll)


def test_unbiased_dpo_is_that_of_right_preferences_on_average():
    """Robust DPO's whole point: a share of pairs turned round costs nothing in expectation."""
    right, s = Rows(1, pairs=20), 0.2
    turned = Rows(1, pairs=20)
    turned.preferred = [not one for one in turned.preferred]
    loss = preference_loss("robust", beta=0.4, label_smoothing=s)
    mixed = [mean_and_gradient(loss, rows.inputs()) for rows in (right, turned)]
    plain = mean_and_gradient(dpo(beta=0.4), right.inputs())
    for part in (0, 2):
        assert torch.allclose((1 - s) * mixed[0][part] + s * mixed[1][part], plain[part], atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo_is_the_formula_pair_by_pair(seed):
    rows = Rows(seed, shortest=1)
    reports = check_pairs(rows, orpo(weight=0.3), lambda r, p: slow_orpo(r, p, 0.3))
    nll = [-float(mean(rows.sampled(rows.predicted, rows.both(rows.group[i])[0]))) for i in rows.shuffled]
    assert reports["nll"].tolist() == pytest.approx(nll)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", [0.0, 0.7, -3.0])
def test_kto_is_the_formula_row_by_row(seed, point):
    rows = Rows(seed)
    rows.preferred = [i % 3 == 0 for i in range(2 * rows.pairs)]  # no pairs are needed
    loss = kto(beta=0.4, desirable=1.2, undesirable=0.7, reference_point=point)
    assert not loss.groups
    found, reports, gradient = mean_and_gradient(loss, rows.inputs())
    wanted, gradients = {}, {}
    for i in range(2 * rows.pairs):
        above = 0.4 * (float(sum(rows.moved(i))) - max(point, 0.0))
        sign, weight = (1, 1.2) if rows.preferred[i] else (-1, 0.7)
        wanted[i] = weight * (1 - sigmoid(sign * above))
        slope = -weight * sign * 0.4 * sigmoid(above) * sigmoid(-above)
        gradients[i] = by_token(rows, i, slope / (2 * rows.pairs))
    assert found.tolist() == pytest.approx([wanted[i] for i in rows.shuffled])
    assert torch.allclose(gradient, rows.spread(gradients), rtol=1e-9, atol=1e-12)
    assert reports["reward"].tolist() == pytest.approx([0.4 * float(sum(rows.moved(i))) for i in rows.shuffled])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("margin", "center"), [(None, 0.0), ("margin", 0.0), ("margin", 0.03), (None, 0.5)])
def test_bradley_terry_is_the_formula_pair_by_pair(seed, margin, center):
    rows = Rows(seed)
    found, reports, gradient = mean_and_gradient(bradley_terry(margin=margin, center=center), rows.inputs(on="scores"))
    wanted, slopes = {}, {}
    for pair in range(rows.pairs):
        up, down = rows.both(pair)
        high, low = float(rows.scores[up]), float(rows.scores[down])
        z = high - low - (float(rows.margin[up]) if margin else 0.0)
        wanted[up] = wanted[down] = -log_sigmoid(z) + center * (high + low) ** 2
        drawn = 2 * center * (high + low)
        slopes[up], slopes[down] = (drawn - sigmoid(-z)) / rows.pairs, (drawn + sigmoid(-z)) / rows.pairs
    assert found.tolist() == pytest.approx([wanted[i] for i in rows.shuffled])
    assert gradient.tolist() == pytest.approx([slopes[i] for i in rows.shuffled])
    pairs = [rows.both(rows.group[i]) for i in rows.shuffled]
    assert reports["margin"].tolist() == pytest.approx(
        [float(rows.scores[up] - rows.scores[down]) for up, down in pairs]
    )
    assert reports["accuracy"].tolist() == [float(rows.scores[up] > rows.scores[down]) for up, down in pairs]


@pytest.mark.parametrize("name", PAIRED)
def test_the_order_of_rows_says_nothing(name):
    rows, loss = Rows(3, shortest=1), PAIRED[name]()
    on = loss.on
    found, _, _ = mean_and_gradient(loss, rows.inputs(on=on))
    plain, _, _ = mean_and_gradient(loss, rows.inputs(on=on, order=range(2 * rows.pairs)))
    assert found.tolist() == pytest.approx([float(plain[i]) for i in rows.shuffled])
    assert plain[0::2].tolist() == plain[1::2].tolist()


# -- the trainers of trl ----------------------------------------------------------------------------------------------


def trainer(**settings):
    """What a trainer's loss looks at besides the batch."""
    model = SimpleNamespace(training=True)
    gathered = SimpleNamespace(device="cpu", gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor)
    return SimpleNamespace(
        model=model,
        accelerator=gathered,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def forward(logprobs):
    """A model that gives these log-probabilities [rows, longest]."""
    blank = torch.zeros_like(logprobs.detach())
    outputs = SimpleNamespace(log_probs=logprobs, entropy=blank, mean_logits=blank, is_top1=blank.bool())
    return lambda **_: outputs


def trl_dpo(rows, loss_type, pairs=None, **settings):
    module = pytest.importorskip("trl.trainer.dpo_trainer")
    order, mask, logprobs, ref = rows.padded()
    half = rows.pairs
    at = list(range(2 * half)) if pairs is None else [*pairs, *(half + p for p in pairs)]
    sums = ref.sum(1)[at]
    inputs = {
        "input_ids": torch.zeros_like(mask)[at],
        "attention_mask": torch.ones_like(mask)[at],
        "completion_mask": mask[at],
        "ref_chosen_logps": sums[: len(at) // 2],
        "ref_rejected_logps": sums[len(at) // 2 :],
    }
    me = trainer(
        loss_types=[loss_type],
        loss_weights=[1.0],
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        **settings,
    )
    loss = module.DPOTrainer._compute_loss(me, forward((logprobs * mask[:, 1:])[at]), inputs, False)
    loss.backward()
    return loss.detach(), rows.unpadded(logprobs.grad, order), me._metrics["train"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("loss_type", "made"), [("sigmoid", dpo), ("ipo", ipo)])
def test_dpo_and_ipo_are_those_of_trl(seed, loss_type, made):
    rows = Rows(seed)
    wanted, slopes, metrics = trl_dpo(rows, loss_type, beta=0.3, label_smoothing=0.0)
    found, reports, gradient = mean_and_gradient(made(beta=0.3), rows.inputs())
    assert float(found.mean()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert torch.allclose(gradient, slopes, rtol=1e-6, atol=1e-9)
    if made is dpo:
        named = {"chosen_reward": "chosen", "rejected_reward": "rejected", "reward_margin": "margins"}
        for name, theirs in named.items():
            assert float(reports[name].mean()) == pytest.approx(metrics[f"rewards/{theirs}"][0], abs=1e-6)


#: What trl calls a kind, and what it takes there.
THEIRS = {
    "hinge": ("hinge", {}),
    "exo_pair": ("exo", {"label_smoothing": 0.1}),
    "nca_pair": ("nca", {}),
    "robust": ("robust", {"label_smoothing": 0.1}),
    "bco_pair": ("bco", {}),
    "sppo_hard": ("sppo", {}),
    "apo_zero": ("apo_zero", {}),
    "apo_down": ("apo_down", {}),
    "discopop": ("discopop", {"tau": 0.2}),
    "sigmoid_norm": ("sigmoid", {"average": True}),
}


@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("name", THEIRS)
def test_each_kind_is_that_of_trl(name, seed):
    kind, parts = THEIRS[name]
    rows, smoothing = Rows(seed), parts.get("label_smoothing", 0.0)
    args = SimpleNamespace(discopop_tau=parts.get("tau"))
    wanted, slopes, _ = trl_dpo(rows, name, beta=0.3, label_smoothing=smoothing, args=args)
    found, _, gradient = mean_and_gradient(preference_loss(kind, beta=0.3, **parts), rows.inputs())
    assert float(found.mean()) == pytest.approx(float(wanted), rel=1e-6)
    assert torch.allclose(gradient, slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["simpo", "sigmoid", "hinge"])
def test_losses_without_a_reference_are_those_of_trl(loss_type, seed):
    """The part of CPO on pairs; the other one is a mean over all tokens there, of the prompt too."""
    module = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    rows = Rows(seed, shortest=1)
    order, mask, logprobs, _ = rows.padded()
    sampled = mask[:, 1:]
    sums = (logprobs * sampled).sum(1)
    high, low = (sums / sampled.sum(1) if loss_type == "simpo" else sums).chunk(2)
    me = SimpleNamespace(
        alpha=0.0,
        loss_type=loss_type,
        beta=0.3,
        simpo_gamma=0.2,
        label_smoothing=0.1,
        accelerator=SimpleNamespace(device="cpu"),
    )
    if loss_type != "sigmoid":
        me.label_smoothing = 0.0
    losses, chosen, rejected = module.CPOTrainer.cpo_loss(me, high, low)
    losses.mean().backward()
    loss = {
        "simpo": simpo(beta=0.3, margin=0.2),
        "sigmoid": cpo(beta=0.3, nll=0.0, label_smoothing=0.1),
        "hinge": preference_loss("hinge", beta=0.3, reference_free=True),
    }[loss_type]
    found, reports, gradient = mean_and_gradient(loss, rows.inputs())
    assert float(found.mean()) == pytest.approx(float(losses.mean().detach()), rel=1e-6)
    assert torch.allclose(gradient, rows.unpadded(logprobs.grad, order), rtol=1e-6, atol=1e-9)
    for name, theirs in (("chosen_reward", chosen), ("rejected_reward", rejected)):
        assert float(reports[name].mean()) == pytest.approx(float(theirs.mean()), rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_conservative_dpo_is_what_trl_makes_of_single_pairs(seed):
    """trl has it inside ``aot``, which sorts the pairs of a batch first: of one pair there is nothing to sort."""
    rows = Rows(seed)
    made = [trl_dpo(rows, "aot", [pair], beta=0.3, label_smoothing=0.2) for pair in range(rows.pairs)]
    found, _, gradient = mean_and_gradient(dpo(beta=0.3, label_smoothing=0.2), rows.inputs())
    assert float(found.mean()) == pytest.approx(mean([float(loss) for loss, _, _ in made]), rel=1e-6)
    slopes = torch.stack([slopes for _, slopes, _ in made]).mean(0)
    assert torch.allclose(gradient, slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drift", [-1.0, 2.0])
def test_kto_is_that_of_trl(seed, drift):
    module = pytest.importorskip("trl.trainer.kto_trainer")
    rows = Rows(seed)
    order, mask, logprobs, ref = rows.padded()
    apart = torch.randn(2 * rows.pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + drift
    me = trainer(
        loss_type="kto",
        calculate_KL=True,
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.6,
        _compute_kl_logps=lambda model, batch: apart,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": torch.tensor([rows.preferred[i] for i in order]),
        "ref_logps": ref.sum(1),
        "ref_KL_logps": torch.zeros(2 * rows.pairs, dtype=torch.float64),
    }
    wanted = module.KTOTrainer._compute_loss(me, forward(logprobs * mask[:, 1:]), inputs, False)
    wanted.backward()
    loss = kto(beta=0.3, desirable=1.3, undesirable=0.6, reference_point=float(apart.mean()))
    found, _, gradient = mean_and_gradient(loss, rows.inputs())
    assert float(found.mean()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert torch.allclose(gradient, rows.unpadded(logprobs.grad, order), rtol=1e-6, atol=1e-9)


class Exact(torch.Tensor):
    """Float64 that stays so: trl goes down to float32 here."""

    def float(self):
        return self


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo_has_the_odds_of_trl(seed):
    """Its first term is not compared: trl's is a mean over the tokens of prompts and responses."""
    module = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    rows = Rows(seed, shortest=1)
    order, mask, logprobs, _ = rows.padded()
    means = (logprobs * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)
    high, low = means.as_subclass(Exact).chunk(2)
    me = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    losses, *_ = module.ORPOTrainer.odds_ratio_loss(me, high, low)
    wanted = (-losses - high).mean()
    wanted.backward()
    found, _, gradient = mean_and_gradient(orpo(weight=0.3), rows.inputs())
    assert float(found.mean()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert torch.allclose(gradient, rows.unpadded(logprobs.grad, order), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("margin", "center"), [(None, None), ("margin", 0.02)])
def test_bradley_terry_is_that_of_trl(margin, center):
    module = pytest.importorskip("trl.trainer.reward_trainer")
    rows = Rows(1)
    order, mask, *_ = rows.padded()
    scores = rows.scores[order].clone().requires_grad_()
    me = trainer(args=SimpleNamespace(center_rewards_coefficient=center))
    inputs = {"attention_mask": torch.ones_like(mask)} | (
        {"margin": rows.margin[order[: rows.pairs]]} if margin else {}
    )
    model = lambda **_: SimpleNamespace(logits=scores[:, None])  # noqa: E731
    wanted = module.RewardTrainer.compute_loss(me, model, inputs)
    wanted.backward()
    found, _, gradient = mean_and_gradient(bradley_terry(margin=margin, center=center or 0.0), rows.inputs(on="scores"))
    assert float(found.mean()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert scores.grad is not None
    at = {i: float(scores.grad[n]) for n, i in enumerate(order)}
    assert gradient.tolist() == pytest.approx([at[i] for i in rows.shuffled])


# -- odd input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("made", [dpo, ipo, orpo, kto, simpo, cpo, *(of_kind(kind, nll=0.5) for kind in KINDS)])
@pytest.mark.parametrize("huge", [100.0, 1e30, math.inf])
def test_all_is_finite_where_probabilities_vanish(made, huge, dtype):
    rows = Rows(0, pairs=12)
    for i in range(0, 24, 4):
        if rows.lengths[i]:
            rows.predicted[i][0] = -huge
            rows.ref[i][-1] = -huge
    x = rows.inputs()
    x.predicted = x.predicted.detach().to(dtype).requires_grad_()
    x.fields = {n: f.to(dtype) if f.is_floating_point() else f for n, f in x.fields.items()}
    found, reports, gradient = mean_and_gradient(made(), x)
    assert found.dtype == dtype
    assert all(torch.isfinite(value).all() for value in (found, gradient, *reports.values()))
    assert not gradient[~x.mask].any()


@pytest.mark.parametrize("made", [dpo, ipo, orpo, kto, simpo, cpo, *(of_kind(kind, nll=0.5) for kind in KINDS)])
def test_rows_without_a_sampled_token_are_finite(made):
    rows = Rows(0, pairs=2)
    rows.lengths = [0, 0, 3, 2]
    rows.predicted = [torch.full((n,), -0.5, dtype=torch.float64) for n in rows.lengths]
    rows.ref = [torch.full((n,), -0.7, dtype=torch.float64) for n in rows.lengths]
    rows.mask = [torch.zeros(n, dtype=torch.bool) for n in rows.lengths]
    found, reports, gradient = mean_and_gradient(made(), rows.inputs())
    assert all(torch.isfinite(value).all() for value in (found, *reports.values()))
    assert not gradient.any()


def test_a_certain_response_has_finite_odds():
    rows = Rows(0, pairs=1, shortest=1)
    rows.predicted = [torch.zeros(n, dtype=torch.float64) for n in rows.lengths]
    found, reports, gradient = mean_and_gradient(orpo(), rows.inputs())
    assert found.tolist() == pytest.approx([0.1 * math.log(2)] * 2)
    assert reports["log_odds"].tolist() == [0.0, 0.0]
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", PAIRED)
def test_prompts_without_a_pair_are_an_error(name):
    loss = PAIRED[name]()
    rows = Rows(2, pairs=4)
    rows.preferred[0] = rows.preferred[1] = True
    with pytest.raises(ProgramError, match=rf"rl\.{name}: 1 of 4 prompts have not exactly one preferred row") as error:
        loss.compute(rows.inputs(on=loss.on))
    assert "rl.pairs" in str(error.value.fix)
    with pytest.raises(ProgramError, match=r"2 of 4 prompts"):  # one partner is missing, another prompt has none
        loss.compute(rows.inputs(on=loss.on, order=[0, 1, 2, 3, 4, 6, 7]))
    rows = Rows(2, pairs=4)
    rows.group[7] = 0
    with pytest.raises(ProgramError, match=r"2 of 4 prompts"):  # three rows, and one
        loss.compute(rows.inputs(on=loss.on))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: dpo(beta=0.0), r"rl\.dpo: beta=0.0 is not a number above 0"),
        (lambda: dpo(label_smoothing=0.5), r"rl\.dpo: label_smoothing=0.5 is not a number of at least 0 and below 0.5"),
        (lambda: dpo(label_smoothing=-0.1), r"label_smoothing=-0.1"),
        (lambda: ipo(beta=-1), r"rl\.ipo: beta=-1 is not a number above 0"),
        (lambda: orpo(weight=-1), r"rl\.orpo: weight=-1 is not a number of at least 0"),
        (lambda: kto(beta=math.nan), r"rl\.kto: beta=nan is not a number above 0"),
        (lambda: kto(undesirable=-1.0), r"rl\.kto: undesirable=-1.0 is not a number of at least 0"),
        (lambda: simpo(margin=-1), r"rl\.simpo: margin=-1 is not a number of at least 0"),
        (lambda: cpo(nll=-1), r"rl\.cpo: nll=-1 is not a number of at least 0"),
        (lambda: cpo(label_smoothing=0.7), r"rl\.cpo: label_smoothing=0.7 is not a number of at least 0 and"),
        (lambda: preference_loss("hing"), r"rl\.preference_loss: kind='hing' is none of sigmoid, robust, hinge"),
        (lambda: preference_loss(beta=0), r"rl\.preference_loss: beta=0 is not a number above 0"),
        (lambda: preference_loss("discopop", tau=0), r"rl\.preference_loss: tau=0 is not a number above 0"),
        (lambda: preference_loss("exo"), r"kind='exo' has no loss at label_smoothing=0"),
        (lambda: preference_loss("hinge", label_smoothing=0.1), r"label_smoothing=0.1 is no part of kind='hinge'"),
        (lambda: preference_loss("ipo", margin=0.1), r"margin=0.1 is no part of kind='ipo'"),
        (lambda: preference_loss("nca", reference_free=True), r"reference_free=True is no part of kind='nca'"),
        (lambda: bradley_terry(center=-0.1), r"rl\.bradley_terry: center=-0.1 is not a number of at least 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, what):
    with pytest.raises(ProgramError, match=what) as error:
        make()
    assert error.value.fix


def test_what_they_read_and_are():
    for loss in (dpo(), ipo(), orpo(), kto(), simpo(), cpo(), preference_loss(), bradley_terry()):
        assert (loss.per, loss.aggregate, loss.corrects_stale) == ("row", "row-mean", True)
        assert loss.groups == (loss.name != "kto")
        assert loss.on == ("scores" if loss.name == "bradley_terry" else "logprobs")
        assert ("ref_logprobs" in loss.reads) == (loss.name in ("dpo", "ipo", "kto", "preference_loss"))
        assert "preferred: bool[]" in loss.reads
    assert "ref_logprobs" not in preference_loss(reference_free=True).reads
    assert str(preference_loss("hinge")) == "preference_loss(kind=hinge, beta=0.1)"
    assert bradley_terry(margin="gap").reads.endswith("gap: f32[]")
