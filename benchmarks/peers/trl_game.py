"""TRL's side of a whole game: rounds of a mint, RewardTrainer and GRPOTrainer, as a user puts them together.

    .venv-peers/bin/python benchmarks/peers/trl_game.py FOLDER      # started by sides.py

The verifier is a model with the score of pvg's implicit head, which RewardTrainer trains as any reward model; in the
prover's phase the reward function calls it. A sample is a whole game with another seed, in one process.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from trl_environment import arguments, facts
from work import HELPFUL, Orders, graded, model_folder, peak_gb, read_work, results, verifier_folder

# Before the imports below: what they print must not reach the driver as an answer.
ORDERS = Orders()

from datasets import Dataset, disable_caching, disable_progress_bars  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402
from transformers.modeling_outputs import SequenceClassifierOutput  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer  # noqa: E402

BATCH = 256  # solutions that are sampled or scored together
Row = tuple[str, str, str]  # question, role, completion


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


class ImplicitScore(PreTrainedModel):
    """`beta` times the log-probability of a solution minus that under the initial weights."""

    _supports_sdpa = True

    def __init__(self, folder: Path, beta: float, end_of_question: int) -> None:
        super().__init__(AutoConfig.from_pretrained(folder, num_labels=1))  # RewardTrainer asks for one label
        self.model, self.start = opened(folder), opened(folder).requires_grad_(False)
        self._beta, self._end = beta, end_of_question

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> SequenceClassifierOutput:
        written_NT = (input_ids == self._end).cumsum(1)[:, :-1].bool() & attention_mask[:, 1:].bool()

        def total_N(model: Any) -> Any:
            logits_NTV = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
            return -(cross_entropy(logits_NTV.transpose(1, 2), input_ids[:, 1:], reduction="none") * written_NT).sum(1)

        with torch.no_grad():
            before_N = total_N(self.start)
        return SequenceClassifierOutput(logits=self._beta * (total_N(self.model) - before_N)[:, None])


class TrlGame:
    """One game. `seconds`: of its parts, by measure."""

    def __init__(self, folder: Path, work: dict[str, Any], seed: int) -> None:
        self._folder, self._work, self._seed = folder, work, seed
        self._draw = random.Random(seed)
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder(folder))
        self._prover = opened(model_folder(folder))
        self._sources = [copy.deepcopy(self._prover.state_dict())]  # the base prover's, then those of the rounds
        self.seconds = dict.fromkeys(("verifier_s", "prover_s"), 0.0)
        torch.manual_seed(seed)

    def play(self) -> dict[str, float]:
        work, rows, scores = self._work, list[Row](), list[float]()
        for number in range(work["rounds"]):
            minted = list(self._mint(number))
            began = time.perf_counter()
            verifier = self._trained_verifier(minted, work["verifier_steps"][number])
            self.seconds["verifier_s"] += time.perf_counter() - began
            if number == 0:  # pvg tests the base prover, too
                self._test(verifier)
            began = time.perf_counter()
            self._train_prover(verifier)
            self.seconds["prover_s"] += time.perf_counter() - began
            self._sources.append(copy.deepcopy(self._prover.state_dict()))
            rows, scores = self._test(verifier)
        return results(rows, scores)

    def _mint(self, number: int) -> Iterator[Row]:
        """Solutions of all sources, in equal parts, by both roles."""
        problems = self._draw.sample(self._work["problems"]["verifier"], self._work["mint_problems"][number])
        for place, weights in enumerate(self._sources):
            self._prover.load_state_dict(weights)
            yield from self._sampled(problems[place :: len(self._sources)], self._work["mint_samples"] // 2)

    def _test(self, verifier: ImplicitScore) -> tuple[list[Row], list[float]]:
        rows = list(self._sampled(self._work["problems"]["test"], self._work["test_samples"]))
        return rows, self._scores(verifier, rows)

    def _sampled(self, problems: Sequence[str], each: int) -> Iterator[Row]:
        """`each` solutions of every problem by each role."""
        asked = [(question, role) for question in problems for role in "HS" for _ in range(each)]
        self._prover.eval()
        for first in range(0, len(asked), BATCH):
            some = asked[first : first + BATCH]
            ids = self._tokenizer([role + question for question, role in some], return_tensors="pt")
            settings = {"do_sample": True, "top_k": 0, "temperature": self._work["temperature"]}
            with torch.no_grad():
                found = self._prover.generate(**ids, max_new_tokens=self._work["max_tokens"], **settings)
            written = found[:, ids["input_ids"].shape[1] :]
            texts = self._tokenizer.batch_decode(written, skip_special_tokens=True)
            yield from ((*asked, text) for asked, text in zip(some, texts, strict=True))

    def _scores(self, verifier: ImplicitScore, rows: Sequence[Row]) -> list[float]:
        found, end = list[float](), self._tokenizer.eos_token
        for first in range(0, len(rows), BATCH):
            texts = [question + text + end for question, _, text in rows[first : first + BATCH]]
            batch = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
            with torch.no_grad():
                found += verifier.eval()(**batch).logits[:, 0].tolist()
        return found

    def _trained_verifier(self, minted: Sequence[Row], steps: int) -> ImplicitScore:
        """From its initial weights, on all pairs of a right and a wrong solution of a problem."""
        by_problem: dict[str, tuple[list[str], list[str]]] = {}
        for question, _, text in minted:
            by_problem.setdefault(question, ([], []))[not graded(question, text)[1]].append(text)
        pairs = [
            {"prompt": question, "chosen": chosen, "rejected": rejected}
            for question, (right, wrong) in by_problem.items()
            for chosen in right
            for rejected in wrong
        ]
        work = self._work
        verifier = ImplicitScore(
            verifier_folder(self._folder), work["beta"], self._tokenizer.convert_tokens_to_ids("?")
        )
        settings = {
            **arguments(self._folder),
            "max_steps": steps,
            "per_device_train_batch_size": work["pairs"],
            "learning_rate": work["verifier_learning_rate"],
            "lr_scheduler_type": "linear",
            "warmup_steps": work["verifier_warmup"],
            "center_rewards_coefficient": work["score_penalty"],
            "max_length": None,  # nothing to filter
            **self._optimizer(),
        }
        RewardTrainer(
            model=verifier,
            args=RewardConfig(**settings),
            train_dataset=Dataset.from_list(pairs),
            processing_class=self._tokenizer,
        ).train()
        return verifier

    def _train_prover(self, verifier: ImplicitScore) -> None:
        """With reward cgc: the score if the solution is right in the helpful role, or wrong in the sneaky one."""
        work, floor = self._work, self._work["floor"]

        def reward(completions: list[str], question: list[str], role: list[str], **_: Any) -> list[float]:
            scores = self._scores(verifier, list(zip(question, role, completions, strict=True)))
            return [
                score if formed and right == (player == HELPFUL) else floor
                for score, player, (formed, right) in zip(scores, role, map(graded, question, completions), strict=True)
            ]

        count = work["groups"] * work["steps"]
        problems = self._draw.sample(work["problems"]["prover"], count)
        rows = [{"question": q, "role": "HS"[n % 2], "prompt": "HS"[n % 2] + q} for n, q in enumerate(problems)]
        settings = {
            **arguments(self._folder),
            "max_steps": work["steps"],
            "per_device_train_batch_size": work["groups"] * work["group_size"],
            "num_generations": work["group_size"],
            "max_completion_length": work["max_tokens"],
            "temperature": work["temperature"],
            "beta": work["kl"],
            "learning_rate": work["learning_rate"],
            "loss_type": "grpo",
            **self._optimizer(),
            **work["trl"],
        }
        self._prover.train()
        GRPOTrainer(
            model=self._prover,  # goes on from the last round; the reference is opened from the base prover's folder
            reward_funcs=reward,
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=self._tokenizer,
        ).train()

    def _optimizer(self) -> dict[str, Any]:
        return {"seed": self._seed, "adam_beta2": 0.95, "max_grad_norm": self._work["gradient_clip"]}


def main(folder: Path) -> None:
    work = read_work(folder)
    torch.set_num_threads(work["threads"])
    disable_caching()
    disable_progress_bars()
    parameters = sum(parameter.numel() for parameter in opened(model_folder(folder)).parameters())
    ORDERS.answer(facts(parameters, work["trl"]))
    seed = work["seed"]
    while ORDERS.wait():
        gc.collect()
        began = time.perf_counter()
        game = TrlGame(folder, work, seed)
        found = game.play()
        seconds = time.perf_counter() - began
        ORDERS.answer({"game_s": seconds, **game.seconds, "peak_gb": peak_gb(), **found})
        seed += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
