"""Servers that score with a tiny real model: FakeVllm for the implicit head, and with /classify for the scalar one."""

import asyncio
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from aiohttp import web
from tiny_verifiers import digits_tokenizer, language_model, perturb, random_texts, rollout
from torch.func import functional_call

from pvg.config import experiment
from pvg.config.operation import Serving
from pvg.config.training import Verifier
from pvg.models.heads import build_verifier
from pvg.verifier.data import VerifierTemplate
from pvg.verifier.scorer import ScoreCache, VerifierScorer
from pvg.verifier.vllm_backend import VerifierServing, VllmBackend

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))  # where the tests' own server lives
from fake_vllm import FakeOptions, FakeVllm

KEY = "key-of-the-tests"
BETA = 0.5


class Heard:
    """Keeps events."""

    def __init__(self):
        self.found = []

    def event(self, tag, **fields):
        self.found.append((tag, fields))

    def weights(self, name, of="verifier"):
        return [f for tag, f in self.found if tag == "weights" and f["event"] == name and f.get("of") == of]


def head_table(head):
    """`head`: its kind, for `implicit` also with its weight of the reference."""
    kind, _, weight = head.partition(" ")
    return {"kind": kind, "beta": BETA, "reference": float(weight or 1)} if kind == "implicit" else {"kind": kind}


def base(head):
    """A verifier at its start, as servers are started with it."""
    return build_verifier(Verifier(head=head_table(head)), language_model(digits_tokenizer()))


class Told:
    """What the real model says under weights that a server has loaded (None: those it was started with)."""

    def __init__(self, head):
        self._module = base(head).backbone
        self._placed = {}

    def placed(self, weights):
        """Weights in memory as tensors, made once."""
        if weights is None:
            return {}
        if id(weights) not in self._placed:
            found = {name: torch.from_numpy(array.copy()) for name, array in weights.float32().items()}
            self._placed[id(weights)] = (weights, found)  # kept, so that its id stays its own
        return self._placed[id(weights)][1]

    def logprobs(self, weights, ids):
        ids_1L = torch.tensor([list(ids)])
        with torch.no_grad():
            logits_LV = functional_call(self._module, self.placed(weights), (ids_1L,)).logits[0]
        return logits_LV[:-1].log_softmax(-1).gather(1, ids_1L[0, 1:, None])[:, 0].tolist()

    def logit(self, weights, ids):
        placed = dict(self.placed(weights))
        score_1D = placed.pop("score.weight", torch.zeros(1, self._module.config.hidden_size))
        decoder = {name.removeprefix("model."): tensor for name, tensor in placed.items()}
        with torch.no_grad():
            hidden_1LD = functional_call(self._module.model, decoder, (torch.tensor([list(ids)]),)).last_hidden_state
        return float(score_1D[0] @ hidden_1LD[0, -1])


class Scoring(FakeVllm):
    """`scored` counts requests for scores; `before_reply(number)` runs before each reply."""

    def __init__(self, root, head, **options):
        self.told = Told(head)
        runner = "pooling" if head == "scalar" else "generate"
        super().__init__(FakeOptions(root, KEY, **{"runner": runner, **options}), scorer=self.told.logprobs)
        self.scored = Counter()
        self.before_reply = None
        self.lies = False  # takes every label, and loads nothing
        self.claims = None  # the label that it says it has, whatever it was sent

    def info(self):
        return super().info() | ({"label": self.claims} if self.claims else {})

    async def _load(self, label, path):
        if self.lies:
            self.label = str(label)
        else:
            await super()._load(label, path)

    @web.middleware
    async def _guard(self, request, handler):
        if request.path in ("/classify", "/inference/v1/generate"):
            self.scored[request.path] += 1
            if self.before_reply is not None:
                self.before_reply(sum(self.scored.values()))
        return await FakeVllm._guard(self, request, self._classify if request.path == "/classify" else handler)

    async def _classify(self, request):
        body = await request.json()
        assert body["use_activation"] is False
        assert "/" not in body["cache_salt"]
        await asyncio.sleep(self.options.token_ms / 1e3)
        await self._thawed.wait()
        rows = [
            {"index": n, "label": "LABEL_0", "probs": [self.told.logit(self.weights, ids)], "num_classes": 1}
            for n, ids in enumerate(body["input"])
        ]
        return web.json_response({"data": rows[::-1]})

    def forget(self):
        """As restarted, behind connections that a load balancer kept open."""
        self._boot()


@asynccontextmanager
async def servers(tmp_path, head, count=1, **options):
    found = [Scoring(tmp_path / "weights", head, **options) for _ in range(count)]
    for server in found:
        await server.start()
    try:
        yield found
    finally:
        for server in found:
            await server.kill()


class Bench:
    """One verifier, trained a little, scored by torch and by servers."""

    def __init__(self, tmp_path, head, executor, urls, *, references=(), weights=(), **constants):
        (tmp_path / "weights").mkdir(exist_ok=True)
        resolved = experiment.Experiment.model_validate(
            {
                "verifier": {"head": head_table(head), "engine": "vllm", "micro_batch_tokens": 1024},
                "serving": {"verifier_servers": list(urls), "reference_servers": list(references)},
                "weights": {"root": str(tmp_path / "weights"), **dict(weights)},
            }
        )
        usual = {"probe_every_s": 0.1, "retries": 5, "probe_timeout_s": 5.0, "unavailable_s": 10.0}
        quick = type("QuickServing", (Serving,), usual | constants)(**dict(resolved.serving))
        resolved = resolved.model_copy(update={"serving": quick})
        self.section = resolved.verifier
        self.heard = Heard()
        self.executor = executor
        self.model = base(head)
        self.train(1)
        self.serving = VerifierServing(resolved, executor, self.heard, run="test")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.serving.close()

    def train(self, seed):
        perturb(self.model, scale=0.1, seed=seed)

    def scorer(self, *, on_servers=True, version=None):
        template = VerifierTemplate(self.model.tokenizer, "plain", self.section.head.kind)
        backend = VllmBackend(self.serving, self.model, template.key, ScoreCache(1000)) if on_servers else None
        return VerifierScorer(
            self.model,
            template,
            version or self.model.version(),
            cache_entries=1000,
            token_budget=self.section.micro_batch_tokens,
            executor=self.executor,
            prover_fingerprint=digits_tokenizer().fingerprint,
            backend=backend,
        )

    async def torch_scores(self, rollouts):
        return await self.scorer(on_servers=False).score(rollouts)

    async def assert_right(self, scorer, rollouts):
        """The scores, when they are torch's."""
        expected = await self.torch_scores(rollouts)
        found = await scorer.score(rollouts)
        np.testing.assert_allclose(found, expected, atol=1e-3)
        return found


@asynccontextmanager
async def scored(tmp_path, head, executor, count=1, *, token_ms=None, **options):
    """`count` servers, and a bench that uses them."""
    of_servers = {} if token_ms is None else {"token_ms": token_ms}
    async with (
        servers(tmp_path, head, count, **of_servers) as found,
        Bench(tmp_path, head, executor, [server.url for server in found], **options) as bench,
    ):
        yield (*found, bench)


def some(count, seed=1):
    return [rollout(text) for text in random_texts(count, seed)]
