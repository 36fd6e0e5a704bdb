"""A stand-in for `vllm serve` inside a container: its endpoints, its log, and faults on demand.

Standard library only; runs with the image's own Python. The environment variable FAKE holds the
faults, separated by commas.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ARGV = sys.argv[1:]
HELD: list[bytearray] = []
FAULTS = set(os.environ.get("FAKE", "").split(","))
ANSWERS = {
    "2+2": "The answer is 4.", "days": "A week has seven days.", "France": "It is Paris.",
}  # fmt: skip


def value(flag: str, default: str) -> str:
    return ARGV[ARGV.index(flag) + 1] if flag in ARGV else default


NAMES = ARGV[ARGV.index("--served-model-name") + 1 : ARGV.index("--host")]
LENGTH = int(value("--max-model-len", "2048"))
MODEL = ARGV[1] if ARGV[:1] == ["serve"] else ARGV[0]


def say(text: str) -> None:
    print(f"(APIServer pid=1) INFO 11-30 00:51:26 [model.py:733] {text}", flush=True)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        del args

    def send(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send(b"")
        elif self.path == "/v1/models":
            names = NAMES[:1] if "no-nonce" in FAULTS else NAMES
            key = os.environ.get("VLLM_API_KEY")
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self.send(b"{}", status=401)
                return
            data = [
                {"id": n, "root": MODEL, "max_model_len": LENGTH, "owned_by": "vllm"} for n in names
            ]
            self.send(json.dumps({"data": data}).encode())
        elif self.path == "/version" and "no-version" not in FAULTS:
            number = "0.31.0" if "version" in FAULTS else "0.32.0"
            self.send(json.dumps({"version": number}).encode())
        elif self.path == "/metrics":
            self.send(b'vllm:num_requests_running{engine="0"} 0.0\n', "text/plain")
        elif self.path == "/eat":
            self.send(b"{}")
            threading.Thread(target=eat, daemon=True).start()
        elif self.path == "/die":
            self.send(b"{}")
            os._exit(3)
        else:
            self.send(b"{}", status=404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"]
        text = next((said for word, said in ANSWERS.items() if word in asked), "I do not know.")
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self.send(json.dumps({"choices": [choice], "model": NAMES[0]}).encode())


def eat() -> None:
    """Take memory, some 400 MB a second, and heed no signal that asks nicely."""
    while True:
        HELD.append(bytearray(os.urandom(1 << 20)) * 20)
        time.sleep(0.05)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    say(f"arguments: {ARGV}, HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE')}")
    if "exit" in FAULTS:
        print("ValueError: No available memory for the cache blocks.", flush=True)
        sys.exit(1)
    if "memory" in FAULTS:
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)) * 16)
    if "eats-first" in FAULTS:
        eat()
    if FAULTS & {"deaf", "eats"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    architecture = "TransformersForCausalLM" if "fallback" in FAULTS else "LlamaForCausalLM"
    say(f"Resolved architecture: {architecture}")
    if "write" in FAULTS:
        with open(f"{MODEL}/config.json", "a") as file:
            file.write("x")
    if "shards" in FAULTS:
        print("Loading safetensors checkpoint shards:   0% Completed | 0/2", flush=True)
        time.sleep(3600)
    say(
        "Initializing a V1 LLM engine (v0.32.0) with config: "
        f"model='{MODEL}', speculative_config=None, dtype=torch.float32, "
        f"max_seq_len={LENGTH}, kv_cache_dtype=auto, seed=0"
    )
    say(f"CPU KV cache size: {4 * LENGTH} tokens, Maximum concurrency: 4x")
    server = ThreadingHTTPServer(("0.0.0.0", int(value("--port", "8000"))), Handler)
    say("Application startup complete.")
    server.serve_forever()


if __name__ == "__main__":
    main()
