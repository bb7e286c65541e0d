"""The protocol of OpenAI's chat completions: requests read, answers written, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .events import Events
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

PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class ChatRequest(Request):
    """A request whose stream may end with its usage: ``ChatRequest(messages, stream=True, include_usage=True)``."""

    include_usage: bool = False


def read(body: Mapping[str, Any]) -> ChatRequest:
    """A request of this protocol. Raises Refused."""
    if body.get("n") not in (None, 1):
        raise Refused(400, "n is 1 here: ask again for another answer")
    names: dict[str, str] = {}
    messages = [_message(entry(one, "a message"), names) for one in listed(body.get("messages"), "messages")]
    most = body.get("max_completion_tokens")
    options = entry(body.get("stream_options") or {}, "stream_options")
    return ChatRequest(
        conversation(messages),
        [_tool(entry(one, "a tool")) for one in listed(body.get("tools") or [], "tools")],
        whole(body.get("max_tokens") if most is None else most, "max_tokens"),
        stops(body.get("stop"), "stop"),
        flag(body.get("stream"), "stream"),
        flag(body.get("logprobs"), "logprobs"),
        text(body.get("model", ""), "model"),
        template_kwargs(body),
        flag(options.get("include_usage"), "include_usage"),
    )


def _message(found: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A message; ``names`` are the functions of calls by their ids."""
    who = role(found.get("role"))
    calls: list[dict[str, Any]] = []
    for one in listed(found.get("tool_calls") or [], "tool_calls"):
        function = entry(entry(one, "a call").get("function"), "the function of a call")
        name = text(function.get("name"), "the name of a call")
        names[text(one.get("id", ""), "the id of a call")] = name
        calls.append({"name": name, "arguments": arguments_of(function.get("arguments"), "the arguments of a call")})
    name = names.get(text(found.get("tool_call_id", ""), "tool_call_id")) if who == "tool" else None
    return message_of(who, texts_of(found.get("content"), "content"), calls, name)


def _tool(found: Mapping[str, Any]) -> Mapping[str, Any]:
    function = entry(found.get("function"), "the function of a tool")
    text(function.get("name"), "the name of a tool")
    return {"type": "function", "function": function}


def write(reply: Reply, request: Request, created: int) -> dict[str, Any]:
    """A whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
    if reply.tool_calls:
        message["tool_calls"] = _calls(reply)
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.reason}
    choice["logprobs"] = {"content": _logprobs(reply)} if request.logprobs else None
    return {**_head(reply.id, request, created, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


class ChatEvents(Events):
    """An answer as chunks."""

    def begin(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> Iterator[bytes]:
        yield self._chunk({"content": text})

    def finish(self, reply: Reply, rest: str) -> Iterator[bytes]:
        told = {"content": _logprobs(reply)} if self.request.logprobs and reply.content else None
        if rest or told:
            yield self._chunk({"content": rest}, None, told)
        if reply.tool_calls:
            yield self._chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(_calls(reply))]})
        yield self._chunk({}, reply.reason)
        if isinstance(self.request, ChatRequest) and self.request.include_usage:
            yield _data({**self._head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def fail(self, status: int, why: str) -> bytes:
        return _data(refuse(status, why))

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return _data({**self._head, "choices": [choice]})

    @property
    def _head(self) -> dict[str, Any]:
        return _head(self.id, self.request, self.created, "chat.completion.chunk")


def _data(found: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def refuse(status: int, why: str) -> dict[str, Any]:
    """What is said of a request that is not answered."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": why, "type": kind, "param": None, "code": status}}


def _head(id: str, request: Request, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": created, "model": request.model or "policy"}


def _usage(reply: Reply) -> dict[str, int]:
    given, made = reply.prompt_tokens, reply.sampled_tokens
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _logprobs(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": number, "bytes": list(token.encode()), "top_logprobs": []}
        for token, number in reply.logprobs
    ]


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
        }
        for call in reply.tool_calls
    ]
