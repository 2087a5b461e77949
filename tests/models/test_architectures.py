"""Tiny models of many architectures: each trains with right numbers, or every command refuses it in the same line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlavaForConditionalGeneration, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from calling import SMALL, pvg

from pvg.config.training import ModelSection, Training
from pvg.errors import ConfigurationError, UsageError
from pvg.game.warm_start import SupervisedObjective, demonstration_batch
from pvg.models import open_model
from pvg.models.adapters import attach_adapters
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.records import Role
from pvg.training.forward import ForwardSettings, fitted, recompute_logprobs

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
WORKS, PADDED = "trains", "trains, prompts not shared"
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "vocab_size": 19}
SIZES = {
    **IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.25,
}  # fmt: skip
OLD = IDS | {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.25}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = EXPERTS | SHARED | LATENT | {"num_key_value_heads": 4}
WINDOW = {"sliding_window": 16}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = MIXED | {"vocab_size_per_layer_input": 19, "hidden_size_per_layer_input": 8}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
HYBRID = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 2))}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "moe_topk": 2}
LONGCAT |= {"zero_expert_num": 2, "num_key_value_heads": 4}
CHUNKED = {"attention_chunk_size": 16, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention"] * 2}
# As the page names them: the model type of transformers, and the settings.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}), "Llama with yarn": ("llama", {"rope_parameters": YARN}),
    "Llama 4": ("llama4_text", EXPERTS | CHUNKED), "SmolLM3": ("smollm3", {}),
    "Qwen 2": ("qwen2", {}), "Qwen 2 MoE": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 24}),
    "Qwen 3": ("qwen3", {}), "Qwen 3 MoE": ("qwen3_moe", EXPERTS),
    "Qwen 3.5": ("qwen3_5", {"text_config": SIZES | HYBRID, "vision_config": {"depth": 1, "hidden_size": 16}}),
    "Gemma": ("gemma", {}), "Gemma 2": ("gemma2", WINDOW), "Gemma 3": ("gemma3_text", MIXED),
    "Gemma 3 with images": ("gemma3", {"text_config": SIZES | MIXED, "vision_config": VISION}),
    "Gemma 4": ("gemma4_text", GEMMA4),
    "Gemma 4 with images": ("gemma4", {"text_config": SIZES | GEMMA4, "vision_config": VISION}),
    "Phi 3": ("phi3", WINDOW), "Phi 3 with longrope": (
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "Mistral": ("mistral", WINDOW), "Mixtral": ("mixtral", EXPERTS),
    "OLMo 2": ("olmo2", {}), "OLMo 3": ("olmo3", MIXED),
    "DeepSeek V2": ("deepseek_v2", DEEPSEEK | {"topk_method": "greedy"}), "DeepSeek V3": ("deepseek_v3", DEEPSEEK),
    "GLM 4": ("glm4", {}), "GLM 4 MoE": ("glm4_moe", EXPERTS | SHARED),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "Granite": ("granite", {"logits_scaling": 4.0}), "StableLM": ("stablelm", {}), "Cohere 2": ("cohere2", MIXED),
    "GPT-OSS": ("gpt_oss", EXPERTS | MIXED), "GPT-2": ("gpt2", OLD), "GPT-NeoX": ("gpt_neox", {}),
    "GPT-J": ("gptj", OLD | {"rotary_dim": 8}), "Falcon": ("falcon", {}),
    "Falcon with alibi": ("falcon", {"alibi": True}),
    "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4}), "MPT": ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "Mamba": ("mamba", {"state_size": 4}), "LFM 2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}), "Doge": ("doge", {}),
    "LongCat Flash": ("longcat_flash", LATENT | LONGCAT), "Hunyuan MoE": ("hunyuan_v1_moe", EXPERTS | {"moe_topk": 2}),
    "Jamba": ("jamba", EXPERTS | {"attn_layer_offset": 1, "attn_layer_period": 2}),
    "BART": ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}),
    "LLaVA": ("llava", {"text_config": {"model_type": "llama", **SIZES},
                        "vision_config": {"model_type": "clip_vision_model", **VISION}}),
}  # fmt: skip


# A random model solves half of its problems: a solution is correct if the sum of its characters is odd.
COIN = """
from pvg.records import Grade, Problem

class Coin:
    def problems(self, split):
        places = range(100, 140) if split == "train" else range(200, 210)
        return [Problem(f"{place}", f"{place}" + "+1" * (place % 4) + "=", "1") for place in places]

    def grade(self, problem, completion):
        return Grade(sum(map(ord, completion)) % 2 == 1, True, completion[-1:])
"""
SMALL_GAME = {
    "task__kind": "custom", "task__source": "coin.py:Coin", "prompts": "tag", "cluster": "none",
    "rollout__max_tokens": 18, "rollout__group_size": 4, "game__mint_samples": 4, "game__test__problems": 2,
}  # fmt: skip


def saved(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """The folder of the architecture's model, with modchain's tokenizer."""
    torch.manual_seed(0)
    kind, settings = ARCHITECTURES[name]
    own = settings if {"text_config", "n_embd"} & set(settings) else SIZES | settings
    config = AutoConfig.for_model(kind, **IDS | {k: v for k, v in own.items() if (kind, k) != ("falcon", "head_dim")})
    module = LlavaForConditionalGeneration(config) if kind == "llava" else AutoModelForCausalLM.from_config(config)
    for weight_name, weight in module.named_parameters():
        if weight_name.endswith("gate.weight"):  # zeros as they are made: all experts alike
            torch.nn.init.normal_(weight, std=0.5)
    module.save_pretrained(folder / "model")
    (tokenizer or modchain_tokenizer()).save_pretrained(folder / "model")
    return str(folder / "model")


def opened(source: str) -> LanguageModel:
    return open_model(ModelSection(source=source), torch.device("cpu"))


def verdicts(source: str, **settings: Any) -> list[str]:
    """Of `pvg train`, `pvg train --dry-run` and `pvg check` in the current folder: WORKS, or their error."""
    Path("coin.py").write_text(COIN)
    keys = SMALL_GAME | {"models__prover__source": source, "models__verifier__source": source} | settings
    words = [word for key, value in keys.items() for word in ("-s", f"{key.replace('__', '.')}={value}")]
    found = []
    for command in (["train"], ["train", "--dry-run"], ["check"]):
        called = pvg(*command, *SMALL, *words)
        assert called.code in (0, 2), called.err
        found.append(called.err[called.err.index("error: ") :] if called.code else WORKS)
    return found


# Each takes some seconds, so most of them are drills.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.drill if k % 4 else pytest.mark.slow) for k, n in enumerate(ARCHITECTURES)],
)
def test_an_architecture_trains_with_right_numbers_or_every_command_refuses_it_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = saved(name, tmp_path)
    train, *others = verdicts(source, training__adapters__rank=0 if name == "GPT-2" else 2)
    assert others == [train] * 2
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.count(" | ") == 1]
    (expected,) = [verdict for names, verdict in rows if name in names.split(", ")]
    if train != WORKS:
        assert expected.startswith("refused"), train
        assert len(train) < 500
        return
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 19, length).astype(np.int32) for length in (3, 9, 9)]
    batch = demonstration_batch(
        prompts, [random.integers(2, 19, n).astype(np.int32) for n in (4, 18, 2)], [Role.HELPFUL] * 3
    )
    with opened(source) as model:
        training, why = fitted(Training(), model.module, 27)
        assert expected == (PADDED if why else WORKS), why
        found = recompute_logprobs(model.module, batch, ForwardSettings.of(training, 1.0, model.tokenizer.pad_id))
        model.module.config.get_text_config()._attn_implementation = "eager"
        for row_, start, logprobs_C in zip(batch.sequences, batch.prompt_lengths, found, strict=True):
            with torch.no_grad():
                all_LV = model.module(input_ids=torch.from_numpy(row_).long()[None]).logits[0].log_softmax(-1)
            expected_C = [float(all_LV[place - 1, row_[place]]) for place in range(start, len(row_))]
            np.testing.assert_allclose(logprobs_C, expected_C, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "fits"), [(5, True), (6, False)])
def test_rows_whose_numbers_depend_on_longer_ones_are_refused_before_a_game(
    max_tokens: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train, *others = verdicts(saved("Phi 3 with longrope", tmp_path), rollout__max_tokens=max_tokens)
    assert others == [train] * 2
    assert (train == WORKS) == fits
    if not fits:
        assert "rollout.max_tokens to at most 5" in train


@pytest.mark.slow
@pytest.mark.parametrize("role", ["pad", "eos"])
def test_a_token_outside_of_the_embedding_is_not_used(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = modchain_tokenizer()
    tokenizer.add_special_tokens({f"{role}_token": "<new>"})
    source = saved("Llama", tmp_path, tokenizer)  # whose generation_config.json names another end token
    assert verdicts(source) == [WORKS] * 3
    with opened(source) as model:
        assert max(model.tokenizer.pad_id, *model.tokenizer.end_ids) < 19
        with pytest.raises(UsageError, match="cannot express '1<new>'"):
            model.tokenizer.encode("1<new>")
    if role == "eos":
        with pytest.raises(ConfigurationError, match="'<new>' with the id 19, but the model's embedding has 19 rows"):
            Tokenizer(tokenizer, rows=19)
    with pytest.raises(ConfigurationError, match="the model's embedding has 18 rows"):
        Tokenizer(modchain_tokenizer(), rows=18)


@pytest.mark.parametrize(
    "name",
    [
        "DeepSeek V3",
        "GLM 4 MoE",
        "ERNIE 4.5 MoE",
        "Qwen 2 MoE",
        "Hunyuan MoE",
        "LongCat Flash",
        "Gemma 3 with images",
        "Falcon",
    ],
)
def test_adapters_are_on_the_dense_and_shared_layers_of_every_language_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="`make install`")
    with opened(saved(name, tmp_path)) as model, attach_adapters(model, 2, 4.0, 0) as adapted:
        adapted.module(input_ids=torch.arange(8)[None]).logits.logsumexp(-1).sum().backward()
        trained = {name for name, weight in adapted.module.named_parameters() if weight.requires_grad}
        assert all(adapted.module.get_parameter(name).grad is not None for name in trained)
        kinds = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
        assert kinds >= {"dense_4h_to_h" if name == "Falcon" else "down_proj"}
        assert not kinds & {"wg", "classifier"}  # of routers


def test_a_warm_start_needs_no_experts_that_a_sampler_chose(tmp_path: Path) -> None:
    with opened(saved("Qwen 3 MoE", tmp_path)) as model:
        tokens = [np.array([3, 4], np.int32)]
        objective = SupervisedObjective(Training(router_replay=True), model.tokenizer.pad_id)
        assert objective.mean_loss(model.module, demonstration_batch(tokens, tokens, [Role.HELPFUL])) > 0
