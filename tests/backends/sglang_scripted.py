"""A server that speaks the protocol of SGLang 0.5.23, as its real server was seen to speak it, and goes wrong as it is told.

It computes whole sequences with transformers and draws with flowrl's processor, so its rows are those of the reference
engine. ``auto=False``: it makes a token of each row when :meth:`Scripted.step` is called.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl.backends.sglang.draw import Draw

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def checksums(weights, tied):
    """As /weights_checker gives them on a CPU: whole parameters of the server, the vocabulary rounded up."""
    found = {}
    for name, weight in weights.items():
        if name.startswith("lm_head.") and tied:
            continue
        whole = [weight]
        for fused, (first, *others) in FUSED.items():
            if f".{first}." in name:
                whole += [weights[name.replace(first, other)] for other in others]
                name = name.replace(first, fused)
            elif any(f".{other}." in name for other in others):
                whole = []
        if whole and ("embed_tokens" in name or "lm_head" in name):
            whole.append(torch.zeros(-len(weight) % 64, weight.shape[1]))
        if whole:
            found[name] = hashlib.sha256(b"".join(w.numpy().tobytes() for w in whole)).hexdigest()[:16]
    return found


class Request:
    """A row on the server."""

    def __init__(self, index, rid, prompt, params, answers):
        self.index, self.rid, self.params, self.answers = index, rid, params, answers
        self.origin_input_ids, self.output_ids, self.customized_info = prompt, [], None
        self.told, self.finishing, self.changes = 0, False, []


class Scripted:
    """``Scripted(folder)`` serves a model until :meth:`close`; ``fault`` names what goes wrong."""

    def __init__(self, folder, *, port=0, key="", auto=True, **info):
        self.changed = threading.Condition(threading.RLock())
        self.key, self.auto, self.fault, self.asked = key, auto, "", []
        self.version, self.paused = "default", ""
        self.model: Any = None
        self.config = AutoConfig.from_pretrained(folder)
        self.info = {
            "version": "0.5.23",
            "enable_custom_logit_processor": True,
            "disable_overlap_schedule": True,
            "skip_tokenizer_init": True,
            "device": "cpu",
            **info,
        }
        self.requests: list[Request] = []
        self.closed = self.released = False
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                scripted.handle(self, None)

            def do_POST(self):
                scripted.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        threading.Thread(target=self.run, daemon=True).start()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in ("auto", "fault"):
            with self.changed:
                self.changed.notify_all()

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def handle(self, http, said):
        path = http.path.strip("/")
        with self.changed:
            self.asked.append((path, said))
        if self.key and http.headers["Authorization"] != f"Bearer {self.key}":
            return self.answer(http, 401, {"error": "Unauthorized"})
        if self.fault == f"400 {path}":
            return self.answer(http, 400, {"error": {"message": "the server does not like it"}})
        if self.fault in (f"hang {path}", "hang"):
            with self.changed:
                self.changed.wait_for(lambda: self.closed or "hang" not in self.fault)
            return None
        if self.fault == f"dies {path}":
            http.connection.close()
            return None
        return getattr(self, path)(http, said)

    @staticmethod
    def answer(http, status, said):
        body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        http.send_response(status)
        http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)

    def server_info(self, http, said):
        self.answer(http, 200, self.info)

    def model_info(self, http, said):
        self.answer(http, 200, {"architectures": self.config.architectures, "weight_version": self.version})

    def health_generate(self, http, said):
        self.answer(http, 503 if self.fault == "silent" else 200, "")

    def generate(self, http, said):
        if self.released:
            return self.answer(http, 500, "it dies of this: it has no weights")
        if not said.get("stream"):
            return self.answer(http, 200, [self.read(row) for row in said["input_ids"]])
        answers = queue.SimpleQueue()
        rows = [
            Request(i, rid, prompt, params, answers)
            for i, (rid, prompt, params) in enumerate(
                zip(said["rid"], said["input_ids"], said["sampling_params"], strict=True)
            )
        ]
        assert all(0 <= t < self.config.vocab_size for row in rows for t in row.origin_input_ids), "it dies of these"
        assert all(row.origin_input_ids for row in rows), "it dies of these"
        http.send_response(200)
        http.end_headers()
        with self.changed:
            known = {row.rid for row in self.requests}
            if twice := [row.rid for row in rows if row.rid in known]:
                answers.put({"error": {"message": f"Duplicate request ID detected: {twice[0]}", "code": 400}})
                rows = []
                left = 0
            else:
                left = len(rows)
                if self.fault == "too few rows":
                    rows, left = rows[:-1], left - 1
                self.requests += rows
            self.changed.notify_all()
        while left or not answers.empty():
            part = answers.get()
            if part is None:
                http.connection.close()
                return None
            left -= part.get("meta_info", {}).get("finish_reason") is not None
            try:
                http.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                http.wfile.flush()
            except OSError:
                return None
        if self.fault != "no end":
            http.wfile.write(b"data: [DONE]\n\n")
        return None

    def read(self, row):
        """A row of a probe."""
        logprobs = self.logits(row).log_softmax(-1)
        read = [[float(logprobs[t - 1, row[t]]), row[t], None] for t in range(1, len(row))]
        if self.fault == "stale head":
            read[0][0] += 0.5
        if self.fault == "nan probe":
            read[1][0] = None
        label = "moved" if self.fault == "label moved" else self.version
        return {
            "output_ids": [0],
            "meta_info": {"input_token_logprobs": [[None, row[0], None], *read], "weight_version": label},
        }

    def abort_request(self, http, said):
        with self.changed:
            for row in [r for r in self.requests if r.rid.startswith(said["rid"])]:
                if self.paused == "retract":
                    del row.output_ids[row.told :]
                    self.finish(row, {"type": "abort", "message": "Abort in waiting queue"})
                else:
                    row.finishing = True
                    if not self.auto and not self.paused:
                        self.go_on(row)  # its next step
            self.changed.notify_all()
        self.answer(http, 200, "")

    def pause_generation(self, http, said):
        with self.changed:
            self.paused = said["mode"]
        self.answer(http, 200, {"status": "ok"})

    def continue_generation(self, http, said):
        with self.changed:
            self.paused = ""
            self.changed.notify_all()
        self.answer(http, 200, {"status": "ok"})

    def flush_cache(self, http, said):
        idle = not self.requests or self.paused == "retract"
        self.answer(http, 200 if idle else 400, "Cache flushed." if idle else "Flush cache failed.")

    def update_weights_from_disk(self, http, said):
        with self.changed:
            if self.released:
                return self.answer(http, 400, {"success": False, "message": "its memory was given back"})
            if said["flush_cache"] and self.requests:
                return self.answer(http, 400, {"success": False, "message": "the cache was not flushed"})
            weights = load_file(Path(said["model_path"]) / "model.safetensors")
            if self.fault == "k not given":
                weights["model.layers.0.self_attn.k_proj.weight"] = self.given["model.layers.0.self_attn.k_proj.weight"]
            if self.fault == "q and k swapped":
                q, k = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
                weights[q], weights[k] = weights[k], weights[q]
            self.given = {name: w.clone() for name, w in weights.items()}
            tied = self.config.tie_word_embeddings
            if self.fault != "nothing loaded" or self.model is None:
                self.sums = checksums(self.given, tied)
                if self.model is None:
                    self.model = AutoModelForCausalLM.from_config(self.config).float().eval()
                self.model.load_state_dict(self.given, strict=not tied)
                self.model.tie_weights()
            for row in self.requests:
                row.changes.append((self.version, len(row.output_ids)))
            self.version = said["weight_version"]
        return self.answer(http, 200, {"success": True, "message": "Succeeded to update model weights."})

    def weights_checker(self, http, said):
        self.answer(http, 200, {"success": True, "ranks": [{"checksums": self.sums}]})

    def release_memory_occupation(self, http, said):
        with self.changed:
            if self.requests:
                return self.answer(http, 500, "it dies of this: it is called only when the server is idle")
            self.released, self.model, self.sums = True, None, {}
        return self.answer(http, 200, "null")

    def resume_memory_occupation(self, http, said):
        with self.changed:
            self.released = False
        self.answer(http, 200, "null")

    # -- rows ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, ids):
        return self.model(torch.tensor([ids])).logits[0]

    def run(self):
        """Go on by itself, where it does."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or (self.auto and self.requests and not self.paused))
                if self.closed:
                    return
                self.step()
            time.sleep(0)

    def step(self):
        """A token of each row; return how many have ended."""
        with self.changed:
            before = len(self.requests)
            for row in [] if self.paused or self.fault == "silent" else list(self.requests):
                self.go_on(row)
            return before - len(self.requests)

    def go_on(self, row):
        params = row.params
        if row.finishing:
            return self.finish(row, {"type": "abort", "message": "Aborted"})
        logits = self.logits([*row.origin_input_ids, *row.output_ids])[-1:].clone()
        token = int(Draw()(logits, [{**params["custom_params"], "__req__": row}]).argmax())
        row.output_ids.append(token)
        if token in params["stop_token_ids"]:
            return self.finish(row, {"type": "stop", "matched": token})
        if len(row.output_ids) == params["max_new_tokens"] or (self.fault == "no room" and len(row.output_ids) == 2):
            return self.finish(row, {"type": "length", "length": len(row.output_ids)})
        if len(row.output_ids) % params["stream_interval"] == 1:
            self.tell(row)
        return None

    def tell(self, row, **meta):
        """Send what a row has."""
        row.told = len(row.output_ids)
        (key, pairs) = next(iter(row.customized_info.items())) if row.customized_info else ("flowrl_logprobs", [])
        pairs = [[None if p != p else p for p in pair] for pair in pairs[: row.told]]  # as JSON has no other word
        ids = list(row.output_ids)
        if meta and row.index == 0:
            ids, pairs, meta = spoiled(self.fault, ids, pairs, meta)
        said = {
            "output_ids": ids,
            "meta_info": {"id": row.rid, "finish_reason": None, key: pairs, **meta},
            "index": row.index,
        }
        if self.fault == "dies with rows":
            row.answers.put(None)
        elif self.fault == "another place":
            row.answers.put({**said, "index": 99})
        else:
            row.answers.put(said)
            if self.fault == "twice" and meta:
                row.answers.put(said)

    def finish(self, row, reason):
        spans, start = [], 0
        for version, end in [*row.changes, (self.version, len(row.output_ids))]:
            if end > start or not spans:
                spans.append({"version": version, "start": start, "end": end})
            start = max(start, end)
        self.requests.remove(row)
        self.tell(row, finish_reason=reason, weight_versions=spans)

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.http.shutdown()
        self.http.server_close()


def spoiled(fault, ids, pairs, meta):
    """The last message of a row, wrong in one way."""
    wrong = {
        "no draw": (ids, [], meta),
        "nan": (ids, [*pairs[:-1], [None, None]], meta),
        "not of the vocabulary": ([*ids[:-1], 100_000], pairs, meta),
        "too many tokens": (ids * 50, pairs * 50, meta),
        "other weights": (ids, pairs, {**meta, "weight_versions": [{"version": "9", "start": 0, "end": len(ids)}]}),
        "versions of half": (ids, pairs, {**meta, "weight_versions": meta["weight_versions"][:0]}),
        "other stop": (ids, pairs, {**meta, "finish_reason": {"type": "stop", "matched": 1}}),
        "aborted": (ids, pairs, {**meta, "finish_reason": {"type": "abort", "message": "out of memory"}}),
        "odd reason": (ids, pairs, {**meta, "finish_reason": {"type": "tired"}}),
    }
    return wrong.get(fault, (ids, pairs, meta))


def stand_in(folder):
    """A Python that has this server under the name of SGLang: the path of a script, for ``python:``."""
    import sys

    package = folder / "stub" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "srt" / "__init__.py").write_text("")
    (package / "srt" / "server_args.py").write_text(
        "def prepare_server_args(argv):\n    return dict(a.removeprefix('--').partition('=')[::2] for a in argv)\n"
    )
    (package / "launch_server.py").write_text(
        "import sys, threading\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "def run_server(args):\n"
        "    from sglang_scripted import Scripted\n"
        "    print('serving', flush=True)\n"
        "    Scripted(args['model-path'], port=int(args['port']), key=args['api-key'], arguments=args)\n"
        "    threading.Event().wait()\n"
    )
    info = folder / "stub" / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    python = folder / "python"
    path = f"{folder / 'stub'}${{PYTHONPATH:+:$PYTHONPATH}}"  # an empty part would be the folder that it is started in
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)
