"""The calls of an agent as a tree: one that goes on where another ended extends its tokens, as they were sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...data.template_arguments import check_read
from ...errors import ModelError
from ...workers.policy_calls import Answer
from ..chat import ids_behind
from .requests import Refused, key_of


@dataclass(eq=False)
class Call:
    """A call that was answered: ``before`` are the tokens between the call that it goes on from and its answer."""

    parent: Call | None
    before: list[int]
    answer: Answer
    messages: Sequence[Mapping[str, Any]]  # with the answer
    children: int = 0
    wasted: int = 0  # tokens that were sampled behind the end of its answer

    @property
    def chain(self) -> list[Call]:
        """The calls from the first one to this one."""
        found: list[Call] = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    @property
    def ids(self) -> list[int]:
        """All tokens up to its end."""
        return [token for call in self.chain for token in (*call.before, *call.answer.ids)]


@dataclass
class CallTree:
    """The calls of a session. A fork is a call that goes on from none of the latest ones."""

    tokenizer: Any
    calls: list[Call] = field(default_factory=list[Call])
    repairs: int = 0  # answers that were sent back with other white space, and stay as they were sampled
    _ends: dict[str, Call] = field(default_factory=dict[str, Call])

    def place(self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> tuple[Call | None, list[int]]:
        """The call that messages go on from, if any, and the tokens from there to the answer. Raises Refused.

        ``more`` are tools and arguments of the chat template. With others of them no call goes on from an earlier one,
        whose messages they may have rendered in another way.
        """
        names = _names(messages, more)
        for length in range(len(messages) - 1, 0, -1):
            parent = self._ends.get(names[length - 1])
            if parent is not None:
                return parent, self._behind(parent, messages[length:], more)
        return None, self._rendered(messages, more)

    def is_fork(self, parent: Call | None) -> bool:
        """Whether a call that goes on from there is a fork."""
        return bool(self.calls) if parent is None else parent.children > 0

    def add(
        self,
        parent: Call | None,
        before: list[int],
        answer: Answer,
        messages: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any],
    ) -> Call:
        """Note a call that was answered; ``messages`` end with the answer."""
        call = Call(parent, before, answer, messages)
        if parent is not None:
            parent.children += 1
            self.repairs += messages[len(parent.messages) - 1]["content"] != parent.messages[-1]["content"]
        self.calls.append(call)
        self._ends[_names(messages, more)[-1]] = call  # of equal ones the latest
        return call

    @property
    def leaves(self) -> list[Call]:
        """The last call of each branch."""
        return [call for call in self.calls if not call.children]

    @property
    def forks(self) -> int:
        """How often a call was a fork."""
        return max(0, len(self.leaves) - 1)

    @property
    def main(self) -> Call | None:
        """The end of the branch with the most sampled tokens, of equal ones the latest; None without a call."""
        sizes = [(sum(len(call.answer.ids) for call in leaf.chain), i) for i, leaf in enumerate(self.leaves)]
        return self.leaves[max(sizes)[1]] if sizes else None

    def _behind(self, parent: Call, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[int]:
        last = parent.answer.ids[-1] if parent.answer.ids else None
        try:
            return ids_behind(messages, self.tokenizer, last=last, more=more)
        except ModelError as error:
            raise Refused(400, error.what) from error

    def _rendered(self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[int]:
        try:
            check_read(more, self.tokenizer)
        except ModelError as error:
            have = f"; it reads {error.have}" if error.have else ""
            raise Refused(400, f"{error.what.rstrip('.')}{have}") from error
        if getattr(self.tokenizer, "chat_template", None) is None:
            said = "".join(message["content"] for message in messages)
            return self.tokenizer.encode(said, add_special_tokens=False)
        how = {**more, "tokenize": False, "add_generation_prompt": True}
        try:
            said = self.tokenizer.apply_chat_template([dict(message) for message in messages], **how)
        except Exception as error:  # of jinja, or raised by the template
            raise Refused(400, f"the chat template refuses these messages: {error}"[:500]) from error
        return self.tokenizer.encode(said, add_special_tokens=False)


def _names(messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[str]:
    """A name for the conversation up to each message: equal where messages, tools and arguments say the same."""
    running = hashlib.sha256(json.dumps(more, sort_keys=True).encode())
    found: list[str] = []
    for message in messages:
        running.update(key_of(message).encode() + b"\0")
        found.append(running.hexdigest())
    return found
