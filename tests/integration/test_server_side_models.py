"""pvg_vllm with other models: a separate output layer, a classifier, adapters. Each test starts a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file
from vllm_servers import (
    EMBEDDED,
    Labels,
    Server,
    generate,
    language_model,
    log_probs,
    mark_stable,
    perturbed,
    prompts,
    publish,
    started,
)

from pvg.servers.pool import RefusedRequest

TOLERANCE = 1e-3  # nats, and logits of the classifier
ADAPTERS = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "3", "--max-cpu-loras", "3"]


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    """A model folder: the embedded prover's configuration with `changes`, random weights, its tokenizer."""
    import transformers

    configuration = transformers.AutoConfig.from_pretrained(EMBEDDED, **changes)
    torch.manual_seed(7)
    module = getattr(transformers, kind)(configuration).float()
    module.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((EMBEDDED / file).read_bytes())
    return folder


def test_an_output_layer_of_its_own_is_updated_too(tmp_path: Path) -> None:
    model = saved(tmp_path / "untied", "LlamaForCausalLM", tie_word_embeddings=False)
    assert "lm_head.weight" in load_file(model / "model.safetensors")

    async def play(server: Server) -> list[float]:
        pool, labels, gaps = server.pool(), Labels(), []
        control = server.control(pool)
        async with aiohttp.ClientSession() as http:
            for seed in [1, 2, 1]:
                tensors, label = perturbed(model, seed), labels.next()
                await control.load_weights(publish(server.root, f"v{label.version}", tensors), label, trace="")
                done = await generate(http, server.url, prompts(1, 24)[0], salt=str(label), prompt_log_probs=True)
                gaps.append(done.gap({str(label): language_model(model, tensors)}))
            del tensors["lm_head.weight"]
            with pytest.raises(RefusedRequest, match=r"lm_head\.weight") as refused:
                await control.load_weights(publish(server.root, "headless", tensors), labels.next(), trace="")
            assert refused.value.code == "load_failed"
        await pool.close()
        return gaps

    with started(model, tmp_path / "server") as server:
        assert max(asyncio.run(play(server))) < TOLERANCE


def test_a_classifier_is_updated_too(tmp_path: Path) -> None:
    import transformers

    model = saved(tmp_path / "classifier", "LlamaForSequenceClassification", num_labels=1)
    sequences = prompts(3, 30, seed=1)

    def expected(tensors: dict[str, torch.Tensor]) -> list[float]:
        module = transformers.LlamaForSequenceClassification.from_pretrained(model, dtype=torch.float32)
        module.load_state_dict(tensors)
        with torch.no_grad():
            return [module(torch.tensor([ids])).logits.item() for ids in sequences]

    async def play(server: Server) -> None:
        pool, labels = server.pool(), Labels()
        control = server.control(pool)
        async with aiohttp.ClientSession() as http:
            assert (await control.info()).runner == "pooling"
            for seed in [0, 1, 2, 1]:
                tensors, label = perturbed(model, seed), labels.next()
                await control.load_weights(publish(server.root, f"v{label.version}", tensors), label, trace="")
                body = {"input": sequences, "use_activation": False}
                async with http.post(server.url + "/classify", json=body) as response:
                    found = await response.json()
                    assert response.status == 200, found
                scores = [entry["probs"][0] for entry in sorted(found["data"], key=lambda entry: entry["index"])]
                assert np.abs(np.subtract(scores, expected(tensors))).max() < TOLERANCE
            del tensors["score.weight"]
            with pytest.raises(RefusedRequest, match=r"score\.weight"):
                await control.load_weights(publish(server.root, "headless", tensors), labels.next(), trace="")
        await pool.close()

    with started(model, tmp_path / "server", "--runner", "pooling") as server:
        asyncio.run(play(server))


def published_adapter(root: Path, name: str, seed: int) -> Any:
    """Publish an adapter of the embedded prover; the model with it, in float32."""
    from peft import LoraConfig, get_peft_model

    base = language_model(EMBEDDED, perturbed(EMBEDDED, 0))
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    module = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=linear, task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for parameter_name, parameter in module.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    module.save_pretrained(root / name)
    (root / name / "README.md").unlink(missing_ok=True)
    mark_stable(root / name, ["adapter_model.safetensors"])
    return module.eval()


def test_adapters_live_side_by_side_and_survive_new_base_weights(tmp_path: Path) -> None:
    async def play(server: Server) -> None:
        modules = {f"a{seed}": published_adapter(server.root, f"a{seed}", seed) for seed in range(1, 5)}
        modules["base"] = language_model(EMBEDDED, perturbed(EMBEDDED, 0))
        pool, labels = server.pool(), Labels()
        control = server.control(pool)
        assert (await control.info()).max_lora_rank == 16
        async with aiohttp.ClientSession() as http:

            async def gap(name: str, model: str) -> float:
                done = await generate(
                    http, server.url, prompts(1, 24)[0], salt=name, model=model, prompt_log_probs=True
                )
                ids = done.prompt + done.tokens
                return float(np.abs(log_probs(modules[name], ids)[1:] - (done.prompt_log_probs + done.log_probs)).max())

            at = {name: labels.next() for name in ["a1", "a2", "a3", "a4"]}
            for name in ["a1", "a2", "a3"]:
                await control.load_adapter(name, at[name], trace="t")
            again = await control.load_adapter("a1", at["a1"], trace="t")
            assert again.parts["load_ms"] == 0.0
            gaps = {name: await gap(name, str(at[name])) for name in ["a1", "a2", "a3", "a1"]}
            gaps["base"] = await gap("base", "")
            assert max(gaps.values()) < TOLERANCE, gaps
            assert await generate(http, server.url, prompts(1, 24)[0], salt="x", model=str(at["a1"]))

            await control.unload_adapter(at["a1"], trace="t")
            await control.unload_adapter(at["a1"], trace="t")
            await control.load_adapter("a4", at["a4"], trace="t")  # beyond what the workers hold: one makes room
            assert max([await gap("a4", str(at["a4"])), await gap("a2", str(at["a2"]))]) < TOLERANCE
            body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 1}, "model": str(at["a1"])}
            async with http.post(server.url + "/inference/v1/generate", json=body) as response:
                assert response.status == 404

            # New base weights under adapters.
            other = perturbed(EMBEDDED, 1)
            await control.load_weights(publish(server.root, "base", other), labels.next(), trace="t")
            modules["base"] = language_model(EMBEDDED, other)
            modules["a2"].base_model.model.load_state_dict(
                {
                    key.replace(part, part + ".base_layer"): tensor
                    for key, tensor in other.items()
                    for part in [key.removesuffix(".weight") if key.endswith("_proj.weight") else "never"]
                },
                strict=False,
            )
            assert max([await gap("base", ""), await gap("a2", str(at["a2"]))]) < TOLERANCE

            (server.root / "a1" / "adapter_model.bin").write_bytes(b"\x80\x04.")
            with pytest.raises(RefusedRequest, match="never pickled"):
                await control.load_adapter("a1", labels.next(), trace="t")
            wide = orjson.loads((server.root / "a2" / "adapter_config.json").read_bytes()) | {"r": 64}
            (server.root / "a2" / "adapter_config.json").write_bytes(orjson.dumps(wide))
            with pytest.raises(RefusedRequest, match="rank") as refused:
                await control.load_adapter("a2", labels.next(), trace="t")
            assert refused.value.code == "load_failed"
        await pool.close()

    with started(EMBEDDED, tmp_path / "server", *ADAPTERS) as server:
        asyncio.run(play(server))
