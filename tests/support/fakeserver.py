"""A stand-in for llama-server into which faults are injected: `--fault NAME[=VALUE]`, repeatable.

Speaks as much of the HTTP surface as readiness reads. Without a fault it is a healthy server.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START = time.monotonic()


def parse() -> tuple[argparse.Namespace, dict[str, str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", default="")
    parser.add_argument("-c", type=int, default=512)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--alias", default="")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--verbosity")
    parser.add_argument("--api-key-file")
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args()
    return options, {f.partition("=")[0]: f.partition("=")[2] for f in options.fault}


OPTIONS, FAULTS = parse()
CAPABILITIES = ["completion", *(["multimodal"] if "draft-lost" in FAULTS else [])]
KEYS = {
    f"Bearer {key}"
    for key in (Path(OPTIONS.api_key_file).read_text().splitlines() if OPTIONS.api_key_file else ())
}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


DRAFT_LOST = (
    "E decode: failed to initialize batch",
    "E spec  process: llama_decode(ctx_dft) head=0 failed rc=-1 (pos=36)",
    "E srv   decode: failed to process speculative batch",
    "   the last position stored in the memory module of the context (i.e. the KV cache)",
    "   for sequence 3 is X = 19",
    "   it is required that the sequence positions remain consecutive: Y = X + 1",
)
"""As logged by a server with --spec-type draft-mtp at each image request."""


COUNTED = {"metrics": 0, "posts": 0}


def timings() -> dict[str, Any]:
    """What an engine tells of an answer: `rate=TOK/S`, give or take 2%, and `drafts=MADE:KEPT`."""
    rate = float(FAULTS["rate"]) * (1.0, 1.02, 0.98)[COUNTED["posts"] % 3]
    made, _, kept = FAULTS.get("drafts", "").partition(":")
    drafts = {"draft_n": int(made), "draft_n_accepted": int(kept)} if made else {}
    return {"predicted_n": 60, "predicted_ms": 60_000 / rate, **drafts}


def count_post() -> None:
    """Log a line for each request (`grumbles=LINE`), and die at the nth (`dies-at=N`)."""
    COUNTED["posts"] += 1
    if "chatty" in FAULTS:
        log("request POST")
    if "grumbles" in FAULTS:
        log(f"0.00.001.{COUNTED['posts']:03d} E {FAULTS['grumbles']}")
    if COUNTED["posts"] == int(FAULTS.get("dies-at") or 0):
        log("0.00.002.000 E GGML_ASSERT(all is well) failed")
        os._exit(134)


def metrics() -> str:
    """Counters: `frozen` and `hangs` show work that does not move, `moves` work that does."""
    COUNTED["metrics"] += 1
    busy = int(bool({"frozen", "moves", "hangs"} & FAULTS.keys()))
    tokens = 10 + (COUNTED["metrics"] if "moves" in FAULTS else 0)
    return f"llamacpp:tokens_predicted_total {tokens}\nllamacpp:requests_processing {busy}\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        if "chatty" in FAULTS:
            log(f"request {self.command} {self.path}")

    def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if "html" in FAULTS:
            return self.answer(200, "<html><body>Welcome to nginx!</body></html>", "text/html")
        if "garbage" in FAULTS:
            return self.answer(200, "\x00\x01{not json")
        if "unauthorized" in FAULTS or (
            KEYS and self.path != "/health" and self.headers.get("Authorization") not in KEYS
        ):
            error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
            return self.answer(401, {"error": error})
        loading = time.monotonic() - START < float(FAULTS.get("slow") or 0)
        if loading or "never" in FAULTS:
            error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
            return self.answer(503, {"error": error})
        return self.route()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if KEYS and self.headers.get("Authorization") not in KEYS:
            return self.answer(401, {"error": {"message": "Invalid API Key", "code": 401}})
        count_post()
        if "hangs" in FAULTS:
            time.sleep(600)
        if "broken" in FAULTS:
            return self.answer(500, {"error": {"message": "it broke", "code": 500}})
        if "draft-lost" in FAULTS and "image_url" in json.dumps(asked):
            for line in DRAFT_LOST:
                log(line)
            return self.answer(500, {"error": {"message": "Invalid input batch.", "code": 500}})
        if self.path == "/tokenize":
            return self.answer(200, {"tokens": list(asked["content"].encode())})
        if self.path == "/completion":
            rows = probabilities(asked)
            tokens = [row["id"] for row in rows]
            return self.answer(200, {"completion_probabilities": rows, "tokens": tokens})
        text = "The answer is 5." if "wrong" in FAULTS else "The answer is 4."
        if "varied" in FAULTS:
            text += f" You asked with {len(json.dumps(asked))} characters."
        text += FAULTS.get("says", "")
        told = {"timings": timings()} if "rate" in FAULTS else {}
        choice = {"index": 0, "finish_reason": "stop",
                  "message": {"role": "assistant", "content": text}, "text": text}  # fmt: skip
        usage = {"completion_tokens": 6, "prompt_tokens": 5}
        return self.answer(
            200, {"model": OPTIONS.alias, "choices": [choice], "usage": usage, **told}
        )

    def route(self) -> None:
        aliases = OPTIONS.alias.split(",")
        if "old-nonce" in FAULTS:
            aliases = [aliases[0], "~bakehouse-0123456789abcdef"]
        if "wrong-name" in FAULTS:
            aliases = ["someone-else", aliases[-1]]
        router = "router" in FAULTS
        routes: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {
                "models": [{"name": aliases[0], "capabilities": CAPABILITIES}],
                "data": [] if router else [{"id": aliases[0], "aliases": aliases}],
            },
            "/props": {
                "role": "router" if router else "single",
                "model_path": FAULTS.get("model-path", OPTIONS.m),
                "build_info": FAULTS.get("build", "b1-abc"),
                "total_slots": OPTIONS.parallel,
                "chat_template": "" if "no-template" in FAULTS else "{{ messages }}",
            },
            "/slots": [
                {
                    "id": n,
                    "n_ctx": int(FAULTS.get("context", OPTIONS.c)) // OPTIONS.parallel,
                    "speculative": "speculates" in FAULTS,
                }
                for n in range(OPTIONS.parallel)
            ],
        }
        if self.path in routes:
            return self.answer(200, routes[self.path])
        if self.path == "/metrics":
            return self.answer(200, metrics(), "text/plain")
        if self.path.startswith("/fault/"):
            FAULTS[self.path[7:]] = ""
            return self.answer(200, {})
        if self.path == "/die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.path == "/sicken":
            FAULTS["never"] = ""
        if self.path == "/corrupt":
            log("CUDA error: an illegal memory access was encountered")
        return self.answer(404 if self.path[1:] not in ("sicken", "corrupt") else 200, {})


def probabilities(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Give what a grammar of token ids asks for; how likely each is goes by its id."""
    ids = [int(word[2:-2]) for word in body.get("grammar", "").split()[2:]]
    mean = -9.0 if "wrong" in FAULTS else -2.0
    numbered = [(token, mean + token % 7 / 10) for token in ids or [97] * body["n_predict"]]
    return [
        {"id": token, "logprob": number, "top_logprobs": [{"id": token, "logprob": number}]}
        for token, number in numbered
    ]


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True

    def server_bind(self) -> None:
        if "share-port" in FAULTS:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def spawn_stray() -> None:
    """A grandchild in a session of its own that ignores TERM, as a stuck worker would."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)


def talk() -> None:
    for number in range(6000):
        log(f"loading {number}")
        time.sleep(0.1)


def eat(rate: int, most: int) -> None:
    """Take memory, megabytes a second, and touch every page of it; never more than `most`."""
    held: list[bytearray] = []
    while len(held) * 5 < most:
        held.append(bytearray(os.urandom(1) * 5_000_000))
        time.sleep(5 / rate)
    time.sleep(600)


def leave(*_: Any) -> None:
    if "last-words" in FAULTS:
        log(f"0.00.009.000 E {FAULTS['last-words']}")
    os._exit(0)


def main() -> None:
    log("0.00.000.001 I srv  llama_server: initializing ...")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignore-term" in FAULTS else leave)
    if "stray" in FAULTS:
        spawn_stray()
    for line in FAULTS.get("print", "").split("|"):
        if line:
            log(line)
    if "signal" in FAULTS:
        ctypes.CDLL(None).prctl(4, 0)
        signal.signal(int(FAULTS["signal"]), signal.SIG_DFL) if FAULTS["signal"] != "9" else None
        os.kill(os.getpid(), int(FAULTS["signal"]))
    if "exit" in FAULTS:
        log("0.00.000.002 E srv    load_model: failed to load model, 'x.gguf'")
        log("0.00.000.003 I srv  llama_server: exiting due to model loading error")
        sys.exit(int(FAULTS["exit"]))
    if "never-listen" in FAULTS:
        time.sleep(600)
    if "eats" in FAULTS:
        rate, _, most = FAULTS["eats"].partition(":")
        threading.Thread(target=eat, args=(int(rate), int(most)), daemon=True).start()
    if "talks" in FAULTS:
        threading.Thread(target=talk, daemon=True).start()
    log(f"healthy from {START + float(FAULTS.get('slow') or 0)}")
    server = Server((OPTIONS.host, OPTIONS.port), Handler)
    log(f"0.00.000.004 I srv  llama_server: listening on {server.server_address}")
    server.serve_forever()


if __name__ == "__main__":
    main()
