"""Plays tasksets of verifiers 0.4 by a policy, then by verifiers itself with the same answers; prints both as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from adapter_play import page_trained, played
from aiohttp import web
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from flowrl.environments import TasksetEnvironment
from flowrl.errors import WorkerError

LETTERS = list("abcde")
CALL = '<tool_call>{"name": "letter_tools_letter", "arguments": {"place": %d}}</tool_call>'


class Said:
    """An endpoint of OpenAI's protocol that answers with given texts, one after another."""

    def __init__(self) -> None:
        self.texts = iter(())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = next(self.texts)
        about = {"id": "x", "created": 0, "model": "policy"}
        message, reason = {"role": "assistant", "content": text}, "stop"
        if text.startswith("<tool_call>"):
            found = json.loads(text[len("<tool_call>") : -len("</tool_call>")])
            function = {"name": found["name"], "arguments": json.dumps(found["arguments"])}
            call = {"index": 0, "id": "call", "type": "function", "function": function}
            message, reason = {"role": "assistant", "content": "", "tool_calls": [call]}, "tool_calls"
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": reason, "message": message}
            return web.json_response({**about, "object": "chat.completion", "choices": [choice]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for delta, end in ((message, None), ({}, reason)):
            chunk = {**about, "object": "chat.completion.chunk"}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": end}]
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def graded(taskset, rows, **options):
    """What verifiers gives for episodes in which the model says what the policy has said."""
    server, app = Said(), web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    config = resolve_env_config({"taskset": {"id": taskset, **options}})
    [role] = [name for name, value in config if isinstance(value, vf.AgentConfig)]
    seat = vf.AgentConfig.model_validate({"harness": {"id": os.environ["HARNESS"]}, "runtime": {"type": "subprocess"}})
    env = load_environment(config.model_copy(update={role: seat}))
    tasks, found = list(env.taskset.take(4)), []
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NONE")
    async with env.serving():
        for row in rows:
            server.texts = iter(row["texts"])
            episode = await env.run_episode(tasks[row["task"]["task"]], vf.ModelContext(model="policy", client=client))
            [trace] = episode.traces
            scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
            scores |= {name: value for name, value in trace.metrics.items() if value is not None}
            found.append({"ok": trace.ok, "reward": trace.reward, "scores": scores, "reason": trace.stop_condition})
    await runner.cleanup()
    return found


def both(taskset, *, n=3, words=LETTERS, tasks=4, max_tokens=3, harness=None, **options):
    most = {"tasks": tasks} if taskset == "counting_taskset" else {}
    env = TasksetEnvironment(taskset, harness=harness, **most, **options)
    found = played(env, words, tasks=tasks, n=n, max_tokens=max_tokens)
    done = [row for row in found["rows"] if row["outcome"] == "finished"]
    for row, theirs in zip(done, asyncio.run(graded(taskset, done, **options)), strict=True):
        row["theirs"] = theirs
    return found


def refused(*given, **options):
    try:
        list(TasksetEnvironment(*given, **options).rows())
    except WorkerError as error:
        return str(error)


if __name__ == "__main__":
    list(TasksetEnvironment("letters_taskset").rows())  # which makes the harness known that runs in a process
    os.environ["HARNESS"] = "flowrl-chat"
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], *sys.path[-1:], os.environ.get("PYTHONPATH", "")])  # tools
    found: dict[str, Any] = {"alone": both("letters_taskset", n=6), "talk": both("counting_taskset")}
    found["tools"] = both("tools_taskset", tasks=2, n=6, words=["a", "b", *(CALL % i for i in range(6))], max_tokens=1)
    os.environ["PATH"] = os.pathsep.join([f"{sys.path[-1]}/bin", os.environ["PATH"]])  # uv, which starts programs
    found["program"] = both("letters_taskset", n=3, harness="null")
    shell = '<tool_call>{"name": "bash", "arguments": {"command": "echo %d"}}</tool_call>'
    bash = TasksetEnvironment("letters_taskset", harness="bash")
    found["shell"] = played(bash, ["a", "b", *(shell % i for i in range(6))], tasks=4, n=3, max_tokens=1)
    found["cut"] = played(TasksetEnvironment("counting_taskset", tasks=4), LETTERS, tasks=4, n=3, turns=1, max_tokens=3)
    found["slow"] = played(TasksetEnvironment("letters_taskset", kind="slow"), LETTERS, tasks=4, n=1, seconds=1.0)
    found["broken"] = played(TasksetEnvironment("letters_taskset", kind="broken"), LETTERS, tasks=4, n=3, max_tokens=3)
    found["page"] = page_trained("Tasksets of verifiers", LETTERS, {'"gsm8k-v1", tasks=2000': '"letters_taskset"'})
    found["refused"] = [
        refused("leters_taskset"),
        refused("letters_taskset", kid="plain"),
        refused("letters_taskset", kind="boxed"),
        refused("counting_taskset"),
        refused("letters_taskset", harness="mini_swe_agent"),
    ]
    print(f"\n{json.dumps(found)}")
