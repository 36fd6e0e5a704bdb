"""An HTTP port that answers from a function: for faults that no real server has at will."""

from __future__ import annotations

import json as json_
import threading
from collections.abc import Callable, Mapping
from typing import Any

from bakehouse.probe.client import Client
from bakehouse.probe.models import Endpoint
from bakehouse.progress import Silent
from bakehouse.system.http import Http, Reply
from bakehouse.system.process import Clock

Answer = Callable[[str, dict[str, Any]], Any]
"""From path and body to a document, a (status, document) pair, or an exception to raise."""


class Scripted(Http):
    """Everything that a probe needs of a context."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.clock = Clock()
        self.progress = Silent()
        self._lock = threading.Lock()

    @property
    def http(self) -> Scripted:
        return self

    def ask(
        self, method: str, url: str, *, json: Any = None, headers: Mapping[str, str] | None = None,
        timeout: float = 30.0, max_bytes: int = 8 * 2**20,
    ) -> Reply:  # fmt: skip
        path = url.removeprefix("http://server")
        with self._lock:
            self.asked.append((path, json or {}))
        said = self.answer(path, json or {})
        if isinstance(said, Exception):
            raise said
        status, document = said if isinstance(said, tuple) else (200, said)
        return Reply(status, {}, json_.dumps(document).encode(), 0.01)


def endpoint(engine: str | None = "llama.cpp", context: int | None = None) -> Endpoint:
    return Endpoint("http://server", "m", engine=engine, context=context)


def talk(answer: Answer, engine: str | None = "llama.cpp") -> Client:
    return Client(Scripted(answer), endpoint(engine))


def varied(place: int) -> float:
    """A log-probability that differs from place to place, -2 nats in the mean."""
    return -2.0 + (place * 7 % 11 - 5) / 10


class Llama:
    """What llama-server answers about a model whose tokens are bytes.

    `logprob(place)` is what the token at that place of the text gets; `grammar=False` knows no
    token ids in grammars, `drafts` speculates.
    """

    def __init__(
        self, logprob: Callable[[int], Any] = varied, *, grammar: bool = True,
        drafts: int = 0,
    ) -> None:  # fmt: skip
        self.logprob = logprob
        self.grammar = grammar
        self.drafts = drafts

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            return {"tokens": list(body["content"].encode())}
        if path != "/completion":
            return 404, {"error": {"message": "File Not Found", "code": 404}}
        place = len(body["prompt"])
        if "grammar" in body:
            if not self.grammar:
                return 400, {"error": {"message": "Failed to parse grammar", "code": 400}}
            ids = [int(word[2:-2]) for word in body["grammar"].split()[2:]]
        elif "logit_bias" in body:
            ids = [body["logit_bias"][0][0]]
        else:
            ids = [97] * body["n_predict"]
        rows = [self._row(token, place + n, body.get("n_probs", 1)) for n, token in enumerate(ids)]
        timings = {"predicted_n": len(ids), "prompt_n": 1}
        if self.drafts and len(ids) > 1:
            timings["draft_n"] = self.drafts
        return {"completion_probabilities": rows, "timings": timings, "content": "x", "tokens": ids}

    def _row(self, token: int, place: int, top: int) -> dict[str, Any]:
        own = self.logprob(place)
        others = [{"id": token + n, "logprob": -6.0 - n} for n in range(1, top)]
        best = [{"id": token, "logprob": own}, *others]
        return {"id": token, "logprob": own, "top_logprobs": best}


def vllm(path: str, body: dict[str, Any]) -> Any:
    """What vLLM answers: the first place has no probability, each row its own token first."""
    if path != "/v1/completions":
        return 404, {"error": {"message": "Not Found"}}
    prompt = body["prompt"]
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    choice: dict[str, Any] = {"text": "x", "finish_reason": "length", "prompt_token_ids": ids}
    choice["token_ids"] = [97] * body["max_tokens"]
    if "prompt_logprobs" in body:
        choice["prompt_logprobs"] = [None, *map(_vllm_row, ids[1:])]
    return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}


def _vllm_row(token: int) -> dict[str, Any]:
    return {
        str(token): {"logprob": -2.0, "rank": 2, "decoded_token": chr(token)},
        str(token + 1): {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
    }
