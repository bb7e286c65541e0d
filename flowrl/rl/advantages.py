"""Advantages from the rewards of rows, or from rewards and values; the mathematics is in ``math/advantages.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..graph.ops.allowed import number
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import one_of, refusal, refuse_lone_rows, warn_of_lone_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column

CENTERS = ("group", "batch", "optimal", "none")
SCALES = ("group", "batch", "mean", "none")
#: The lambda of ``rl.gae`` where nothing is said.
LAM = 0.95
ADDS = "advantages: f32[*response]"
ALL_0 = "every advantage would be 0"
SHARE = number(least=0, most=1)
_LAM = number(least=0, most=1, fix="Give 1 for whole returns, 0 for one step.")


def paid_by_token(call: CallShape) -> str:
    """Return the further field that an op reads of a batch where it is there, as ``reads=`` writes it."""
    return ", token_rewards: f32[*response]" if "token_rewards" in call.have else ""


def token_rewards_of(batch: Batch) -> Tensor | None:
    """Return what tokens were paid, where the batch has it."""
    return batch.token_rewards.values if "token_rewards" in batch.fields else None


def groups_of(batch: Batch, title: str = "", *, least: int = 2) -> tuple[Tensor, int]:
    """Return the prompt of each row, where the rewards lie, and their number.

    Warns in the name of ``title`` where none has ``least`` rows.
    """
    if title:
        warn_of_lone_rows(title, batch, ALL_0, least=least)
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
        refuse_lone_rows(title, call, ALL_0, instead=', or compare over the batch: center="batch", scale="batch"')
    given = "" if of == "rewards" else paid_by_token(call)
    baseline = f", {said['baseline']}: f32[]" if said.get("baseline") else ""
    return "rewards, response_mask" + given + baseline


def _compares(center: Any, scale: Any) -> bool:
    """Whether a prompt with one row has advantage 0."""
    return center in ("group", "optimal") or scale == "group"


def _within_prompts(call: CallShape) -> bool:
    said = call.call
    return "batch" not in (said.get("center"), said.get("scale")) and not said.get("whiten")


@op(owner="rl", reads=_factored_reads, adds=ADDS, cost="local", pieces=_within_prompts)
@takes(eps=number(least=0), gamma=SHARE)
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
        *groups_of(batch, "rl.advantages" if _compares(center, scale) else ""),
        of=of,
        token_rewards=None if of == "rewards" else token_rewards_of(batch),
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
    one_of("rl.group_advantages", "scale", call.call.get("scale"), ("group", "none"))
    refuse_lone_rows("rl.group_advantages", call, ALL_0)
    return "rewards, response_mask"


@op(owner="rl", reads=_group_reads, adds=ADDS, cost="local", pieces=True)
@takes(eps=number(least=0))
def group_advantages(
    batch: Batch, *, scale: str = "group", eps: float = 1e-4, leave_one_out: bool = False
) -> dict[str, Column]:
    """``(r - mean(r)) / (std(r) + eps)`` over the rows of one prompt (GRPO, arXiv:2402.03300, section 4.1.2).

    Every token of a row that the policy sampled has the row's advantage; the others have 0. Rows of a prompt are
    those with the same uid, the first number of their key. The std has Bessel's correction, and a prompt with one row
    has advantage 0. It is :func:`advantages` with its defaults.

    Args:
        batch: reads ``rewards`` f32[] and ``response_mask`` ``bool[*response]``, in any order of rows.
        scale: ``group``, the std, or ``none`` for the difference to the mean alone (Dr. GRPO, arXiv:2503.20783).
        eps: added to the std, so that equal rewards divide by no zero.
        leave_one_out: the mean is that of the prompt's *other* rows (RLOO, arXiv:2402.14740).

    >>> mask = fl.Column.of([[True, True], [True]], "response")
    >>> batch = fl.Batch.of([(0, 0), (0, 1)], rewards=[1.0, 0.0], response_mask=mask)
    >>> rl.group_advantages(batch, scale="none").advantages.to_list()
    [[0.5, 0.5], [-0.5]]
    """
    return advantages.fn(batch, scale=scale, eps=eps, leave_one_out=leave_one_out)


def _gae_reads(call: CallShape) -> str:
    lam, alpha = call.call.get("lam"), call.call.get("alpha")
    if alpha is not None and lam != LAM:
        raise refusal(
            f"rl.gae: lam={lam} and alpha={alpha} both say how far the advantages look.",
            "Leave out one of them; lam_returns= is of the returns.",
        )
    return "rewards, values, response_mask" + paid_by_token(call)


@op(
    owner="rl",
    reads=_gae_reads,
    adds="advantages: f32[*response], returns: f32[*response]",
    cost="local",
    pieces=lambda call: not call.call.get("whiten"),
)
@takes(gamma=SHARE, lam=_LAM, lam_returns=_LAM, alpha=number(above=0, fix="Write alpha=0.05, as in VAPO."))
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
        token_rewards=token_rewards_of(batch),
        gamma=float(gamma),
        lam=float(lam),
        lam_returns=None if lam_returns is None else float(lam_returns),
        alpha=None if alpha is None else float(alpha),
    )
    if whiten:
        found = whitened(found, mask.values)
    return {"advantages": values.with_values(found), "returns": values.with_values(returns)}
