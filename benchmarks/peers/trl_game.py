"""TRL's side of a whole game: a warm start with SFTTrainer if there is one, and rounds of a mint, RewardTrainer and
GRPOTrainer, as a user puts them together.

    .venv-peers/bin/python benchmarks/peers/trl_game.py FOLDER      # started by sides.py

The verifier is a model with the score of pvg's implicit head, which RewardTrainer trains as any reward model; in the
prover's phase the reward function calls it. A sample is a whole game with another seed, in one process.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from trl_environment import arguments, grpo_arguments
from work import HELPFUL, SNEAKY, Orders, graded, model_folder, peak_gb, rate_factor, read_work, results

# Before the imports below: what they print must not reach the driver as an answer.
ORDERS = Orders()

from datasets import Dataset, disable_caching, disable_progress_bars  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402
from transformers.modeling_outputs import SequenceClassifierOutput  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # noqa: E402

Problem = dict[str, str]  # sides.texts_of
Row = tuple[Problem, str, str]  # with role and completion


def opened(folder: Path, adapters: dict[str, Any] | None = None) -> Any:
    """The model, with low-rank adapters on all of its linear layers if they have a rank."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if adapters is None or not adapters["rank"]:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=adapters["rank"], lora_alpha=adapters["alpha"], target_modules="all-linear")
    return get_peft_model(model, config)


class ImplicitScore(PreTrainedModel):
    """`beta` times the log-probability of a solution minus `reference` times that under the initial weights."""

    _supports_sdpa = True

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        super().__init__(AutoConfig.from_pretrained(folder, num_labels=1))  # RewardTrainer asks for one label
        adapters = work["verifier"]["adapters"]
        head, self._opening = work["verifier"]["head"], torch.tensor(work["opening"])
        self._beta, self._reference, self._adapted = head["beta"], head["reference"], adapters["rank"] > 0
        self.model = opened(folder, adapters)
        own = self._reference > 0 and not self._adapted
        self.start = opened(folder).requires_grad_(False) if own else None

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> SequenceClassifierOutput:
        size = len(self._opening)
        begun_NT = (input_ids.unfold(1, size, 1) == self._opening).all(2).cumsum(1)[:, :-1].bool()
        written_NT = begun_NT & attention_mask[:, size:].bool()
        kept = written_NT.shape[1] - int(written_NT.any(0).nonzero()[0])  # from the first solution on
        written_NT, tokens_NT = written_NT[:, -kept:], input_ids[:, -kept:]

        def total_N(model: Any) -> Any:
            shown = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
            logits_NTV = model(**shown, logits_to_keep=kept + 1).logits[:, :-1].float()
            losses = cross_entropy(logits_NTV.flatten(0, 1), tokens_NT.flatten(), reduction="none")
            return -(losses.view_as(tokens_NT) * written_NT).sum(1)

        score_N = total_N(self.model)
        if self._reference:
            with torch.no_grad(), self.model.disable_adapter() if self._adapted else nullcontext():
                score_N = score_N - self._reference * total_N(self.start or self.model)
        return SequenceClassifierOutput(logits=self._beta * score_N[:, None])


class TrlGame:
    """One game. `seconds`: of its parts, by measure."""

    def __init__(self, folder: Path, work: dict[str, Any], seed: int) -> None:
        self._folder, self._work, self._seed = folder, work, seed
        self._draw = random.Random(seed)
        self._at_once = work["training"]["groups"] * work["rollout"]["group_size"]  # solutions sampled or scored
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder(folder))
        torch.manual_seed(seed)
        base = self._warmed() if work["demonstrations"] else model_folder(folder)
        self._prover = opened(base, work["training"]["adapters"])
        self._sources = [self._learned()]  # the base prover's, then those of the rounds
        self.seconds = dict.fromkeys(("verifier_s", "prover_s"), 0.0)

    def play(self) -> dict[str, float]:
        work, found = self._work, dict[str, float]()
        for number in range(work["game"]["rounds"]):
            minted = list(self._mint(number))
            began = time.perf_counter()
            verifier = self._trained_verifier(minted, work["verifier_steps"][number])
            self.seconds["verifier_s"] += time.perf_counter() - began
            if number == 0:  # pvg tests the base prover, too
                self._test(verifier)
            began = time.perf_counter()
            self._train_prover(verifier)
            self.seconds["prover_s"] += time.perf_counter() - began
            self._sources.append(self._learned())
            found = self._test(verifier)
        return found

    def _warmed(self) -> Path:
        """The folder of the prover that has learned the demonstrations."""
        section, place = self._work["warmup"], self._folder / "warmed"
        prover = opened(model_folder(self._folder), self._work["training"]["adapters"])
        texts = [{"prompt": prompt, "completion": solution} for prompt, solution in self._work["demonstrations"]]
        settings = self._arguments(section["steps"]) | {"per_device_train_batch_size": section["batch"]}
        del settings["disable_dropout"]  # SFTConfig has no such setting
        SFTTrainer(
            model=prover,
            args=SFTConfig(**settings, max_length=None),
            train_dataset=Dataset.from_list(texts),
            processing_class=self._tokenizer,
            optimizers=self._optimizer(prover, section["learning_rate"], section["steps"]),
        ).train()
        (prover.merge_and_unload() if self._work["training"]["adapters"]["rank"] else prover).save_pretrained(place)
        return place

    def _mint(self, number: int) -> Iterator[Row]:
        """Solutions of all sources, in equal parts, by both roles."""
        work, sources = self._work, len(self._sources)
        problems = self._drawn(work["problems"]["verifier"], work["mint_problems"][number])
        for place, weights in enumerate(self._sources):
            self._prover.load_state_dict(weights, strict=False)
            each = work["game"]["mint_samples"]
            yield from self._sampled([(p, role) for p in problems[place::sources] for role in self._roles(each)])

    def _drawn(self, pool: Sequence[Any], count: int) -> list[Any]:
        """None again before all of them."""
        found = list[Any]()
        while len(found) < count:
            found += self._draw.sample(pool, len(pool))
        return found[:count]

    def _roles(self, count: int) -> str:
        """A letter for each of `count` solutions or groups; what the share leaves over is drawn."""
        sneaky = int(count * self._work["game"]["sneaky_share"] + self._draw.random())
        return SNEAKY * sneaky + HELPFUL * (count - sneaky)

    def _test(self, verifier: ImplicitScore) -> dict[str, float]:
        roles = (HELPFUL + SNEAKY) * self._work["game"]["test"]["samples"]
        rows = list(self._sampled([(problem, role) for problem in self._work["problems"]["test"] for role in roles]))
        solutions = [(row[0]["id"], row[1], *self._graded(row)) for row in rows]
        return results(solutions, self._scores(verifier, rows))

    def _sampled(self, asked: Sequence[tuple[Problem, str]]) -> Iterator[Row]:
        """A solution of each problem in each role."""
        section = self._work["rollout"]
        settings = {"do_sample": True, "top_k": 0, "temperature": section["temperature"]}
        self._prover.eval()
        if adapted := self._work["training"]["adapters"]["rank"] > 0:
            self._prover.merge_adapter()  # generates faster
        for first in range(0, len(asked), self._at_once):
            some = asked[first : first + self._at_once]
            prompts = [problem[role] for problem, role in some]
            ids = self._tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
            with torch.no_grad(), self._autocast():
                found = self._prover.generate(**ids, max_new_tokens=section["max_tokens"], **settings)
            written = found[:, ids["input_ids"].shape[1] :]
            texts = self._tokenizer.batch_decode(written, skip_special_tokens=True)
            yield from ((*asked, text) for asked, text in zip(some, texts, strict=True))
        if adapted:
            self._prover.unmerge_adapter()

    def _scores(self, verifier: ImplicitScore, rows: Sequence[Row]) -> list[float]:
        found, end = list[float](), self._tokenizer.eos_token
        for first in range(0, len(rows), self._at_once):
            some = rows[first : first + self._at_once]
            texts = [problem["verifier"] + text + end for problem, _, text in some]
            batch = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
            with torch.no_grad(), self._autocast():
                found += verifier.eval()(**batch).logits[:, 0].tolist()
        return found

    def _graded(self, row: Row) -> tuple[bool, bool]:
        problem, _, text = row
        return graded(self._work["pattern"], problem["answer"], text)

    def _trained_verifier(self, minted: Sequence[Row], steps: int) -> ImplicitScore:
        """From its initial weights, on all pairs of a right and a wrong solution of a problem."""
        by_problem: dict[str, tuple[list[str], list[str]]] = {}
        for row in minted:
            by_problem.setdefault(row[0]["verifier"], ([], []))[not self._graded(row)[1]].append(row[2])
        pairs = [
            {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            for prompt, (right, wrong) in by_problem.items()
            for chosen in right
            for rejected in wrong
        ]
        section, verifier = self._work["verifier"], ImplicitScore(model_folder(self._folder, "verifier"), self._work)
        settings = {
            "per_device_train_batch_size": section["pairs"],
            "center_rewards_coefficient": section["score_penalty"],
            "max_length": None,  # nothing to filter
        }
        RewardTrainer(
            model=verifier,
            args=RewardConfig(**self._arguments(steps) | settings),
            train_dataset=Dataset.from_list(pairs),
            processing_class=self._tokenizer,
            optimizers=self._optimizer(verifier, section["learning_rate"], steps),
        ).train()
        return verifier

    def _train_prover(self, verifier: ImplicitScore) -> None:
        """With reward cgc: the score if the solution is right in the helpful role, or wrong in the sneaky one."""
        floor, problems = self._work["game"]["reward"]["floor"], self._work["problems"]["prover"]
        training = self._work["training"]

        def reward(completions: list[str], number: list[int], role: list[str], **_: Any) -> list[float]:
            rows = [(problems[place], *said) for place, *said in zip(number, role, completions, strict=True)]
            return [
                score if formed and right == (player == HELPFUL) else floor
                for score, player, (formed, right) in zip(
                    self._scores(verifier, rows), role, map(self._graded, rows), strict=True
                )
            ]

        roles = [role for _ in range(training["steps"]) for role in self._roles(training["groups"])]
        asked = zip(self._drawn(range(len(problems)), len(roles)), roles, strict=True)
        rows = [{"number": number, "role": role, "prompt": problems[number][role]} for number, role in asked]
        settings = grpo_arguments(self._folder, self._work) | {"max_steps": training["steps"], "seed": self._seed}
        self._prover.train()
        GRPOTrainer(
            model=self._prover,  # goes on from the last round; the reference is opened from the base prover's folder
            reward_funcs=reward,
            args=GRPOConfig(**settings, shuffle_dataset=False),  # each batch has its share of roles
            train_dataset=Dataset.from_list(rows),
            processing_class=self._tokenizer,
        ).train()

    def _learned(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self._prover.named_parameters() if p.requires_grad}

    def _autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._work["bfloat16"])

    def _arguments(self, steps: int) -> dict[str, Any]:
        own = {"max_steps": steps, "bf16": self._work["bfloat16"], "max_grad_norm": self._work["gradient_clip"]}
        whole = {"dataloader_drop_last": True}  # each step has a whole batch, as pvg's
        return arguments(self._folder) | own | whole | {"seed": self._seed}

    def _optimizer(self, model: Any, rate: float, steps: int) -> tuple[Any, Any]:
        """AdamW with its learning rate as pvg sets it."""
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learned, rate, (0.9, self._work["adam_beta2"]), weight_decay=0.0, fused=True)
        factor = partial(rate_factor, warmup=self._work["rising"], steps=steps)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main(folder: Path) -> None:
    work = read_work(folder)
    torch.set_num_threads(work["threads"])
    disable_caching()
    disable_progress_bars()
    parameters = sum(parameter.numel() for parameter in opened(model_folder(folder)).parameters())
    ORDERS.answer({"parameters": parameters, "threads": work["threads"]})
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
