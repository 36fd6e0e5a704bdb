"""A language model of a few words behind the HTTP port: right, or wrong in one chosen way.

It answers what the suites `speculation` and `vision` ask of llama.cpp, without a socket. Its text
is a loop of words; each word is one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bakehouse.progress import Progress, Silent
from bakehouse.system.http import Http, Reply, Unreachable
from bakehouse.system.process import Clock

WORDS = (" the", " boat", " comes", " in", " and", " leaves", " again", ".")
BEST, SECOND = -0.1, -2.4
"""Log-probabilities of the right word and of the runner-up, in nats."""


@dataclass
class TinyModel(Http):
    """Set a field to make it go wrong."""

    speculates: bool | None = True
    """What `/slots` says; None where it says nothing."""
    drafts: bool = True
    accepts: float = 1.0
    """Share of draft tokens that is accepted."""
    swap: dict[int, float] = field(default_factory=dict)
    """Places at which speculation says the runner-up, and by how many nats that one is behind."""
    nan: bool = False
    facts: Callable[[str], str] = lambda _: "It is 4."
    """What a question is answered with speculation."""
    alone: tuple[str, ...] = (" 4", ".")
    """What the same question is answered with, a token a request."""
    images: Callable[[list[dict[str, Any]]], Any] | None = None
    """What is answered to a chat with images: text, or (status, body)."""
    capabilities: tuple[str, ...] = ("completion", "multimodal")
    down: bool = False
    fails: int = 0
    """HTTP status of every completion, if it is not 0."""
    counted: dict[str, float] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def ask(
        self, method: str, url: str, *, json: Any = None, headers: Mapping[str, str] | None = None,
        timeout: float = 30.0, max_bytes: int = 2**20,
    ) -> Reply:  # fmt: skip
        """Answer as the HTTP port does."""
        if self.down:
            raise Unreachable("connection refused", refused=True)
        path = "/" + url.split("/", 3)[3]
        self.asked.append((path, json))
        return self.answer(path, json or {})

    def answer(self, path: str, body: dict[str, Any]) -> Reply:
        """Route."""
        rows = [] if self.speculates is None else [{"speculative": self.speculates}]
        models = {"models": [{"capabilities": list(self.capabilities)}], "data": [{"id": "tiny"}]}
        documents: dict[str, Any] = {"/slots": rows, "/v1/models": models}
        if path in documents:
            return reply(documents[path])
        if path == "/metrics":
            text = "".join(f"llamacpp:{k} {v}\n" for k, v in self.counted.items())
            return Reply(200, {}, text.encode(), 0.0)
        if path == "/apply-template":
            return reply({"prompt": f"<q>{body['messages'][0]['content']}"})
        if self.fails:
            return reply({"error": {"message": "it broke"}}, self.fails)
        if path == "/completion":
            return self.completion(body)
        return self.chat(body)

    def completion(self, body: dict[str, Any]) -> Reply:
        """Go on with a text."""
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        place = sum(isinstance(piece, int) for piece in prompt)
        if body["n_predict"] == 1:
            return self.one(str(prompt[0]), place)
        tokens = [self.word(p, speculating=True) for p in range(body["n_predict"])]
        made = (len(tokens) - 1) if self.drafts else 0
        timings = {"predicted_n": len(tokens)}
        if made:
            kept = round(made * self.accepts)
            timings.update(draft_n=made, draft_n_accepted=kept)
        content = "".join(WORDS[t] for t in tokens)
        return reply({"content": content, "tokens": tokens, "timings": timings})

    def word(self, place: int, *, speculating: bool) -> int:
        """Id of the word at a place."""
        shifted = speculating and place in self.swap
        return (place + shifted) % len(WORDS)

    def one(self, prompt: str, place: int) -> Reply:
        """Give the next token alone, with the likeliest ones."""
        if prompt.startswith("<q>"):
            ended = place >= len(self.alone)
            text = "" if ended else self.alone[place]
            row = {"id": 90 + place, "token": text, "logprob": BEST}
            probs = [{"top_logprobs": [row]}]
            stop = "eos" if ended else "limit"
            return reply(
                {"tokens": [row["id"]], "stop_type": stop, "completion_probabilities": probs}
            )
        best = self.word(place, speculating=False)
        other = (best + 1) % len(WORDS)
        behind = self.swap.get(place, BEST - SECOND)
        rows = [
            {"id": best, "token": WORDS[best], "logprob": None if self.nan else BEST},
            {"id": other, "token": WORDS[other], "logprob": BEST - behind},
        ]
        probs = [{"top_logprobs": rows}]
        return reply({"tokens": [best], "stop_type": "limit", "completion_probabilities": probs})

    def chat(self, body: dict[str, Any]) -> Reply:
        """Answer a question."""
        messages = body.get("messages")
        if not messages:
            return said({"text": self.facts(body["prompt"])})
        shown = any(isinstance(m["content"], list) for m in messages)
        answer = self.images(messages) if shown and self.images else self.facts(
            str(messages[-1]["content"])
        )  # fmt: skip
        if isinstance(answer, tuple):
            return reply(answer[1], answer[0])
        return said({"message": {"role": "assistant", "content": answer}})


def said(choice: dict[str, Any]) -> Reply:
    """An answer's document."""
    return reply({"choices": [{**choice, "finish_reason": "stop"}]})


def reply(data: Any, status: int = 200) -> Reply:
    """A JSON document."""
    return Reply(status, {}, json.dumps(data).encode(), 0.0)


@dataclass
class Around:
    """What a probe needs of the context."""

    http: TinyModel
    clock: Clock = field(default_factory=Clock)
    progress: Progress = field(default_factory=Silent)
