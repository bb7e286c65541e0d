"""Advantages from rewards, as ops of a program; the mathematics is in ``math/advantages.py`` and ``math/credit.py``."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from ..graph.ops.allowed import number, whole
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import ANCHORS, one_of, refusal, refuse_lone_rows, warn_of_lone_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column

CENTERS = ("group", "batch", "optimal", "none")
SCALES = ("group", "batch", "mean", "none")
#: The lambda of ``rl.gae`` where nothing is said.
LAM = 0.95
_ADDS = "advantages: f32[*response]"
_ALL_0 = "every advantage would be 0"
_SHARE = number(least=0, most=1)
_LAM = number(least=0, most=1, fix="Give 1 for whole returns, 0 for one step.")


def _paid_by_token(call: CallShape) -> str:
    return ", token_rewards: f32[*response]" if "token_rewards" in call.have else ""


def _token_rewards(batch: Batch) -> Tensor | None:
    return batch.token_rewards.values if "token_rewards" in batch.fields else None


def _groups(batch: Batch, title: str = "", *, least: int = 2) -> tuple[Tensor, int]:
    """The prompt of each row, where the rewards lie; warns in the name of ``title`` where none has ``least`` rows."""
    if title:
        warn_of_lone_rows(title, batch, _ALL_0, least=least)
    group, count = batch.group_index()
    return group.to(batch.response_mask.values.device), count


def _factored_reads(call: CallShape) -> str:
    title, said = "rl.advantages", call.call
    of = one_of(title, "of", said.get("of"), ("rewards", "total", "returns"))
    center = one_of(title, "center", said.get("center"), CENTERS)
    one_of(title, "scale", said.get("scale"), SCALES)
    if said.get("leave_one_out") and center not in ("group", "batch"):
        raise refusal(
            f"{title}: leave_one_out=True is of a plain mean, and center={center!r} takes none.",
            'Write center="group", or leave out leave_one_out.',
        )
    if of != "returns" and said.get("gamma") != 1:
        raise refusal(
            f"{title}: gamma={said.get('gamma')!r} discounts returns, and these advantages are of the {of}.",
            'Write of="returns", or leave out gamma.',
        )
    if _compares(center, said.get("scale")):
        refuse_lone_rows(title, call, _ALL_0, instead=', or compare over the batch: center="batch", scale="batch"')
    given = "" if of == "rewards" else _paid_by_token(call)
    baseline = f", {said['baseline']}: f32[]" if said.get("baseline") else ""
    return "rewards, response_mask" + given + baseline


def _compares(center: Any, scale: Any) -> bool:
    """Whether a prompt with one row has advantage 0."""
    return center in ("group", "optimal") or scale == "group"


def _within_prompts(call: CallShape) -> bool:
    said = call.call
    return "batch" not in (said.get("center"), said.get("scale")) and not said.get("whiten")


@op(owner="rl", reads=_factored_reads, adds=_ADDS, cost="local", pieces=_within_prompts)
@takes(eps=number(least=0), gamma=_SHARE)
def advantages(
    batch: Batch,
    *,
    of: str = "rewards",
    baseline: str | None = None,
    center: str = "group",
    leave_one_out: bool = False,
    scale: str = "group",
    eps: float = 1e-4,
    whiten: bool = False,
    gamma: float = 1.0,
) -> dict[str, Column]:
    """``A_t = (x_t - c) / (s + eps)`` at each sampled token, 0 elsewhere: what most estimators without a critic are.

    ``x`` is the row's reward, alone or with those of its tokens, or its return from the token on; ``c`` a mean,
    ``s`` a spread of the rows it is compared with. A row without a sampled token counts in both. A prompt with one
    row has nothing to be compared with: 0, also where ``s`` is the std of its one reward. Where ``s`` is exactly 0,
    as with equal rewards, the advantage is 0.

    Args:
        batch: reads ``rewards`` f32[], ``response_mask`` ``bool[*response]``, the field that ``baseline`` names, and
            unless ``of="rewards"`` ``token_rewards`` ``f32[*response]`` where it is there. Rows in any order.
        of: ``rewards``; ``total``, with the ``token_rewards`` of the row added (RLOO with the KL in the reward); or
            ``returns``, ``G_t = r_t + gamma G_{t+1}`` over sampled tokens, the row's reward paid at its
            last one (REINFORCE++, arXiv:2501.03262, with ``center="none", scale="none", whiten=True``). ``c`` and
            ``s`` are then those of the returns at the first sampled token, and a row without one returns its reward.
        baseline: a field f32[] that is taken from ``x`` first, such as the reward of the greedy answer (ReMax,
            arXiv:2310.10505, with ``center="none", scale="none"``).
        center: ``c`` is the mean of the prompt's rows, of the ``batch``, or 0 with ``none``; ``optimal`` is the
            prompt's mean weighted by the number of sampled tokens (OPO, arXiv:2505.23585).
        leave_one_out: the mean is that of the *other* rows (RLOO, arXiv:2402.14740).
        scale: ``s`` is the std with Bessel's correction of the prompt's rows (GRPO, arXiv:2402.03300), of the
            ``batch`` (Lite PPO, arXiv:2508.08221), the prompt's ``mean`` (MaxRL, arXiv:2602.02710; of rewards of 0 and
            above), or with ``none`` nothing divides (Dr. GRPO, arXiv:2503.20783).
        eps: added to ``s``.
        whiten: shift and scale the result to mean 0 and std 1 over all sampled tokens of the call.
        gamma: discount of the returns per sampled token.

    >>> mask = fl.Column.of([[True, True], [True]], "response")
    >>> batch = fl.Batch.of([(0, 0), (0, 1)], rewards=[1.0, 0.0], response_mask=mask)
    >>> rl.advantages(batch, scale="none").advantages.to_list()
    [[0.5, 0.5], [-0.5]]
    >>> rl.advantages(batch, center="none", scale="none").advantages.to_list()
    [[1.0, 1.0], [0.0]]
    """
    from .math.advantages import factored

    mask = batch.response_mask
    found = factored(
        batch.rewards.values,
        mask.values,
        mask.lengths,
        *_groups(batch, "rl.advantages" if _compares(center, scale) else ""),
        of=of,
        token_rewards=None if of == "rewards" else _token_rewards(batch),
        baseline=batch[baseline].values if baseline else None,
        center=center,
        leave_one_out=leave_one_out,
        scale=scale,
        eps=float(eps),
        whiten=whiten,
        gamma=float(gamma),
    )
    return {"advantages": mask.with_values(found.float())}


def _group_reads(call: CallShape) -> str:
    one_of("rl.group_advantages", "scale", call.call.get("scale"), ("std", "none"))
    refuse_lone_rows("rl.group_advantages", call, _ALL_0)
    return "rewards, response_mask"


@op(owner="rl", reads=_group_reads, adds=_ADDS, cost="local", pieces=True)
@takes(eps=number(least=0))
def group_advantages(
    batch: Batch, *, scale: str = "std", eps: float = 1e-4, leave_one_out: bool = False
) -> dict[str, Column]:
    """``(r - mean(r)) / (std(r) + eps)`` over the rows of one prompt (GRPO, arXiv:2402.03300, section 4.1.2).

    Every token of a row that the policy sampled has the row's advantage; the others have 0. Rows of a prompt are
    those with the same uid, the first number of their key. The std has Bessel's correction, and a prompt with one row
    has advantage 0. It is :func:`advantages` with its defaults.

    Args:
        batch: reads ``rewards`` f32[] and ``response_mask`` ``bool[*response]``, in any order of rows.
        scale: ``std``, or ``none`` for the difference to the mean alone (Dr. GRPO, arXiv:2503.20783).
        eps: added to the std, so that equal rewards divide by no zero.
        leave_one_out: the mean is that of the prompt's *other* rows (RLOO, arXiv:2402.14740).

    >>> mask = fl.Column.of([[True, True], [True]], "response")
    >>> batch = fl.Batch.of([(0, 0), (0, 1)], rewards=[1.0, 0.0], response_mask=mask)
    >>> rl.group_advantages(batch, scale="none").advantages.to_list()
    [[0.5, 0.5], [-0.5]]
    """
    by = "group" if scale == "std" else "none"
    return advantages.fn(batch, scale=by, eps=eps, leave_one_out=leave_one_out)


def _gae_reads(call: CallShape) -> str:
    lam, alpha = call.call.get("lam"), call.call.get("alpha")
    if alpha is not None and lam != LAM:
        raise refusal(
            f"rl.gae: lam={lam} and alpha={alpha} both say how far the advantages look.",
            "Leave out one of them; lam_returns= is of the returns.",
        )
    return "rewards, values, response_mask" + _paid_by_token(call)


@op(
    owner="rl",
    reads=_gae_reads,
    adds="advantages: f32[*response], returns: f32[*response]",
    cost="local",
    pieces=lambda call: not call.call.get("whiten"),
)
@takes(gamma=_SHARE, lam=_LAM, lam_returns=_LAM, alpha=number(above=0, fix="Write alpha=0.05, as in VAPO."))
def gae(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float = LAM,
    lam_returns: float | None = None,
    alpha: float | None = None,
    whiten: bool = False,
) -> dict[str, Column]:
    """``A_t = d_t + gamma lam A_{t+1}``, ``d_t = r_t + gamma V_{t+1} - V_t`` (arXiv:1506.02438, eq. 11-16).

    Time counts the tokens that the policy sampled: a token outside ``response_mask`` (an observation) is no step, the
    chain goes across it, and it has advantage 0 and its own value as return. A row's reward is paid at its last
    sampled token, added to ``token_rewards`` where the batch has them; the value after that token is 0.

    Args:
        batch: reads ``rewards`` f32[], ``values`` ``f32[*response]`` (before each token), ``response_mask``, and
            ``token_rewards`` ``f32[*response]`` where it is there.
        gamma: discount per sampled token.
        lam: how far the estimate looks: 0 is one step, 1 is the whole return.
        lam_returns: the lambda of the returns, which the critic learns; None is that of the advantages. VAPO
            (arXiv:2504.05118) takes 1, where the critic is not its own target (decoupled GAE).
        alpha: in place of ``lam``, ``1 - 1 / (alpha n)`` for a row of ``n`` sampled tokens: longer rows look further
            (length-adaptive GAE, VAPO, with 0.05). Rows of at most ``1 / alpha`` tokens have 0, where the paper's
            formula would fall below it.
        whiten: shift and scale the advantages of the call to mean 0 and std 1 over all sampled tokens, not the returns.

    >>> mask = fl.Column.of([[True, True]], "response")
    >>> values = fl.Column.of([[0.5, 0.75]], "response")
    >>> batch = rl.gae(fl.Batch.of(1, rewards=[1.0], values=values, response_mask=mask), lam=1.0)
    >>> batch.advantages.to_list(), batch.returns.to_list()
    ([[0.5, 0.25]], [[1.0, 1.0]])
    """
    from .math.advantages import generalised, whitened

    mask, values = batch.response_mask, batch.values
    found, returns = generalised(
        batch.rewards.values,
        values.values,
        mask.values,
        mask.lengths,
        token_rewards=_token_rewards(batch),
        gamma=float(gamma),
        lam=float(lam),
        lam_returns=None if lam_returns is None else float(lam_returns),
        alpha=None if alpha is None else float(alpha),
    )
    if whiten:
        found = whitened(found, mask.values)
    return {"advantages": values.with_values(found), "returns": values.with_values(returns)}


def _gdpo_reads(call: CallShape) -> str:
    names, weights = call.call.get("rewards"), call.call.get("weights")
    if names is Parameter.empty:  # asked what it would read before there is a call
        names = ("correctness", "format")
    if isinstance(names, str) or not names:
        raise refusal(
            f"rl.gdpo: rewards={names!r} does not name the fields of several rewards.",
            f'Write rewards=("{names or "correctness"}", "format").',
        )
    if weights is not None and len(weights) != len(names):
        raise refusal(
            f"rl.gdpo: {len(weights)} weights for {len(names)} rewards.",
            f"Give one weight for each of {', '.join(names)}.",
        )
    refuse_lone_rows("rl.gdpo", call, _ALL_0)
    return ", ".join([*(f"{name}: f32[]" for name in names), "response_mask"])


@op(owner="rl", reads=_gdpo_reads, adds=_ADDS, cost="local")
@takes(eps=number(least=0))
def gdpo(
    batch: Batch, *, rewards: Sequence[str], weights: Sequence[float] | None = None, eps: float = 1e-4
) -> dict[str, Column]:
    """``N_batch(sum_k w_k N_group(r_k))``, ``N(x) = (x - mean) / (std + eps)`` (GDPO, arXiv:2601.05242).

    Several rewards are told apart where their sum would be the same. A reward that is equal over a prompt says nothing
    there. Both stds are over rows, with Bessel's correction; rows without a sampled token count in them.

    Args:
        batch: reads ``response_mask`` and the fields named by ``rewards``, f32[] each.
        rewards: names of the fields.
        weights: of the rewards, 1 each where None.
        eps: added to both stds.

    >>> mask = fl.Column.of([[True, True], [True]], "response")
    >>> batch = fl.Batch.of([(0, 0), (0, 1)], right=[1.0, 0.0], short=[1.0, 1.0], response_mask=mask)
    >>> batch = rl.gdpo(batch, rewards=["right", "short"])
    >>> [round(a, 2) for a in batch.advantages.row_mean().to_list()]
    [0.71, -0.71]
    """
    from .math.advantages import row_of
    from .math.credit import decoupled

    mask = batch.response_mask
    shares = [float(w) for w in weights] if weights is not None else [1.0] * len(rewards)
    by_row = decoupled([batch[name].values for name in rewards], shares, *_groups(batch, "rl.gdpo"), eps=float(eps))
    row = row_of(mask.lengths, len(mask.values), mask.values.device)
    return {"advantages": mask.with_values(by_row[row].float() * mask.values)}


def _best_of_reads(call: CallShape) -> str:
    k = call.call.get("k")
    one_of("rl.pass_at_k", "scale", call.call.get("scale"), ("std", "none"))
    if isinstance(k, int) and call.rows_each is not None and call.rows_each <= k:
        raise refusal(
            f"rl.pass_at_k: k={k}, and each prompt has {call.rows_each} rows at most: {_ALL_0}.",
            f"Write n={2 * k} in {call.sampled_by}, or a smaller k.",
        )
    return "rewards, response_mask"


@op(owner="rl", reads=_best_of_reads, adds=_ADDS, cost="local", pieces=True)
@takes(k=whole(least=1, fix="Write k=4, and sample more rows than that of each prompt."), eps=number(least=0))
def pass_at_k(batch: Batch, *, k: int, scale: str = "std", eps: float = 1e-4) -> dict[str, Column]:
    """``A_i = (E[max r_S | i in S] - E[max r_S]) / (std(max r_S) + eps)``, S any ``k`` rows of the prompt.

    Pass@k training (arXiv:2508.10751) in its analytic form: a set of ``k`` answers is paid for its best one, each
    answer has the mean advantage of the sets that it is in, and no set is drawn. With rewards of 0 and 1, ``w`` of
    ``n`` rows wrong, ``p = 1 - C(w, k) / C(n, k)`` and ``s = sqrt(p (1 - p))``, right rows have ``(1 - p) / s`` and
    wrong ones ``(1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s``. Rewards may be any numbers here, which the paper
    leaves open. A prompt that has not more than ``k`` rows has 0, and so has one in which every set earns the same.

    Args:
        batch: reads ``rewards`` f32[] and ``response_mask`` ``bool[*response]``, in any order of rows.
        k: how many answers are one attempt; 1 is GRPO's advantage, with a std over rows without Bessel's correction.
        scale: ``std``, that over all sets, without Bessel's correction; or ``none``, the difference alone.
        eps: added to the std.

    >>> mask = fl.Column.of([[True]] * 4, "response")
    >>> batch = fl.Batch.of([(0, i) for i in range(4)], rewards=[1.0, 1.0, 0.0, 0.0], response_mask=mask)
    >>> batch = rl.pass_at_k(batch, k=2, scale="none")
    >>> [round(a, 3) for a in batch.advantages.row_sum().to_list()]
    [0.167, 0.167, -0.167, -0.167]
    """
    from .math.advantages import row_of
    from .math.credit import best_of_sets

    mask, groups = batch.response_mask, _groups(batch, "rl.pass_at_k", least=int(k) + 1)
    by_row = best_of_sets(batch.rewards.values, *groups, k=int(k), scale=scale, eps=float(eps))
    row = row_of(mask.lengths, len(mask.values), mask.values.device)
    return {"advantages": mask.with_values(by_row[row].float() * mask.values)}


def _token_baseline_reads(call: CallShape) -> str:
    anchor = one_of("rl.optimal_token_baseline", "anchor", call.call.get("anchor"), ANCHORS)
    refuse_lone_rows("rl.optimal_token_baseline", call, _ALL_0)
    squares = call.call.get("sum_squares")
    return (
        f"rewards, response_mask, {anchor}_logprobs"
        + _paid_by_token(call)
        + (f", {squares}: f32[*response]" if squares else "")
    )


@op(owner="rl", reads=_token_baseline_reads, adds=_ADDS, cost="local", pieces=True)
def optimal_token_baseline(
    batch: Batch, *, anchor: str = "rollout", sum_squares: str | None = None
) -> dict[str, Column]:
    """``A_t = G_t - B_t``, ``B_t = sum_i G_it W_it / sum_i W_it`` over the prompt's rows (OTB, arXiv:2602.07078).

    ``t`` counts sampled tokens, and the sums are over the rows that have a ``t``-th one. ``G_t`` is what is paid from
    ``t`` on: the row's reward, and ``token_rewards`` where the batch has them. ``W_t = sum_{j<=t} w_j`` is how much the
    row has moved the policy so far: ``w = 1 - 2 p + S``, the squared norm of the gradient of ``log p`` by the logits,
    with ``p`` the probability of the token and ``S`` the sum of the squares of all. Without ``S``, its unbiased
    estimate from the token, ``p``, takes its place: ``w = 1 - p``. Where no row weighs anything ``B_t`` is their plain
    mean. A prompt with one row, and what one row has beyond all others, has advantage 0.

    Args:
        batch: reads ``rewards``, ``response_mask``, ``rollout_logprobs`` or ``old_logprobs``, and ``token_rewards``
            where it is there.
        anchor: whose log-probabilities: ``rollout``, ``sampling`` or ``old``.
        sum_squares: the name of a field ``f32[*response]`` with ``S``.

    >>> batch = fl.Batch.of(
    ...     [(0, 0), (0, 1)],
    ...     rewards=[1.0, 0.0],
    ...     response_mask=fl.Column.of([[True, True], [True]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-0.5, -0.5], [-0.5]], "response"),
    ... )
    >>> rl.optimal_token_baseline(batch).advantages.to_list()
    [[0.5, 0.0], [-0.5]]
    """
    from .math.credit import against_optimal_token

    mask = batch.response_mask
    found = against_optimal_token(
        batch.rewards.values,
        batch[f"{anchor}_logprobs"].values,
        mask.values,
        mask.lengths,
        *_groups(batch, "rl.optimal_token_baseline"),
        token_rewards=_token_rewards(batch),
        sum_squares=batch[sum_squares].values if sum_squares else None,
    )
    return {"advantages": mask.with_values(found.float())}


def _gigpo_reads(call: CallShape) -> str:
    one_of("rl.gigpo", "scale", call.call.get("scale"), ("std", "none"))
    turns = "turn_rewards: f32[*turn], turn_states: i64[*turn], turn_ids: i32[*response]"
    return f"rewards, response_mask, {turns}"


@op(owner="rl", reads=_gigpo_reads, adds=_ADDS, cost="local", pieces=True)
@takes(weight=number(least=0), gamma=_SHARE, eps=number(least=0))
def gigpo(
    batch: Batch, *, weight: float = 1.0, gamma: float = 0.95, scale: str = "std", eps: float = 1e-6
) -> dict[str, Column]:
    """``A = N_prompt(R) + weight N_anchor(G)``, ``N(x) = (x - mean) / (std + eps)`` (GiGPO, arXiv:2505.10978, eq. 3-8).

    A row is a whole episode with reward ``R``, and counts once in its prompt, however many turns it has.
    ``G_k = r_k + gamma G_{k+1}`` is the return of its turn ``k``; turns of a prompt that began in the same state are
    compared, also two of one episode. A sampled token has the sum for its row and turn, the others 0. A prompt with one
    row, and a state that was seen once, give 0. The stds have Bessel's correction.

    Args:
        batch: reads ``rewards`` f32[], ``response_mask``, ``turn_rewards`` ``f32[*turn]``, ``turn_states``
            ``i64[*turn]`` (the number of the state before the turn: equal within a prompt for equal states) and
            ``turn_ids`` ``i32[*response]`` (the turn of each token, from 0; -1 for observations).
        weight: of the turn's part.
        gamma: discount per turn.
        scale: ``std``, or ``none`` for the differences to the means alone.
        eps: added to the stds.

    Raises ProgramError for a sampled token of a turn that its row does not have.

    >>> batch = fl.Batch.of(
    ...     [(0, 0), (0, 1)],
    ...     rewards=[1.0, 0.0],
    ...     response_mask=fl.Column.of([[True], [True]], "response"),
    ...     turn_rewards=fl.Column.of([[1.0], [0.0]], "turn"),
    ...     turn_states=fl.Column.of([[7], [7]], "turn"),
    ...     turn_ids=fl.Column.of([[0], [0]], "response", "i32"),
    ... )
    >>> rl.gigpo(batch, scale="none").advantages.to_list()
    [[1.0], [-1.0]]
    """
    from .math.credit import in_groups_in_groups

    mask = batch.response_mask
    found = in_groups_in_groups(
        batch.rewards.values,
        mask.values,
        mask.lengths,
        batch.turn_rewards.values,
        batch.turn_states.values,
        batch.turn_rewards.lengths,
        batch.turn_ids.values,
        *_groups(batch),
        weight=float(weight),
        gamma=float(gamma),
        scale=scale,
        eps=float(eps),
    )
    return {"advantages": mask.with_values(found.float())}
