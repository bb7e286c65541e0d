"""Policy losses in parts against slow loops over tokens, loss and gradient in float64; presets; covariance selection."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.errors import FlowError, ProgramError
from flowrl.rl import gates
from flowrl.rl import loss_spec as spec
from flowrl.rl.math.losses import token_weights

torch.set_num_threads(1)
INF = float("inf")
RATIOS = ("token", "sequence", "geometric", "geometric-token")
ANCHORS = ("rollout", "old", "loglinear")
AGGREGATES = spec.AGGREGATES
HOWS = ("weigh", "truncate", "clip", "mask", "reject", "veto")
PER_TOKEN = ("p", "rollout", "old", "ref", "advantages", "entropy", "selected", "versions", "mask", "weights")


# -- rows, as lists of numbers -------------------------------------------------------------------------------------


class Rows:
    """Random rows as lists. Besides others: an empty one, one whose tokens are all masked, and one of one token.

    ``spread``: how far the policies are apart, in nats. ``wild``: some log-ratios are infinite or huge.
    """

    version = 5

    def __init__(self, seed, rows=4, *, spread=0.4, wild=False, by_row=False):
        draw = torch.Generator().manual_seed(seed)

        def numbers(n, scale=1.0):
            return (scale * torch.randn(n, generator=draw, dtype=torch.float64)).tolist()

        self.lengths = [0, 3, 1, *torch.randint(0, 7, (rows,), generator=draw).tolist()]
        self.rows = []
        for i, n in enumerate(self.lengths):
            p = [-abs(x) - 0.05 for x in numbers(n)]
            near = {
                name: [min(x + d, -0.02) for x, d in zip(p, numbers(n, spread), strict=True)]
                for name in ("rollout", "old", "ref")
            }
            mask = (torch.rand(n, generator=draw) < 0.7).tolist()
            row = SimpleNamespace(
                p=p,
                advantages=numbers(1) * n if by_row else numbers(n),
                entropy=[abs(x) for x in numbers(n)],
                selected=(torch.rand(n, generator=draw) < 0.4).tolist(),
                versions=torch.randint(2, 6, (n,), generator=draw).tolist(),
                weights=[abs(x) for x in numbers(n)],
                mask=[False] * n if i == 1 else [True] * n if i == 2 else mask,
                **near,
            )
            if wild:
                for name in ("rollout", "old", "ref"):
                    odd = torch.randint(0, 12, (n,), generator=draw).tolist()
                    values = getattr(row, name)
                    for t, kind in enumerate(odd):
                        values[t] = {0: -INF, 1: INF, 2: -1e30, 3: 700.0, 4: -25.0}.get(kind, values[t])
            self.rows.append(row)

    def column(self, name, dtype=torch.float64):
        return torch.tensor([x for row in self.rows for x in getattr(row, name)], dtype=dtype)

    def inputs(self, *, entropy=True):
        lengths = torch.tensor(self.lengths)
        return rl.LossInputs(
            predicted=self.column("p").requires_grad_(),
            mask=self.column("mask", torch.bool),
            fields={
                "rollout_logprobs": self.column("rollout"),
                "old_logprobs": self.column("old"),
                "ref_logprobs": self.column("ref"),
                "advantages": self.column("advantages"),
                "selected": self.column("selected", torch.bool),
                "versions": self.column("versions", torch.int32),
                "weights": self.column("weights"),
            },
            lengths=lengths,
            row=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
            entropy=self.column("entropy").requires_grad_() if entropy else None,
            group=torch.arange(len(lengths)) // 2,
            version=self.version,
        )

    def sampled(self):
        """Each row's sampled tokens as a record of lists; ``p`` and ``entropy`` are scalars with gradient."""
        for row in self.rows:
            at = [t for t, inside in enumerate(row.mask) if inside]
            yield at, SimpleNamespace(**{name: [getattr(row, name)[t] for t in at] for name in PER_TOKEN})


# -- the equations, one token at a time ------------------------------------------------------------------------------


def scalar(x):
    return torch.tensor(float(x), dtype=torch.float64)


def moved(new, old):
    """``new - old``; a constant 20 or -20 beyond that, 0 between two of the same infinity."""
    difference: torch.Tensor = new - old
    return scalar(0) if difference.isnan() else bounded(difference)


def bounded(x):
    return x if x.abs() <= 20 else scalar(math.copysign(20, x.detach()))


def mean(numbers) -> Any:
    return sum(numbers) / len(numbers)


def at_level(logs, level) -> list[torch.Tensor]:
    """log w of each token of a row."""
    if level == "token":
        return logs
    if level == "sequence":
        return [bounded(torch.stack(logs).sum())] * len(logs)
    if level == "geometric":
        return [mean(logs)] * len(logs)
    return [mean(logs).detach() + (x - x.detach()) for x in logs]


def slow_anchor(row, anchor, version):
    """log p of the anchor for each token, without gradient."""
    if anchor != "loglinear":
        return [scalar(x) for x in getattr(row, anchor)]
    found = []
    for p, sampled, v in zip(row.p, row.rollout, row.versions, strict=True):
        alpha = (version - v) / (version + 1 - v)
        found.append(scalar(sampled) + alpha * (p.detach() - sampled))
    return found


def slow_nearer(row, anchor, version):
    return [p.detach() for p in row.p] if anchor == "rollout" else slow_anchor(row, anchor, version)


def slow_kept(row, divergence, level, limit, negative, of, anchor, version):
    """1.0 or 0.0 per token."""
    nearer = slow_nearer(row, "rollout" if of == "policy" else anchor, version)
    found = []
    for a, b in zip(nearer, row.rollout, strict=True):
        d = float(moved(a, scalar(b)))
        apart = abs(float(a.exp()) - float(scalar(b).exp()))
        apart = 0.0 if math.isnan(apart) else apart
        found.append({"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "tv": apart}[divergence])
    by_row = {"sequence": sum, "mean": mean, "max": max}.get(level)
    found = found if by_row is None else [by_row(found)] * len(found)
    return [float(x <= limit or (negative and a >= 0)) for x, a in zip(found, row.advantages, strict=True)]


def slow_weights(row, corrections, anchor, version):
    """The product of the corrections' factors, one number per token."""
    logs = [moved(a, b) for a, b in zip(slow_nearer(row, anchor, version), row.rollout, strict=True)]
    weights = [1.0] * len(logs)
    for part in corrections:
        if part == "weights" or len(part) == 5:
            factors = row.weights if part == "weights" else slow_kept(row, *part, anchor, version)
            weights = [w * factor for w, factor in zip(weights, factors, strict=True)]
            continue
        level, how, low, high = part
        for t, log in enumerate(at_level(logs, level)):
            w = math.exp(log)
            inside = low <= w <= high
            weights[t] *= {
                "weigh": w,
                "truncate": min(w, high),
                "clip": max(low, min(w, high)),
                "mask": w if inside else 0.0,
                "reject": 1.0 if inside else 0.0,
                "veto": 0.0 if any(math.exp(x) < low for x in logs) else 1.0,
            }[how]
    return weights


def clipped(w, low, high):
    return w if low <= w <= high else scalar(low if w < low else high)


# A gate is a function of one token: log w and w at the loss's level, and of the row: p, before (log q), a, selected.


def slow_ppo(k, t, low=0.2, high=0.2, dual=None):
    surrogate = min(k.w[t] * k.a[t], clipped(k.w[t], 1 - low, 1 + high) * k.a[t])
    if dual is not None and k.a[t] < 0:
        surrogate = max(surrogate, scalar(dual * k.a[t]))
    return -surrogate


def slow_cispo(k, t, low=0.0, high=5.0):
    return -clipped(k.w[t].detach(), low, high) * k.a[t] * k.p[t]


def slow_surrogate(k, t):
    return -k.w[t] * k.a[t]


def slow_vespo(k, t, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    power, decay = positive if k.a[t] >= 0 else negative
    w = float(k.w[t].detach())
    return -(w**power) * math.exp(decay * (1 - w)) * k.a[t] * k.p[t]


def slow_sapo(k, t, positive=1.0, negative=1.05):
    tau = positive if k.a[t] > 0 else negative
    return -(4 / tau) * k.a[t] / (1 + torch.exp(-tau * (k.w[t] - 1)))


def slow_gmpo(k, t, low=0.4, high=0.4):
    a = mean(k.a)
    logs = []
    for log in k.log:
        held = clipped(log, -low, high)
        logs.append(min(log, held) if a >= 0 else max(log, held))
    return -a * torch.exp(mean(logs))


def slow_dppo(k, t, kind="tv", low=0.15, high=0.15, cap=20.0):
    p, q = math.exp(k.p[t].detach()), math.exp(k.before[t])
    far = abs(p - q)
    if kind == "kl":
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (k.a[t] > 0 and p > q and far > high) or (k.a[t] < 0 and p < q and far > low):
        return 0 * k.p[t]
    return -min(float(k.w[t].detach()), cap) * k.a[t] * k.p[t]


def slow_reinforce(k, t):
    return -k.a[t] * k.p[t]


def slow_quadratic(k, t, temperature=0.1):
    return -k.a[t] * k.p[t] + temperature / 2 * k.log[t] ** 2


def slow_topr(k, t, low=0.0, high=1.0):
    w = 1.0 if k.a[t] > 0 else float(clipped(k.w[t].detach(), low, high))
    return -w * k.a[t] * k.p[t]


def slow_clip_cov(k, t, clip=1.0):
    return 0 * k.p[t] if k.selected[t] else slow_ppo(k, t, clip, clip)


def slow_kl_cov(k, t, weight=1.0):
    return -k.w[t] * k.a[t] + (weight * k.log[t].abs() if k.selected[t] else 0)


GATES = {
    "ppo": (gates.ppo(), slow_ppo, {}),
    "ppo-high": (gates.ppo(0.1, high=0.28), slow_ppo, {"low": 0.1, "high": 0.28}),
    "ppo-dual": (gates.ppo(0.2, dual=1.3), slow_ppo, {"dual": 1.3}),
    "cispo": (gates.cispo(1.2), slow_cispo, {"high": 1.2}),
    "cispo-low": (gates.cispo(1.2, low=0.7), slow_cispo, {"low": 0.7, "high": 1.2}),
    "surrogate": (gates.surrogate(), slow_surrogate, {}),
    "vespo": (gates.vespo(), slow_vespo, {}),
    "vespo-own": (
        gates.vespo((1.0, 0.5), (0.7, 1.5)),
        slow_vespo,
        {"positive": (1.0, 0.5), "negative": (0.7, 1.5)},
    ),
    "sapo": (gates.sapo(), slow_sapo, {}),
    "sapo-own": (gates.sapo(0.5, 2.0), slow_sapo, {"positive": 0.5, "negative": 2.0}),
    "gmpo": (gates.gmpo(), slow_gmpo, {}),
    "gmpo-high": (gates.gmpo(0.1, high=0.3), slow_gmpo, {"low": 0.1, "high": 0.3}),
    "dppo-tv": (gates.dppo(low=0.05, cap=1.5), slow_dppo, {"low": 0.05, "high": 0.05, "cap": 1.5}),
    "dppo-kl": (gates.dppo("kl", low=0.01, high=0.02), slow_dppo, {"kind": "kl", "low": 0.01, "high": 0.02}),
    "reinforce": (gates.reinforce(), slow_reinforce, {}),
    "quadratic": (gates.quadratic(0.3), slow_quadratic, {"temperature": 0.3}),
    "topr": (gates.topr(), slow_topr, {}),
    "topr-own": (gates.topr(0.5, 1.5), slow_topr, {"low": 0.5, "high": 1.5}),
    "clip_cov": (gates.clip_cov(0.3), slow_clip_cov, {"clip": 0.3}),
    "kl_cov": (gates.kl_cov(0.7), slow_kl_cov, {"weight": 0.7}),
}


def slow_kl(p, ref, say, w):
    """The KL of one token; ``w`` its ratio to the policy that sampled."""
    d = moved(scalar(ref), p)
    kinds = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}
    value, bound = kinds[say.get("kl_kind", "k3")], say.get("kl_bound")
    if bound is not None and abs(value) > bound:
        value = scalar(math.copysign(bound, value.detach()))
    if say.get("kl_gradient"):
        other = kinds[say["kl_gradient"]]
        value, w = value.detach() + (other - other.detach()), w.detach()
    return value * w if say.get("kl_weighted") else value


def slow_tokens(rows, gate, say):
    """Losses of the sampled tokens by row, and the leaves: p and entropy by row and place."""
    _, function, parameters = GATES[gate]
    anchor = say.get("anchor", "rollout")
    found, leaves = {}, {}
    for i, (places, row) in enumerate(rows.sampled()):
        row.p = [scalar(x).requires_grad_() for x in row.p]
        row.entropy = [scalar(x).requires_grad_() for x in row.entropy]
        leaves |= {(i, t): (p, h) for t, p, h in zip(places, row.p, row.entropy, strict=True)}
        if not places:
            continue
        before = slow_anchor(row, anchor, rows.version)
        logs = [moved(p, b) for p, b in zip(row.p, before, strict=True)]
        log = at_level(logs, say.get("ratio", "token"))
        w = [torch.exp(x) for x in log]
        by_sampler = w
        if anchor not in ("rollout", "sampling"):
            of_rollout = [moved(p, b) for p, b in zip(row.p, slow_anchor(row, "rollout", rows.version), strict=True)]
            by_sampler = [torch.exp(x) for x in at_level(of_rollout, say.get("ratio", "token"))]
        known = SimpleNamespace(p=row.p, before=before, a=row.advantages, log=log, w=w, selected=row.selected)
        weights = slow_weights(row, say.get("corrections", ()), anchor, rows.version)
        losses = []
        for t in range(len(places)):
            one = weights[t] * function(known, t, **parameters)
            if say.get("only"):
                one = one * float(getattr(row, say["only"])[t])
            if say.get("kl"):
                one = one + say["kl"] * slow_kl(row.p[t], row.ref[t], say, by_sampler[t])
            if say.get("entropy"):
                one = one - say["entropy"] * row.entropy[t]
            losses.append(one)
        found[i] = losses
    return found, leaves


def slow_aggregate(found, aggregate, norm):
    by_row = list(found.values())
    tokens = [x for losses in by_row for x in losses]
    by_prompt = [[x for i, losses in found.items() if i // 2 == prompt for x in losses] for prompt in range(99)]
    if not tokens:
        return scalar(0)
    return {
        "token-mean": lambda: mean(tokens),
        "token-sum": lambda: sum(tokens),
        "seq-mean-token-mean": lambda: mean([mean(losses) for losses in by_row]),
        "seq-mean-token-sum": lambda: mean([sum(losses) for losses in by_row]),
        "seq-mean-token-sum-norm": lambda: mean([sum(losses) / norm for losses in by_row]),
        "prompt-mean": lambda: mean([mean(losses) for losses in by_prompt if losses]),
    }[aggregate]()


def slow(rows, gate, say):
    """The loss as one number, its gradient by token, and that of the entropy: [total] each."""
    by_row, leaves = slow_tokens(rows, gate, say)
    total = slow_aggregate(by_row, say.get("aggregate", "token-mean"), say.get("norm"))
    flat = [x for pair in leaves.values() for x in pair]
    by_leaf = iter(torch.autograd.grad(total, flat, allow_unused=True) if total.requires_grad else [None] * len(flat))
    gradients = {place: [0.0 if g is None else float(g) for g in (next(by_leaf), next(by_leaf))] for place in leaves}
    places = [(i, t) for i, n in enumerate(rows.lengths) for t in range(n)]
    both = [gradients.get(place, (0.0, 0.0)) for place in places]
    return float(total.detach()), [g for g, _ in both], [h for _, h in both]


def correction_of(part):
    """Of (level, how, low, high), of (divergence, level, limit, negative, of), or of the name of a field."""
    if isinstance(part, str):
        return part
    if len(part) == 4:
        used = {"weigh": (), "truncate": ("high",), "veto": ("low",)}.get(part[1], ("low", "high"))
        bounds = dict(zip(("low", "high"), part[2:], strict=True))
        level = "token" if part[1] == "veto" else part[0]  # it has no other
        return rl.correct(level, part[1], **{name: bounds[name] for name in used})
    return rl.reject(*part[:2], limit=part[2], negative=part[3], of=part[4])


def fast(rows, gate, say):
    """The same by ``rl.policy_loss``; and its reports."""
    asked = {name: value for name, value in say.items() if name != "corrections"}
    corrections = [correction_of(part) for part in say.get("corrections", ())]
    loss = rl.policy_loss(GATES[gate][0], correction=corrections, **asked)
    x = rows.inputs(entropy=loss.needs_entropy)
    read = {name.partition(":")[0].strip() for name in loss.reads.split(",")}
    x.fields = {name: field for name, field in x.fields.items() if name in read}  # and no other
    return whole(loss, x)


def whole(loss, x):
    """Loss, gradients of p and of the entropy, reports: as an update aggregates a loss."""
    losses, reports = loss.compute(x)
    assert losses.shape == x.mask.shape and losses.isfinite().all()
    assert all(r.shape == x.mask.shape and not r.requires_grad and r.isfinite().all() for r in reports.values())
    weights = token_weights(x.mask, x.row, len(x.lengths), loss.aggregate, loss.norm, x.group)
    total = (losses * weights).sum()
    if total.requires_grad:
        total.backward()
    gradients = [None if t is None or t.grad is None else t.grad for t in (x.predicted, x.entropy)]
    assert all(g is None or g.isfinite().all() for g in gradients)
    p, h = [[0.0] * len(x.mask) if g is None else g.tolist() for g in gradients]
    return float(total.detach()), p, h, reports


def fits(gate, say):
    """What one may say: a gate by token takes no other ratio, and no ratio to the engine is weighed twice."""
    made = GATES[gate][0]
    weighs = any(
        part == "weights" or (len(part) == 4 and part[1] not in ("reject", "veto"))
        for part in say.get("corrections", ())
    )
    twice = weighs and made.follows and say.get("anchor", "rollout") == "rollout"
    return not twice and (not made.by_token or say.get("ratio", "token") == "token")


def fitting(gate, say):
    if GATES[gate][0].by_token:
        say = {**say, "ratio": "token"}
    if say.get("kl_kind") == "k2" and not say.get("kl_gradient"):
        say = {**say, "kl_weighted": False}  # refused
    return say if fits(gate, say) else {**say, "anchor": "old"}


def agree(rows, gate, **say):
    found, wanted = fast(rows, gate, say), slow(rows, gate, say)
    for mine, theirs in zip(found, wanted, strict=False):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    return found[3]


# -- each part ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "ratio"), [(gate, ratio) for gate in GATES for ratio in RATIOS if fits(gate, {"ratio": ratio})]
)
def test_each_gate_at_each_ratio(gate, ratio):
    for seed in range(3):
        agree(Rows(seed), gate, ratio=ratio)
        agree(Rows(seed, by_row=True, spread=0.1), gate, ratio=ratio)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("gate", GATES)
def test_each_anchor(gate, anchor):
    for ratio in ("token", "geometric"):
        if fits(gate, {"ratio": ratio}):
            agree(Rows(3), gate, anchor=anchor, ratio=ratio)


def test_the_loglinear_anchor_is_the_engine_for_fresh_rows_and_nears_the_policy_for_old_ones():
    rows = Rows(4)
    for row in rows.rows:
        row.versions = [Rows.version] * len(row.p)
    fresh = fast(rows, "ppo", {"anchor": "loglinear"})
    assert fresh[:2] == fast(rows, "ppo", {"anchor": "rollout"})[:2]
    for row in rows.rows:
        row.versions = [-1_000_000] * len(row.p)
    ratio = fast(rows, "ppo", {"anchor": "loglinear"})[3]["ratio"]
    assert ratio.tolist() == pytest.approx([1.0] * len(ratio), abs=1e-5)


def test_a_token_of_newer_weights_counts_as_fresh():
    rows = Rows(4)
    for row in rows.rows:
        row.versions = [Rows.version + 1] * len(row.p)
    found, wanted = (fast(rows, "ppo", {"anchor": anchor}) for anchor in ("loglinear", "rollout"))
    assert found[:2] == wanted[:2]


@pytest.mark.parametrize(
    ("how", "level"),
    [(how, level) for how in HOWS for level in (("token",) if how == "veto" else ("token", "sequence", "geometric"))],
)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_each_correction(how, level, anchor):
    for seed in range(2):
        for gate in ("ppo", "reinforce"):
            say = {"anchor": anchor, "corrections": [(level, how, 0.8, 1.25)]}
            if fits(gate, say):
                assert "weight" in agree(Rows(seed), gate, **say)


def test_several_corrections_are_multiplied():
    many = [
        ("token", "truncate", 0.0, 1.5),
        ("geometric", "reject", 0.7, 1.4),
        ("sequence", "clip", 0.5, 2.0),
        ("token", "veto", 0.3, INF),
        ("token", "mask", 0.4, 1.6),
    ]
    for seed in range(6):
        agree(Rows(seed), "ppo", anchor="old", corrections=many[: 2 + seed % 4])


def test_bounds_are_inside():
    rows = Rows(4)
    for row in rows.rows:
        row.rollout = list(row.p)  # every ratio is 1
    for how in ("mask", "reject", "veto"):
        reports = fast(rows, "reinforce", {"corrections": [("token", how, 1.0, 1.0)]})[3]
        assert reports["weight"].tolist() == [1.0] * len(reports["weight"])


def test_left_out_tokens_keep_their_place_in_the_denominator():
    rows = Rows(2)
    rejected = [("token", "reject", 2.0, 3.0)]  # nothing is in there
    for row in rows.rows:
        row.old = list(row.rollout)
    loss, gradient, _, reports = fast(rows, "ppo", {"anchor": "old", "corrections": rejected})
    assert loss == 0 and not any(gradient) and not reports["weight"].any()
    rows.rows[2].old[0] = rows.rows[2].rollout[0] + math.log(2.5)
    found = fast(rows, "reinforce", {"anchor": "old", "corrections": rejected})[1]
    sampled = sum(sum(row.mask) for row in rows.rows)
    assert [g for g in found if g] == pytest.approx([-rows.rows[2].advantages[0] / sampled])


def test_a_veto_takes_the_whole_row_and_no_other():
    rows = Rows(5)
    for row in rows.rows:
        row.rollout = list(row.p)
    bad = next(i for i, row in enumerate(rows.rows) if sum(row.mask) > 2)
    place = rows.rows[bad].mask.index(True)
    rows.rows[bad].rollout[place] += 10
    weight = fast(rows, "reinforce", {"corrections": [("token", "veto", 1e-3, INF)]})[3]["weight"]
    start = sum(rows.lengths[:bad])
    left_out = range(start, start + rows.lengths[bad])
    assert [t for t, w in enumerate(weight.tolist()) if w == 0] == list(left_out)


def test_a_masked_token_vetoes_nothing_and_weighs_nothing():
    rows = Rows(6)
    before = fast(rows, "ppo", {"anchor": "old", "corrections": [("token", "veto", 0.5, INF)]})
    for row in rows.rows:
        for t, inside in enumerate(row.mask):
            if not inside:
                row.rollout[t] = row.old[t] = 300.0
    after = fast(rows, "ppo", {"anchor": "old", "corrections": [("token", "veto", 0.5, INF)]})
    assert after[:2] == before[:2]


@pytest.mark.parametrize("bound", (None, 0.05, 10.0))
@pytest.mark.parametrize("gradient", (None, "k1", "k2", "k3"))
@pytest.mark.parametrize("kind", ("k1", "k2", "k3"))
@pytest.mark.parametrize("weighted", (False, True))
def test_each_kl(kind, weighted, gradient, bound):
    for gate, ratio in (("ppo", "token"), ("ppo", "geometric"), ("reinforce", "token"), ("gmpo", "token")):
        say = {"kl_kind": kind, "kl_weighted": weighted, "kl_gradient": gradient, "kl_bound": bound}
        reports = agree(Rows(7), gate, **fitting(gate, {"ratio": ratio, "kl": 0.3, **say}))
        assert "kl" in reports
        if bound and not weighted:
            assert reports["kl"].abs().max() <= bound


@pytest.mark.parametrize("of", ("anchor", "policy"))
@pytest.mark.parametrize("negative", (False, True))
@pytest.mark.parametrize("level", ("token", "sequence", "mean", "max"))
@pytest.mark.parametrize("divergence", ("k1", "k2", "k3", "tv"))
def test_each_rejection(divergence, level, negative, of):
    some, every = 0, 0
    for anchor in ANCHORS:
        for seed in range(2):
            part = (divergence, level, 0.06, negative, of)
            weight = agree(Rows(seed), "ppo", anchor=anchor, corrections=[part])["weight"]
            some, every = some + int(weight.sum()), every + len(weight)
    assert 0 < some < every


def test_the_off_policy_mask_is_a_rejection_of_rows_with_negative_advantages():
    assert rl.off_policy_mask(0.3) == rl.reject("k1", "mean", limit=0.3, negative=True, of="policy")
    assert rl.ppo_clip(correction=rl.off_policy_mask()).reads == f"rollout_logprobs, {READS}"
    loss = rl.ppo_clip(correction=rl.off_policy_mask(), anchor="old")
    assert loss.reads == f"old_logprobs, rollout_logprobs, {READS}"


@pytest.mark.parametrize("gate", ("ppo", "reinforce", "clip_cov"))
def test_a_field_of_weights_is_a_factor(gate):
    for seed in range(2):
        corrections = ["weights", ("token", "truncate", 0.0, 1.5)]
        assert "weight" in agree(Rows(seed), gate, anchor="old", corrections=corrections)
    loss = rl.reinforce(correction="weights")
    assert loss.corrects_stale and loss.reads == f"weights: f32[*response], {READS}"


@pytest.mark.parametrize("gate", GATES)
def test_only_some_tokens_count_and_the_kl_counts_everywhere(gate):
    reports = agree(Rows(3), gate, only="selected", kl=0.2, entropy=0.01)
    assert 0 < reports["selected_fraction"].mean() < 1
    assert rl.ppo_clip(only="mine").reads == f"rollout_logprobs, {READS}, mine: bool[*response]"


@pytest.mark.parametrize("weighted", (False, True))
def test_a_full_kl_is_the_sum_over_the_vocabulary(weighted):
    rows = Rows(7)
    draw = torch.Generator().manual_seed(7)
    x, plain = rows.inputs(entropy=False), rows.inputs(entropy=False)
    p, q = torch.randn(2, len(x.mask), 5, generator=draw, dtype=torch.float64).log_softmax(-1)
    p[2, 1] = q[3, 0] = q[4, 2] = p[4, 2] = -INF
    x.distribution = p.requires_grad_()
    x.fields = {**x.fields, "ref_distribution": q}
    loss = rl.ppo_clip(kl=0.3, kl_kind="full", kl_weighted=weighted)
    assert loss.needs_distribution and not rl.ppo_clip(kl_kind="full").needs_distribution
    assert loss.reads.endswith("ref_distribution: f32[*response, vocab]") and "ref_logprobs" not in loss.reads
    found, _, _, reports = whole(loss, x)
    ratio = [math.exp(a - b) for a, b in zip(rows.column("p").tolist(), rows.column("rollout").tolist(), strict=True)]
    wanted = 0.0
    slopes = torch.zeros_like(q)
    for t in range(len(x.mask)):
        kl, weight = 0.0, 0.3 * (ratio[t] if weighted else 1.0) / int(x.mask.sum())
        for v in range(5):
            log_p, log_q = float(p[t, v].detach()), float(q[t, v])
            if log_p > -INF:
                kl += math.exp(log_p) * min(log_p - log_q, 20.0)
                slope = math.exp(log_p) * (min(log_p - log_q, 20.0) + (log_q > -INF))
                slopes[t, v] = weight * slope * x.mask[t]
        assert float(reports["kl"][t]) == pytest.approx(kl * (ratio[t] if weighted else 1.0), abs=1e-9)
        wanted += float(x.mask[t]) * weight * kl
    assert found == pytest.approx(whole(rl.ppo_clip(), plain)[0] + wanted)
    assert x.distribution.grad is not None
    assert torch.allclose(x.distribution.grad, slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("parts", ({"kl_kind": "full"}, {"kl_weighted": True}))
def test_a_kl_that_is_not_asked_for_needs_nothing_though_its_fields_are_there(parts):
    x = Rows(7).inputs(entropy=False)
    x.fields = {name: f for name, f in x.fields.items() if name in ("advantages", "ref_logprobs")}
    x.fields["ref_distribution"] = torch.zeros(len(x.mask), 5, dtype=torch.float64)
    losses, _ = rl.reinforce(**parts).compute(x)
    assert losses.tolist() == pytest.approx((-x["advantages"] * x.predicted).tolist())


def test_a_weight_of_the_kl_that_is_zero_takes_no_reference():
    assert "ref_logprobs" not in rl.policy_loss(gates.ppo(), kl=0).reads
    assert "kl" not in agree(Rows(1), "reinforce", kl=0.0, kl_weighted=True)


def test_the_entropy_has_a_gradient_of_its_own():
    reports = agree(Rows(8), "ppo", entropy=0.05, kl=0.1)
    assert {"kl", "entropy", "ratio", "clip_fraction", "approx_kl"} == set(reports)
    assert rl.policy_loss(gates.ppo(), entropy=0.05).needs_entropy
    assert not rl.policy_loss(gates.ppo()).needs_entropy


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_each_aggregate(aggregate):
    norm = 11 if aggregate.endswith("norm") else None
    for seed in range(3):
        agree(Rows(seed), "ppo", aggregate=aggregate, norm=norm, kl=0.1, entropy=0.01)


WORDS = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(RATIOS),
        "anchor": st.sampled_from(ANCHORS),
        "corrections": st.lists(
            st.tuples(
                st.sampled_from(("token", "sequence", "geometric")),
                st.sampled_from(HOWS),
                st.sampled_from((0.0, 0.3, 0.8)),
                st.sampled_from((1.0, 1.25, 5.0, INF)),
            )
            | st.tuples(
                st.sampled_from(("k1", "k2", "k3", "tv")),
                st.sampled_from(("token", "sequence", "mean", "max")),
                st.sampled_from((0.011, 0.11, 1.1)),
                st.booleans(),
                st.sampled_from(("anchor", "policy")),
            )
            | st.just("weights"),
            max_size=3,
        ),
        "only": st.sampled_from((None, "selected")),
        "kl": st.sampled_from((0.0, 0.2)),
        "kl_kind": st.sampled_from(("k1", "k2", "k3")),
        "kl_bound": st.sampled_from((None, 0.1)),
        "kl_gradient": st.sampled_from((None, None, "k1", "k2", "k3")),
        "kl_weighted": st.booleans(),
        "entropy": st.sampled_from((0.0, 0.05)),
        "aggregate": st.sampled_from(AGGREGATES),
        "norm": st.just(16),
    }
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(gate=st.sampled_from(sorted(GATES)), say=WORDS, seed=st.integers(0, 1000), by_row=st.booleans())
def test_all_parts_at_once(gate, say, seed, by_row):
    agree(Rows(seed, 2, by_row=by_row), gate, **fitting(gate, say))


# -- odd input --------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(gate=st.sampled_from(sorted(set(GATES) - {"dppo-tv", "dppo-kl"})), say=WORDS, seed=st.integers(0, 1000))
def test_infinite_and_huge_log_ratios_count_as_twenty(gate, say, seed):
    if say["anchor"] == "loglinear":
        say["anchor"] = "old"  # between two infinities there is no policy
    agree(Rows(seed, 3, wild=True), gate, **fitting(gate, say))


@pytest.mark.parametrize("kind", ("tv", "kl"))
@pytest.mark.parametrize("anchor", ANCHORS)
def test_they_are_finite_in_dppo_and_for_each_anchor(kind, anchor):
    for seed in range(10):
        for gate in (gates.dppo(kind), gates.ppo(), gates.topr()):
            bounded_weight = rl.correct("geometric", "reject" if anchor == "rollout" else "clip")
            loss = rl.policy_loss(gate, anchor=anchor, correction=bounded_weight, kl=0.1, kl_weighted=True)
            whole(loss, Rows(seed, wild=True).inputs(entropy=False))


def test_dppo_holds_a_token_back_whose_probability_fell_from_high_to_nothing():
    x = one_token(p=-30.0, rollout=-0.5, advantages=-1.0)
    _, _, _, reports = whole(rl.dppo(), x)
    assert reports["clip_fraction"].tolist() == [1.0]


@pytest.mark.parametrize("gate", ("ppo", "sapo", "gmpo", "kl_cov", "clip_cov"))
def test_a_token_that_the_policy_thinks_impossible_has_a_finite_loss(gate):
    rows = Rows(3)
    rows.rows[2].p[0] = -INF
    fast(rows, gate, {"kl": 0.1})


def one_token(**fields):
    """One row of one token."""
    tensors = {name: torch.tensor([value], dtype=torch.float64) for name, value in fields.items()}
    predicted = tensors.pop("p").requires_grad_()
    named = {name if name == "advantages" else f"{name}_logprobs": value for name, value in tensors.items()}
    one = torch.ones(1, dtype=torch.bool)
    return rl.LossInputs(predicted, one, named, torch.tensor([1]), torch.tensor([0]))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregate", ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"))
def test_all_levels_and_aggregates_are_one_for_a_single_token(ratio, aggregate):
    x = one_token(p=-1.0, rollout=-1.1, advantages=2.0)
    loss, gradient, _, _ = whole(rl.policy_loss(gates.ppo(), ratio=ratio, aggregate=aggregate), x)
    assert loss == pytest.approx(-2 * math.exp(0.1))
    assert gradient == pytest.approx([-2 * math.exp(0.1)])


@pytest.mark.parametrize("gate", GATES)
def test_no_tokens_at_all_are_a_loss_of_zero(gate):
    rows = Rows(0)
    rows.rows, rows.lengths = rows.rows[:2], rows.lengths[:2]  # an empty one, and one that is all masked
    loss, gradient, _, _ = fast(rows, gate, {"kl": 0.1, "aggregate": "seq-mean-token-mean"})
    assert loss == 0 and not any(gradient)
    rows.rows, rows.lengths = rows.rows[:1], rows.lengths[:1]
    assert fast(rows, gate, fitting(gate, {"ratio": "sequence"}))[0] == 0


@pytest.mark.parametrize("gate", GATES)
def test_advantages_of_zero_have_no_gradient_exactly_where_the_loss_says_so(gate):
    rows = Rows(9)
    for row in rows.rows:
        row.advantages = [0.0] * len(row.p)
    _, gradient, _, _ = fast(rows, gate, {})
    said = rl.policy_loss(GATES[gate][0]).zero_advantage_is_zero
    assert said == (not any(gradient))
    assert not rl.policy_loss(GATES[gate][0], kl=0.1).zero_advantage_is_zero
    assert not rl.policy_loss(GATES[gate][0], entropy=0.1).zero_advantage_is_zero


def test_rows_do_not_know_of_each_other():
    rows = Rows(10)
    say = {
        "anchor": "old",
        "ratio": "geometric",
        "corrections": [("sequence", "truncate", 0.0, 2.0)],
        "aggregate": "token-sum",
        "kl": 0.1,
    }
    _, together, _, _ = fast(rows, "ppo", say)
    alone = []
    for i in range(len(rows.rows)):
        one = Rows(10)
        one.rows, one.lengths = one.rows[i : i + 1], one.lengths[i : i + 1]
        alone += fast(one, "ppo", say)[1]
    assert alone == pytest.approx(together)


def test_half_precision_fields_and_a_prediction_in_float32():
    x = Rows(1).inputs(entropy=False)
    x.predicted = x.predicted.detach().float().requires_grad_()
    x.fields = {name: f.bfloat16() if f.is_floating_point() else f for name, f in x.fields.items()}
    losses, _ = rl.ppo_clip(kl=0.1).compute(x)
    assert losses.dtype == torch.float32


# -- what a loss says of itself ---------------------------------------------------------------------------------------

READS = "advantages, response_mask"
SELECTED = "selected: bool[*response]"
PRESETS = {
    # preset: reads, whether it corrects for stale rows, whether rows with advantages of 0 are silent, aggregate
    "ppo_clip": (f"rollout_logprobs, {READS}", True, True, "token-mean"),
    "gspo": (f"rollout_logprobs, {READS}", True, True, "seq-mean-token-mean"),
    "cispo": (f"rollout_logprobs, {READS}", True, True, "token-mean"),
    "sapo": (f"rollout_logprobs, {READS}", True, True, "seq-mean-token-mean"),
    "gmpo": (f"rollout_logprobs, {READS}", True, True, "seq-mean-token-mean"),
    "dppo": (f"rollout_logprobs, {READS}", True, True, "token-mean"),
    "reinforce": (READS, False, True, "token-mean"),
    "quadratic": (f"rollout_logprobs, {READS}", True, False, "token-mean"),
    "topr": (f"rollout_logprobs, {READS}", True, True, "seq-mean-token-sum"),
    "clip_cov": (f"rollout_logprobs, {READS}, {SELECTED}", True, True, "token-mean"),
    "kl_cov": (f"rollout_logprobs, {READS}, {SELECTED}", True, False, "token-mean"),
    "decoupled_ppo": (f"old_logprobs, rollout_logprobs, {READS}", True, True, "token-mean"),
    "vespo": (f"rollout_logprobs, {READS}", True, True, "token-mean"),
    "m2po": (f"rollout_logprobs, {READS}, {SELECTED}", True, True, "token-mean"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    loss = getattr(rl, name)()
    assert (loss.reads, loss.corrects_stale, loss.zero_advantage_is_zero, loss.aggregate) == PRESETS[name]
    assert loss.name == ("dppo_tv" if name == "dppo" else name)
    assert not loss.needs_entropy and not loss.groups and loss.on == "logprobs" and loss.per == "token"


AS_PARTS = {
    "ppo_clip": (rl.ppo_clip(clip=0.1, clip_high=0.3, dual=1.5), {"gate": gates.ppo(0.1, high=0.3, dual=1.5)}),
    "gspo": (
        rl.gspo(clip=0.1, clip_high=0.2),
        {"gate": gates.ppo(0.1, high=0.2), "ratio": "geometric", "aggregate": "seq-mean-token-mean"},
    ),
    "cispo": (rl.cispo(high=1.1), {"gate": gates.cispo(1.1)}),
    "sapo": (rl.sapo(negative=2.0), {"gate": gates.sapo(1.0, 2.0), "aggregate": "seq-mean-token-mean"}),
    "gmpo": (rl.gmpo(clip=0.1), {"gate": gates.gmpo(0.1), "aggregate": "seq-mean-token-mean"}),
    "dppo": (rl.dppo(kind="kl", clip=0.01, cap=1.1), {"gate": gates.dppo("kl", low=0.01, cap=1.1)}),
    "vespo": (rl.vespo(positive=(1.0, 2.0)), {"gate": gates.vespo((1.0, 2.0), (3.0, 2.0)), "ratio": "sequence"}),
    "m2po": (rl.m2po(), {"gate": gates.surrogate(), "only": "selected"}),
    "reinforce": (rl.reinforce(correction=rl.correct()), {"gate": gates.reinforce(), "correction": rl.correct()}),
    "quadratic": (rl.quadratic(temperature=0.4), {"gate": gates.quadratic(0.4)}),
    "topr": (rl.topr(), {"gate": gates.topr(), "ratio": "sequence", "aggregate": "seq-mean-token-sum"}),
    "clip_cov": (rl.clip_cov(), {"gate": gates.clip_cov()}),
    "kl_cov": (rl.kl_cov(weight=0.2), {"gate": gates.kl_cov(0.2)}),
    "decoupled_ppo": (
        rl.decoupled_ppo(cap=1.3),
        {"gate": gates.ppo(), "anchor": "old", "correction": rl.correct("token", "truncate", high=1.3)},
    ),
}


@pytest.mark.parametrize("name", AS_PARTS)
def test_a_preset_is_its_parts(name):
    preset, parts = AS_PARTS[name]
    found, wanted = (
        whole(loss, Rows(11).inputs(entropy=False)) for loss in (preset, rl.policy_loss(parts.pop("gate"), **parts))
    )
    assert found[:2] == wanted[:2]


def test_what_the_user_says_goes_before_the_preset():
    loss = rl.gspo(aggregate="token-sum", ratio="geometric-token", kl=0.1)
    assert loss.aggregate == "token-sum" and loss.parameters["ratio"] == "geometric-token"
    assert loss.reads.endswith("ref_logprobs")
    assert rl.decoupled_ppo(anchor="loglinear").reads == f"rollout_logprobs, versions, {READS}"


@pytest.mark.parametrize(
    ("anchor", "how", "stale"),
    [
        ("rollout", None, True),
        ("old", None, False),
        ("loglinear", None, False),
        *(("old", how, True) for how in ("weigh", "truncate", "clip", "mask")),
        ("old", "reject", False),
        ("old", "veto", False),
        ("rollout", "reject", True),
        ("rollout", "veto", True),
        ("loglinear", "truncate", True),
    ],
)
def test_what_corrects_for_stale_rows(anchor, how, stale):
    low = 1e-4 if how == "veto" else None
    correction = () if how is None else rl.correct("token", how, low=low)
    loss = rl.policy_loss(gates.ppo(), anchor=anchor, correction=correction)
    assert loss.corrects_stale is stale
    assert ("rollout_logprobs" in loss.reads) == (anchor != "old" or how is not None)


def test_reinforce_corrects_only_where_a_correction_weighs():
    assert not rl.reinforce().corrects_stale
    assert not rl.reinforce(correction=rl.correct("geometric", "reject")).corrects_stale
    weighed = rl.reinforce(correction=rl.correct())
    assert weighed.corrects_stale and weighed.reads == f"rollout_logprobs, {READS}"


def test_a_weighted_kl_reads_what_its_ratio_needs():
    assert "rollout_logprobs" in rl.reinforce(kl=0.1, kl_weighted=True).reads
    weighted = rl.reinforce(kl=0.1, kl_weighted=True, anchor="old").reads
    assert "rollout_logprobs" in weighted and "old_logprobs" not in weighted  # by who sampled; it has no other ratio


def test_decoupled_ppo_is_ppo_where_both_policies_agree():
    rows = Rows(12)
    for row in rows.rows:
        row.old = list(row.rollout)
    found, wanted = (
        whole(loss, rows.inputs(entropy=False)) for loss in (rl.decoupled_ppo(), rl.ppo_clip(anchor="old"))
    )
    assert found[:2] == wanted[:2]


@pytest.mark.parametrize("gate", GATES)
def test_the_sampling_anchor_is_that_of_what_was_sampled_from(gate):
    """The ratio, and what is held against the sampler, read sampling_logprobs where the rollout anchor reads others."""
    reject = [rl.reject("k2", limit=0.5), rl.reject("k1", "mean", limit=0.3, negative=True, of="policy")]
    made = {
        anchor: rl.policy_loss(GATES[gate][0], anchor=anchor, correction=reject, kl=0.1, kl_weighted=True)
        for anchor in ("rollout", "sampling")
    }
    reads = {anchor: set(loss.reads.split(", ")) for anchor, loss in made.items()}
    assert reads["sampling"] == reads["rollout"] - {"rollout_logprobs"} | {"sampling_logprobs"}
    assert made["sampling"].corrects_stale == made["rollout"].corrects_stale
    rows = Rows(3)
    plain, sampled = rows.inputs(entropy=False), rows.inputs(entropy=False)
    fields = {("sampling_logprobs" if n == "rollout_logprobs" else n): v for n, v in sampled.fields.items()}
    found, wanted = (
        whole(made["sampling"], replace(sampled, fields=fields)),
        whole(made["rollout"], plain),
    )
    assert found[:2] == wanted[:2]
    if GATES[gate][0].follows:
        with pytest.raises(ProgramError, match="the correction would count it twice"):
            rl.policy_loss(GATES[gate][0], anchor="sampling", correction=rl.correct())


def test_reports_are_the_numbers_they_are_named_for():
    rows = Rows(13)
    x = rows.inputs(entropy=False)
    _, reports = rl.ppo_clip(clip=0.1).compute(x)
    p, q, a = x.predicted.tolist(), rows.column("rollout").tolist(), rows.column("advantages").tolist()
    for t in range(len(p)):
        d = p[t] - q[t]
        assert float(reports["ratio"][t]) == pytest.approx(math.exp(d))
        assert float(reports["approx_kl"][t]) == pytest.approx(math.exp(d) - 1 - d)
        held = (a[t] > 0 and math.exp(d) > 1.1) or (a[t] < 0 and math.exp(d) < 0.9)
        assert float(reports["clip_fraction"][t]) == held


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: rl.policy_loss(gates.ppo(), ratio="tokens"), "ratio='tokens' is none of token,", 'ratio="token"'),
        (lambda: rl.policy_loss(gates.ppo(), anchor="rolout"), "anchor='rolout' is none of", 'anchor="rollout"'),
        (lambda: rl.ppo_clip(kl_kind="k4"), "rl.ppo_clip: kl_kind='k4' is none of k1, k2, k3, full", 'kl_kind="k'),
        (lambda: rl.gmpo(ratio="sequence"), "'gmpo' takes the ratio of each token", "Leave out ratio="),
        (lambda: rl.ppo_clip(correction=rl.correct()), "the correction would count it twice", 'anchor="old"'),
        (lambda: rl.decoupled_ppo(anchor="rollout"), "would count it twice", 'anchor="old"'),
        (lambda: rl.correct("row"), "level='row' is none of token, sequence, geometric", "level="),
        (lambda: rl.correct(how="masks"), "how='masks' is none of", 'how="mask"'),
        (lambda: rl.correct(how="clip", low=3.0), "low=3.0, high=2.0 are no bounds", "0 <= low <= high"),
        (lambda: rl.correct(how="mask", low=-1.0), "low=-1.0, high=2.0 are no bounds", "0 <= low <= high"),
        (lambda: rl.correct(high=float("nan")), "low=0.0, high=nan are no bounds", "0 <= low <= high"),
        (lambda: rl.correct(how="veto"), "none is below 0", "such as 1e-4"),
        (lambda: rl.correct(how="veto", low=0.0), "none is below 0", "such as 1e-4"),
        (lambda: rl.correct("sequence", "veto", low=0.1), "no use for level='sequence'", 'level="sequence" against'),
        (lambda: rl.correct("geometric", "veto", low=0.1), "no use for level='geometric'", 'how="reject"'),
        (lambda: rl.correct(how="veto", low=0.1, high=3.0), "how='veto' has no use for high=3.0", "Leave high= out"),
        (lambda: rl.correct(how="truncate", low=0.5), "how='truncate' has no use for low=0.5", "Leave low= out"),
        (lambda: rl.correct(how="weigh", high=3.0), "how='weigh' has no use for high=3.0", "Leave high= out"),
        (lambda: rl.gspo(aggregat="token-mean"), "rl.gspo has no part 'aggregat'", "Write aggregate=."),
        (lambda: rl.reject("k4", limit=1.0), "divergence='k4' is none of k1, k2, k3, tv", 'divergence="k'),
        (lambda: rl.reject("k1", "geometric", limit=1.0), "level='geometric' is none of token, sequence,", "level="),
        (lambda: rl.reject("k2", limit=-1.0), "limit=-1.0 would leave out", "0 or more"),
        (lambda: rl.reject("k2", limit=1.0, of="old"), "of='old' is none of anchor, policy", 'of="anchor"'),
        (lambda: rl.ppo_clip(correction="weights"), "the correction would count it twice", 'anchor="old"'),
        (lambda: rl.gates.vespo((2.0, 0.0)), "positive=(2.0, 0.0) is no power", "positive=(2.0, 3.0)"),
        (lambda: rl.gates.dppo("tvd"), "rl.gates.dppo: kind='tvd' is none of tv, kl", 'kind="tv"'),
    ],
)
def test_errors_say_what_to_write(make, what, fix):
    with pytest.raises(ProgramError) as told:
        make()
    assert what in str(told.value) and fix in str(told.value)
    assert "test_rl_policy.py" in str(told.value)


def test_an_aggregate_that_there_is_not():
    with pytest.raises(ProgramError, match="aggregate='mean' is none of token-mean, ") as told:
        rl.ppo_clip(aggregate="mean")
    assert "aggregate='token-mean'" in str(told.value)
    with pytest.raises(ProgramError, match="divides by a number of tokens, and there is none") as told:
        rl.ppo_clip(aggregate="seq-mean-token-sum-norm")
    assert "Give norm=" in str(told.value)


@pytest.mark.parametrize("word", ("gate", "name"))
def test_a_part_that_a_preset_has_itself_is_not_offered(word):
    with pytest.raises(ProgramError, match=f"no part '{word}'") as told:
        rl.ppo_clip(**{word: "x"})  # pyright: ignore[reportArgumentType]
    assert f"Write {word}=" not in str(told.value)


# -- which tokens a covariance selects --------------------------------------------------------------------------------


def covariance_rows(seed, rows=6, longest=6):
    draw = torch.Generator().manual_seed(seed)
    lengths = [0, *torch.randint(0, longest, (rows - 1,), generator=draw).tolist()]

    def ragged(make):
        return [make(n).tolist() for n in lengths]

    def column(lists, dtype=torch.float64):
        return Column.of([torch.tensor(x, dtype=dtype) for x in lists], dim="response")

    masks = ragged(lambda n: torch.rand(n, generator=draw) < 0.8)
    lists = [ragged(lambda n: torch.randn(n, generator=draw, dtype=torch.float64)) for _ in range(3)]
    keys = [(i // 2, i) for i in range(rows)]
    batch = Batch.of(
        keys,
        response_mask=column(masks, torch.bool),
        advantages=column(lists[0]),
        rollout_logprobs=column(lists[1]),
        old_logprobs=column(lists[2]),
    )
    return batch, masks, lists


def slow_covariances(masks, advantages, logprobs):
    """Of each sampled token, by (row, place)."""
    places = [(i, t) for i, mask in enumerate(masks) for t, inside in enumerate(mask) if inside]
    if not places:
        return {}
    a = mean([advantages[i][t] for i, t in places])
    p = mean([logprobs[i][t] for i, t in places])
    return {(i, t): (advantages[i][t] - a) * (logprobs[i][t] - p) for i, t in places}


def selected_places(batch):
    """By (key of the row, place)."""
    column = batch.selected
    return {(key, t) for key, row in zip(batch.keys, column, strict=True) for t, x in enumerate(row) if x}


@pytest.mark.parametrize("anchor", ("rollout", "old"))
@pytest.mark.parametrize("share", (0.0, 0.2, 0.5, 1.0))
@pytest.mark.parametrize("bounds", ((-INF, INF), (-0.5, 0.7), (100.0, 200.0)))
def test_the_largest_covariances_are_selected(anchor, share, bounds):
    for seed in range(4):
        batch, masks, (advantages, rollout, old) = covariance_rows(seed)
        low, high = bounds
        found = rl.select_by_covariance(batch, share=share, low=low, high=high, anchor=anchor)
        assert found.selected.type == "bool[*response]"
        covariances = slow_covariances(masks, advantages, rollout if anchor == "rollout" else old)
        among = sorted((c, place) for place, c in covariances.items() if low < c < high)
        count = min(len(among), max(1, int(share * len(covariances))))
        wanted = {(batch.keys[i], t) for _, (i, t) in among[len(among) - count :]}
        assert selected_places(found) == wanted


@pytest.mark.parametrize("how", ("largest", "drawn"))
def test_the_order_of_the_rows_does_not_matter(how):
    for seed in range(5):
        batch, _, _ = covariance_rows(seed)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
        found, turned = (rl.select_by_covariance(b, how=how, share=0.4) for b in (batch, batch.take(order)))
        assert selected_places(found) == selected_places(turned)


def test_drawn_tokens_are_inside_the_bounds_and_as_many_as_the_share():
    batch, masks, (advantages, rollout, _) = covariance_rows(1, rows=30)
    covariances = slow_covariances(masks, advantages, rollout)
    found = selected_places(rl.select_by_covariance(batch, how="drawn", share=0.1, low=-0.2, high=0.9))
    assert len(found) == int(0.1 * len(covariances))
    by_key = {(batch.keys[i], t): c for (i, t), c in covariances.items()}
    assert all(-0.2 < by_key[place] < 0.9 for place in found)


def test_what_is_drawn_depends_on_the_keys_and_not_on_the_numbers():
    batch, _, _ = covariance_rows(2, rows=30)
    one = selected_places(rl.select_by_covariance(batch, how="drawn", share=0.3))
    other = batch.drop("advantages", "rollout_logprobs")
    other = other | Batch(other.keys, {"advantages": batch.rollout_logprobs, "rollout_logprobs": batch.advantages})
    assert selected_places(rl.select_by_covariance(other, how="drawn", share=0.3)) == one
    renamed = Batch([(k[0] + 100, k[1]) for k in batch.keys], dict(batch.columns))
    drawn = {
        ((k[0] - 100, k[1]), t) for k, t in selected_places(rl.select_by_covariance(renamed, how="drawn", share=0.3))
    }
    assert drawn != one and len(drawn) == len(one)


def test_drawn_tokens_are_spread_evenly_over_places():
    batch = Batch.of(
        400,
        response_mask=Column.of([torch.ones(5, dtype=torch.bool)] * 400, dim="response"),
        advantages=Column.of([torch.zeros(5)] * 400, dim="response"),
        rollout_logprobs=Column.of([torch.zeros(5)] * 400, dim="response"),
    )
    found = rl.select_by_covariance(batch, how="drawn", share=0.3).selected.values.view(400, 5)
    assert int(found.sum()) == 600
    assert all(abs(int(n) - 120) < 45 for n in found.sum(0))  # five standard deviations of a draw


def test_nothing_sampled_is_nothing_selected():
    for lengths in ([], [0, 0], [2]):
        batch = Batch.of(
            len(lengths),
            response_mask=Column.of([torch.zeros(n, dtype=torch.bool) for n in lengths], dim="response", dtype="bool"),
            advantages=Column.of([torch.zeros(n) for n in lengths], dim="response", dtype="f32"),
            rollout_logprobs=Column.of([torch.zeros(n) for n in lengths], dim="response", dtype="f32"),
        )
        for how in ("largest", "drawn"):
            assert not rl.select_by_covariance(batch, how=how).selected.values.any()


def test_errors_of_the_selection():
    batch, _, _ = covariance_rows(0)
    with pytest.raises(FlowError, match="how='biggest' is none of largest, drawn"):
        rl.select_by_covariance(batch, how="biggest")
    with pytest.raises(FlowError, match="anchor='loglinear' is none of rollout, sampling, old"):
        rl.select_by_covariance(batch, anchor="loglinear")


def test_the_first_groups_are_those_that_were_drawn_first():
    batch = Batch.of([(3, 0), (1, 0), (7, 1), (3, 1), (1, 1)], rewards=Column.of(torch.arange(5.0)))
    assert rl.first_groups(batch, 2).keys == ((3, 0), (1, 0), (3, 1), (1, 1))
    assert rl.first_groups(batch, 9).keys == batch.keys
    assert len(rl.first_groups(batch, 0)) == 0
