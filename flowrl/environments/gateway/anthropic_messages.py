"""The protocol of Anthropic's messages: requests read, answers written, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

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
    stops,
    template_kwargs,
    text,
    texts_of,
    whole,
)

PATH = "/v1/messages"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Mapping[str, Any]) -> Request:
    """A request of this protocol. Raises Refused."""
    names: dict[str, str] = {}
    messages: list[Mapping[str, Any]] = []
    if system := texts_of(body.get("system"), "system"):
        messages.append(message_of("system", system))
    for one in listed(body.get("messages"), "messages"):
        messages += _messages(entry(one, "a message"), names)
    if (most := whole(body.get("max_tokens"), "max_tokens")) is None:
        raise Refused(400, "max_tokens is missing")
    return Request(
        conversation(messages),
        [_tool(entry(one, "a tool")) for one in listed(body.get("tools") or [], "tools")],
        most,
        stops(body.get("stop_sequences"), "stop_sequences"),
        flag(body.get("stream"), "stream"),
        model=text(body.get("model", ""), "model"),
        chat_template_kwargs=template_kwargs(body),
    )


def _messages(found: Mapping[str, Any], names: dict[str, str]) -> Iterator[Mapping[str, Any]]:
    """The messages of one: what tools gave are messages of their own."""
    who, content = role(found.get("role")), found.get("content")
    if who not in ("user", "assistant"):
        raise Refused(400, f"the role {who} is neither user nor assistant")
    if isinstance(content, str):
        yield message_of(who, text(content, "content"))
        return
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    results = False
    for part in listed(content, "content"):
        kind = entry(part, "a part of content").get("type")
        if kind == "tool_use" and who == "assistant":
            name = text(part.get("name"), "the name of a call")
            names[text(part.get("id", ""), "the id of a call")] = name
            calls.append({"name": name, "arguments": arguments_of(part.get("input"), "the input of a call")})
        elif kind == "tool_result" and who == "user":
            name = names.get(text(part.get("tool_use_id", ""), "tool_use_id"))
            yield message_of("tool", texts_of(part.get("content"), "what a tool gave"), name=name)
            results = True
        else:
            said.append(texts_of([part], "content"))
    if said or calls or not results:
        yield message_of(who, "\n".join(said), calls)


def _tool(found: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": text(found.get("name"), "the name of a tool")}
    function["description"] = text(found.get("description", ""), "the description of a tool")
    schema = entry(found.get("input_schema", {}), "the input_schema of a tool")
    return {"type": "function", "function": {**function, "parameters": schema}}


def write(reply: Reply, request: Request, created: int) -> dict[str, Any]:
    """A whole answer."""
    return {**_head(reply.id, request), "content": _content(reply), **_end(reply), "usage": _usage(reply)}


class MessageEvents(Events):
    """An answer as events: a block of text, if anything was said, and one for each call."""

    def begin(self) -> Iterator[bytes]:
        begun = {**_head(self.id, self.request), "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        yield named_event("message_start", {"message": {**begun, "usage": usage}})

    def piece(self, text: str) -> Iterator[bytes]:
        if text == self.sent:  # the first one
            yield named_event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
        yield named_event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def finish(self, reply: Reply, rest: str) -> Iterator[bytes]:
        for i, block in enumerate(_content(reply)):
            if block["type"] == "text":
                if rest or not self.sent:
                    yield self.text(rest)
            else:
                yield named_event("content_block_start", {"index": i, "content_block": {**block, "input": {}}})
                given = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": given}
                yield named_event("content_block_delta", {"index": i, "delta": delta})
            yield named_event("content_block_stop", {"index": i})
        yield named_event("message_delta", {"delta": _end(reply), "usage": {"output_tokens": reply.sampled_tokens}})
        yield named_event("message_stop", {})

    def fail(self, status: int, why: str) -> bytes:
        return named_event("error", refuse(status, why))


def refuse(status: int, why: str) -> dict[str, Any]:
    """What is said of a request that is not answered."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": why}}


def _head(id: str, request: Request) -> dict[str, Any]:
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": request.model or "policy"}


def _end(reply: Reply) -> dict[str, Any]:
    if reply.reason == "stop" and reply.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _REASONS[reply.reason], "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens}


def _content(reply: Reply) -> list[dict[str, Any]]:
    said = [{"type": "text", "text": reply.content}] if reply.content or not reply.tool_calls else []
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["arguments"]}
        for call in reply.tool_calls
    ]
    return [*said, *calls]
