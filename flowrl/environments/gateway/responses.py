"""The protocol of OpenAI's responses: requests read, answers written, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import chat_completions
from .events import Events, named_event
from .requests import (
    Refused,
    Reply,
    Request,
    arguments_of,
    conversation,
    entry,
    flag,
    listed,
    message_of,
    role,
    template_kwargs,
    text,
    texts_of,
    whole,
)

PATH = "/v1/responses"
refuse = chat_completions.refuse


def read(body: Mapping[str, Any]) -> Request:
    """A request of this protocol with its whole input. Raises Refused."""
    if body.get("conversation") is not None:
        raise Refused(400, "no conversation is kept here: send previous_response_id, or the whole input again")
    said = texts_of(body.get("instructions"), "instructions")
    messages = [message_of("system", said)] if said else []
    return Request(
        conversation([*messages, *_messages([entry(item, "an item of input") for item in _given(body)])]),
        [_tool(entry(one, "a tool")) for one in listed(body.get("tools") or [], "tools")],
        whole(body.get("max_output_tokens"), "max_output_tokens"),
        stream=flag(body.get("stream"), "stream"),
        model=text(body.get("model", ""), "model"),
        chat_template_kwargs=template_kwargs(body),
    )


def with_whole_input(body: Mapping[str, Any], kept: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    """Put what a ``previous_response_id`` stands for before the input of a request. Raises Refused.

    ``kept`` are the input and the output of earlier responses of the session by their ids. Their instructions are left
    out, as the protocol has it.
    """
    name = body.get("previous_response_id")
    if name is None:
        return body
    before = kept.get(text(name, "previous_response_id"))
    if before is None:
        raise Refused(400, f"this session keeps no response {name!r:.80}: send the whole input again")
    return {**body, "input": [*before, *_given(body)]}


def items_behind(body: Mapping[str, Any], reply: Reply) -> list[Any]:
    """The whole input of a request and the output of its response, which a later request may go on from."""
    return [*_given(body), *_items(reply)]


def _given(body: Mapping[str, Any]) -> list[Any]:
    given = body.get("input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else listed(given, "input")


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages: calls belong to the message of the assistant before them."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            found.append(message_of(role(item.get("role")), texts_of(item.get("content"), "content")))
        elif kind == "function_call":
            name = text(item.get("name"), "the name of a call")
            names[text(item.get("call_id"), "call_id")] = name
            call = {"name": name, "arguments": arguments_of(item.get("arguments"), "the arguments of a call")}
            last = found.pop() if found and found[-1]["role"] == "assistant" else message_of("assistant", "")
            before = [one["function"] for one in last.get("tool_calls", [])]
            found.append(message_of("assistant", last["content"], [*before, call]))
        elif kind == "function_call_output":
            name = names.get(text(item.get("call_id"), "call_id"))
            found.append(message_of("tool", texts_of(item.get("output"), "the output of a call"), name=name))
        else:
            raise Refused(400, f"an item of input is {kind!r:.50}, and messages and calls of functions are read alone")
    return found


def _tool(found: Mapping[str, Any]) -> Mapping[str, Any]:
    if found.get("type") != "function":
        raise Refused(400, f"a tool is {found.get('type')!r:.50}, and there are functions alone")
    function = {name: found[name] for name in ("description", "parameters") if found.get(name) is not None}
    return {"type": "function", "function": {"name": text(found.get("name"), "the name of a tool"), **function}}


def write(reply: Reply, request: Request, created: int) -> dict[str, Any]:
    """A whole answer."""
    given, made = reply.prompt_tokens, reply.sampled_tokens
    usage = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    cut = reply.reason == "length"
    ended = {"status": "incomplete" if cut else "completed"}
    ended |= {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}
    return {**_head(reply.id, request, created), **ended, "output": _items(reply), "usage": usage}


class ResponseEvents(Events):
    """An answer as events: a message, if anything was said, and its calls."""

    def __init__(self, id: str, prompt_tokens: int, request: Request, created: int) -> None:
        super().__init__(id, prompt_tokens, request, created)
        self._number = -1

    def begin(self) -> Iterator[bytes]:
        head = _head(self.id, self.request, self.created)
        begun = {**head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=begun)

    def piece(self, text: str) -> Iterator[bytes]:
        item = _message(self.id, "")
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        if text == self.sent:  # the first one
            begun = {**item, "content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=0, item=begun)
            yield self._event("response.content_part.added", part=item["content"][0], **place)
        yield self._event("response.output_text.delta", delta=text, logprobs=[], **place)

    def finish(self, reply: Reply, rest: str) -> Iterator[bytes]:
        for i, item in enumerate(_items(reply)):
            where = {"item_id": item["id"], "output_index": i}
            if item["type"] == "message":
                if rest or not self.sent:
                    yield self.text(rest)
                part, place = item["content"][0], {**where, "content_index": 0}
                yield self._event("response.output_text.done", text=part["text"], logprobs=[], **place)
                yield self._event("response.content_part.done", part=part, **place)
            else:
                begun, given = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
                yield self._event("response.output_item.added", output_index=i, item=begun)
                yield self._event("response.function_call_arguments.delta", delta=given, **where)
                done = {"arguments": given, "name": item["name"]}
                yield self._event("response.function_call_arguments.done", **done, **where)
            yield self._event("response.output_item.done", output_index=i, item=item)
        whole_answer = write(reply, self.request, self.created)
        yield self._event(f"response.{whole_answer['status']}", response=whole_answer)

    def fail(self, status: int, why: str) -> bytes:
        return self._event("error", code=str(status), message=why, param=None)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"sequence_number": self._number, **more})


def _head(id: str, request: Request, created: int) -> dict[str, Any]:
    about = {"id": f"resp_{id}", "object": "response", "created_at": created, "model": request.model or "policy"}
    return {**about, "error": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def _items(reply: Reply) -> list[dict[str, Any]]:
    """The message, if anything was said, and the calls."""
    found: list[dict[str, Any]] = []
    if reply.content or not reply.tool_calls:
        found.append(_message(reply.id, reply.content))
    for i, call in enumerate(reply.tool_calls):
        made = {"type": "function_call", "id": f"fc_{reply.id}_{i}", "call_id": call["id"], "name": call["name"]}
        given = json.dumps(call["arguments"], ensure_ascii=False)
        found.append({**made, "arguments": given, "status": "completed"})
    return found


def _message(id: str, said: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": "completed", "content": [part]}
