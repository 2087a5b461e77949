from contextlib import nullcontext

import numpy as np
import pytest
import torch
from game.tiny_programmer import tokenizer as characters
from verifier.tiny_verifiers import digits_tokenizer, english_tokenizer, language_model

from pvg.config.training import Verifier
from pvg.errors import ConfigurationError
from pvg.models.heads import HEADS, build_verifier
from pvg.models.language_model import LanguageModel
from pvg.models.packing import pad_right
from pvg.models.tokenizer import Tokenizer

SCORING = [head for head in HEADS if head != "generative"]  # heads with a score per forward pass

pytestmark = pytest.mark.slow

PROMPT = 4


def open_tiny(dtype: torch.dtype = torch.float32, seed: int = 0, *, tied: bool = False) -> LanguageModel:
    model = language_model(english_tokenizer(), seed, context=40, tied=tied)
    return LanguageModel(model.module.to(dtype), model.tokenizer, "tiny")


def build(head: str, dtype: torch.dtype = torch.float32, *, moved: bool = True, tied: bool = False, **settings: float):
    model = build_verifier(Verifier(head={"kind": head, **settings}), open_tiny(dtype, tied=tied))
    if moved:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.trainable_state().values():
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return model


def some_rows(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 14, rng.integers(PROMPT + 1, 30)).astype(np.int32) for _ in range(count)]


def scores_of(model, rows, *, width: int = 0):
    ids_BL, lengths_B = pad_right(rows, 0)
    ids_BL = torch.nn.functional.pad(ids_BL, (0, max(0, width - ids_BL.shape[1])), value=3)
    return model(ids_BL, lengths_B, torch.full_like(lengths_B, PROMPT))


@pytest.mark.parametrize("head", ["scalar", "implicit"])
def test_an_untrained_verifier_scores_every_solution_zero(head):
    assert scores_of(build(head, moved=False), some_rows(3)).abs().max() < 1e-4


def test_scalar_is_a_linear_function_of_the_last_hidden_state():
    model = build("scalar")
    for row in some_rows(4):
        out = model.backbone(input_ids=torch.from_numpy(row.astype(np.int64))[None], output_hidden_states=True)
        expected = out.hidden_states[-1][0, -1] @ model.weight_D + model.bias
        assert scores_of(model, [row]).item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_implicit_is_the_log_ratio_to_its_start_over_the_completion(weight):
    model, start = build("implicit", beta=0.7, reference=weight), open_tiny()

    def logprob(module, row):
        ids = torch.from_numpy(row.astype(np.int64))
        logp = module(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        return sum(logp[t - 1, ids[t]].item() for t in range(PROMPT, len(row)))

    for row in some_rows(4):
        expected = 0.7 * (logprob(model.backbone, row) - weight * logprob(start.module, row)) + model.bias.item()
        assert abs(expected) > 1e-2
        assert scores_of(model, [row]).item() == pytest.approx(expected, abs=1e-3)
    with nullcontext() if weight else pytest.raises(AssertionError):  # a copy of the weights, only where it is used
        assert model.start is not model.backbone


def test_yes_token_is_the_difference_of_two_logits_of_the_model():
    model = build("yes_token")
    yes, no = (model.tokenizer.encode(word)[0] for word in ("yes", "no"))
    for row in some_rows(4):
        logits_V = model.backbone(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0, -1]
        assert scores_of(model, [row]).item() == pytest.approx((logits_V[yes] - logits_V[no]).item(), abs=1e-4)


@pytest.mark.parametrize("head", SCORING)
def test_scores_depend_on_neither_padding_nor_batch_mates(head):
    model, rows = build(head), some_rows(9)
    together_N = scores_of(model, rows).detach()
    assert together_N.std() > 1e-2
    for n, row in enumerate(rows):
        assert scores_of(model, [row]).item() == pytest.approx(together_N[n].item(), abs=1e-4)
        assert scores_of(model, [row, rows[0]], width=39)[0].item() == pytest.approx(together_N[n].item(), abs=1e-4)


@pytest.mark.parametrize("head", SCORING)
def test_scores_are_float32_in_bfloat16_and_close_to_the_exact_ones(head):
    model = build(head)
    exact_N = scores_of(model, some_rows(6)).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_N = scores_of(model, some_rows(6)).detach()
    stored_N = scores_of(build(head, torch.bfloat16), some_rows(6)).detach()
    for found_N in (cast_N, stored_N):
        assert found_N.dtype == torch.float32
        assert (found_N - exact_N).abs().max() < 0.1 * exact_N.abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", SCORING)
def test_every_trainable_weight_gets_a_gradient_and_the_reference_none(head, tied):
    model = build(head, tied=tied)
    (scores_of(model, some_rows(4)) * torch.arange(1.0, 5.0)).sum().backward()
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert parameters.keys() == model.trainable_state().keys()
    for name, weight in parameters.items():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all()
        assert weight.grad.abs().sum() > 0, name
    if head == "implicit":
        assert all(weight.grad is None for weight in model._reference_model.module.parameters())


@pytest.mark.parametrize("head", SCORING)
def test_the_state_of_one_verifier_makes_another_the_same(head):
    model, other = build(head), build(head, moved=False)
    assert model.version() == build(head).version() != other.version()
    other.load_trainable_state(model.trainable_state())
    assert other.version() == model.version()
    torch.testing.assert_close(scores_of(other, some_rows(3)), scores_of(model, some_rows(3)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda state: state.pop("bias"), "bias"),
        (lambda state: state.update(strange=torch.zeros(1)), "strange"),
        (lambda state: state.update(bias=torch.zeros(2)), "(2,)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage, named):
    model, state = build("scalar"), dict(build("scalar", moved=False).trainable_state())
    damage(state)
    before = model.version()
    with pytest.raises(ConfigurationError) as caught:
        model.load_trainable_state(state)
    assert named in caught.value.message
    assert model.version() == before


@pytest.mark.parametrize("tokenizer", [Tokenizer(characters()), digits_tokenizer()])
def test_a_tokenizer_without_the_words_is_refused_and_the_model_closed(tokenizer):
    opened = open_tiny()
    opened.tokenizer = tokenizer
    with pytest.raises(ConfigurationError, match="no single tokens"):
        build_verifier(Verifier(head="yes_token"), opened)
    assert opened.closed
