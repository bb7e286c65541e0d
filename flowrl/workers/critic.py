"""Models that give numbers: the critic, a value for each response token, and the reward model, a score for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.function_spec import Spec
from ..graph.ops.update_metrics import Metrics
from ..rl import value_clip
from .model_options import MODEL, OPTIM, UPDATE, Lora, Model
from .tokens.row_text import read_text, score_tokens, text_columns
from .trained_model import TrainedModel, trains

if TYPE_CHECKING:
    from ..batch import Batch

VALUE_LOSS: Spec = value_clip()


class Critic(TrainedModel):
    """A value model: what the rest of a response is worth, before each of its tokens. Arguments as :class:`Actor`.

    >>> flow = fl.Flow("example")
    >>> critic = flow.worker(fl.Critic, "Qwen/Qwen3-0.6B", lr=1e-5)  # a value head on this model
    """

    head = "scalar"

    @takes(**OPTIM, **MODEL)
    def __init__(
        self,
        model: str | Mapping[str, Any] | Model,
        *,
        lr: float | None = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        schedule: str = "constant",
        warmup: int = 0,
        total: int | None = None,
        min_lr: float = 0.0,
        lora: Lora | None = None,
        freeze: str | Sequence[str] = (),
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self.keep_settings(Model.of(model), locals())

    @op(reads="tokens, response_mask", adds="values: f32[*response]", cost="forward", pieces=True)
    def values(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``values``: for each response token, of the state in which it was chosen."""
        return {"values": self.reading_engine().values(batch)}

    @op(reads=trains("values", "tokens, response_mask", what="critic"), updates="weights", cost="train")
    @takes(**UPDATE)
    def update(
        self,
        batch: Batch,
        *,
        loss: Spec = VALUE_LOSS,
        minibatch: int | None = None,
        minibatch_tokens: int | None = None,
        epochs: int = 1,
        micro_tokens: int | None = None,
        lr: float | None = None,
    ) -> Metrics:
        """Regress to ``returns``, with squared error clipped around the old ``values``; the rest as :class:`Actor`."""
        return self.train(batch, loss, locals())


class RewardModel(TrainedModel):
    """A scalar head over the whole row: its value at the last token is the reward.

    Arguments as :class:`Actor`, but ``lr`` is None unless it is said: the model is frozen.

    >>> flow = fl.Flow("example")
    >>> judge = flow.worker(fl.RewardModel, "runs/judge/model/judge")  # frozen
    """

    head = "scalar"
    reads_text: ClassVar[Mapping[str, str]] = {"score": "score_text"}

    @takes(**OPTIM, **MODEL)
    def __init__(
        self,
        model: str | Mapping[str, Any] | Model,
        *,
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        schedule: str = "constant",
        warmup: int = 0,
        total: int | None = None,
        min_lr: float = 0.0,
        lora: Lora | None = None,
        freeze: str | Sequence[str] = (),
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self.keep_settings(Model.of(model), locals())

    @op(reads="tokens", adds="rewards: f32[]", cost="forward", pieces=True)
    def score(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``rewards``: the score of each row, f32[]. It reads ``tokens``, so of a policy of the same tokenizer.

        :meth:`score_text` is for rows of another one.
        """
        return {"rewards": self.reading_engine().scores(batch)}

    @op(reads=text_columns, adds="rewards: f32[]", cost="forward", pieces=True)
    def score_text(
        self,
        batch: Batch,
        *,
        chat: bool = True,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> Mapping[str, Any]:
        """Adds ``rewards``, f32[]: the score of each row's text in this model's own tokens, whoever wrote the row.

        The response is decoded without special tokens. As a chat it is the assistant's message behind those of the row:
        its ``conversation`` (of an episode), else its ``messages``, else its ``prompt`` as the message of a user; they
        are put through this model's chat template, without a generation prompt. The score is that of transformers'
        ``AutoModelForSequenceClassification`` with one label: at the last token that is not the model's padding.

        Args:
            chat: False joins prompt and response to one plain text, for a model without a chat template.
            system: the system message of chats that have none. One that the data source, or ``ask``, has added with
                its own ``system=`` is the policy's, and left out.
            chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``; ModelError for
                one that it never reads.
            tokenizer: what the rows' own tokens are of: the handle of a worker, a name or a folder; None is that of the
                flow's actor.

        Raises ModelError where another tokenizer made the rows, or this one has no chat template; DataError, which
        names the row, for a text of more tokens than the model has positions (nothing is cut), and for messages that
        the template refuses; FieldError for episodes without ``conversation``.

        >>> flow = fl.Flow("example")
        >>> judge = flow.worker(fl.RewardModel, "Skywork/Skywork-Reward-V2-Llama-3.2-1B")
        >>> # in a program, after actor.generate: batch = judge.score_text(batch)
        """
        engine, title = self.reading_engine(), f"{self.name or 'reward model'}.score_text"
        more, writer = chat_template_kwargs or {}, partial(self._tokenizers, tokenizer)
        ids = read_text(batch, chat=chat, system=system, more=more, reader=self.tokenizer, writer=writer, title=title)
        tokens = score_tokens(batch, ids, padding=engine.padding_id, positions=engine.positions)
        return {"rewards": engine.scores(batch.select().with_columns({"tokens": tokens}))}

    @op(reads=trains("scores", "tokens, response_mask", what="reward model"), updates="weights", cost="train")
    @takes(**UPDATE)
    def update(
        self,
        batch: Batch,
        *,
        loss: Spec,
        minibatch: int | None = None,
        minibatch_tokens: int | None = None,
        epochs: int = 1,
        micro_tokens: int | None = None,
        lr: float | None = None,
    ) -> Metrics:
        """Train on the rows, with a loss on scores such as ``rl.bradley_terry()``; the rest as :class:`Actor`."""
        return self.train(batch, loss, locals())
