"""docs/algorithms.md: each block has the gradient of the published formula, written out here with plain PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import offpolicy_corr as oc
import pages

PAGE = "docs/algorithms.md"
VOCAB, PROMPT, LENGTHS = 32, 2, (3, 2, 1, 3)
# mean log-ratio of each response: two inside GSPO's band, one above it with A > 0, one below it with A < 0
MEANS = (1e-4, -0.4, -2e-4, 0.3)


def problem(seed: int) -> dict[str, Any]:
    """The names of the page's first block, with responses of several lengths and ratios in and out of bands."""
    make = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64)
    width = PROMPT + max(LENGTHS)
    input_ids = torch.randint(0, VOCAB, (4, width), generator=make)
    attention_mask = (torch.arange(width) < PROMPT + torch.tensor(LENGTHS)[:, None]).long()
    logits = (0.5 * randn(4, width, VOCAB)).requires_grad_()
    logprobs = token_logprobs(logits.detach(), input_ids)
    records = []
    for row, length in enumerate(LENGTHS):
        noise = 0.6 * randn(length)
        noise += MEANS[row] - noise.mean()
        sampled = slice(PROMPT, PROMPT + length)
        records.append(oc.SamplerRecord(input_ids[row, sampled], logprobs[row, sampled] - noise))
    others = [logits.detach() + 0.3 * randn(4, width, VOCAB) for _ in range(2)]
    return {
        "logits": logits, "input_ids": input_ids, "attention_mask": attention_mask, "records": records,
        "old_logits": others[0], "reference_logits": others[1],
        "rewards": torch.tensor([1.0, 0.0, 0.0, 1.0]).double(),
        "prompt_ids": torch.tensor([0, 0, 1, 1]), "torch": torch, "oc": oc, "replace": replace,
    }  # fmt: skip


def token_logprobs(logits: Tensor, input_ids: Tensor) -> Tensor:
    """log p of every token but the first, which gets NaN, ``[B, L]``."""
    logp = logits[:, :-1].log_softmax(2).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logp, (1, 0), value=math.nan)


def each_response(names: dict[str, Any], which: str = "logits") -> list[Tensor]:
    """log p of each response's tokens under one of the models."""
    logp = token_logprobs(names[which], names["input_ids"])
    return [row[PROMPT : PROMPT + length] for row, length in zip(logp, LENGTHS, strict=True)]


def surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def ratios(names: dict[str, Any]) -> list[Tensor]:
    return [(p - r.logprobs).exp() for p, r in zip(each_response(names), names["records"], strict=True)]


# rewards 1, 0 in the first group and 0, 1 in the second: mean 1/2, deviation 1/2
NORMALIZED, CENTERED = (1.0, -1.0, -1.0, 1.0), (0.5, -0.5, -0.5, 0.5)


def grpo(names: dict[str, Any]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    references = each_response(names, "reference_logits")
    for p, reference, ratio, advantage in zip(
        each_response(names), references, ratios(names), NORMALIZED, strict=True
    ):
        kl = (reference - p).exp() - (reference - p) - 1
        total = total + (surrogate(ratio, advantage, 0.2, 0.2) - 0.04 * kl).mean()
    return -total / 4


def dr_grpo(names: dict[str, Any]) -> Tensor:
    terms = [surrogate(r, a, 0.2, 0.2).sum() for r, a in zip(ratios(names), CENTERED, strict=True)]
    return -torch.stack(terms).sum() / 4 / 3


def dapo(names: dict[str, Any]) -> Tensor:
    terms = [surrogate(r, a, 0.2, 0.28).sum() for r, a in zip(ratios(names), NORMALIZED, strict=True)]
    return -torch.stack(terms).sum() / sum(LENGTHS)


def gspo(names: dict[str, Any]) -> Tensor:
    terms = [
        surrogate(r.log().mean().exp(), a, 3e-4, 4e-4) for r, a in zip(ratios(names), NORMALIZED, strict=True)
    ]
    return -torch.stack(terms).mean()


def weighted(names: dict[str, Any], weight: Callable[[Tensor], Tensor]) -> Tensor:
    terms = [
        (weight(r.detach()) * a * p).sum()
        for p, r, a in zip(each_response(names), ratios(names), NORMALIZED, strict=True)
    ]
    return -torch.stack(terms).sum() / sum(LENGTHS)


def cispo(names: dict[str, Any]) -> Tensor:
    return weighted(names, lambda r: r.clamp(max=5.0))


def icepop(names: dict[str, Any]) -> Tensor:
    return weighted(names, lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0))


def decoupled_ppo(names: dict[str, Any]) -> Tensor:
    terms = []
    olds = each_response(names, "old_logits")
    for p, old, record, advantage in zip(
        each_response(names), olds, names["records"], NORMALIZED, strict=True
    ):
        terms.append(((old - record.logprobs).exp() * surrogate((p - old).exp(), advantage, 0.2, 0.28)).sum())
    return -torch.stack(terms).sum() / sum(LENGTHS)


PUBLISHED: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "GRPO": grpo, "Dr. GRPO": dr_grpo, "DAPO": dapo, "GSPO": gspo, "CISPO": cispo, "IcePop": icepop,
    "Decoupled PPO": decoupled_ppo,
}  # fmt: skip


def block_of(title: str) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", pages.section(PAGE, title), re.DOTALL | re.MULTILINE)
    return block


def test_every_algorithm_of_the_page_has_its_published_formula_here() -> None:
    titles = re.findall(r"^## (.*)$", pages.text(PAGE), re.MULTILINE)
    assert titles == [*PUBLISHED, "What cannot be said in arguments"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("title", PUBLISHED)
def test_the_gradient_is_that_of_the_published_formula(title: str, seed: int) -> None:
    names = problem(seed)
    exec(compile(block_of(title), f"{PAGE}, {title}", "exec"), names)
    (ours,) = torch.autograd.grad(names["loss"], names["logits"], retain_graph=True)
    (published,) = torch.autograd.grad(PUBLISHED[title](names), names["logits"])
    assert published.abs().max() > 1e-3
    torch.testing.assert_close(ours, published, rtol=1e-9, atol=1e-12)


def test_the_problems_put_ratios_on_both_sides_of_every_bound() -> None:
    flat = torch.cat([r.detach() for seed in range(4) for r in ratios(problem(seed))])
    for bound in (0.5, 0.8, 1.2, 1.28):
        assert (flat < bound).any() and (flat > bound).any()
    kept = [
        bool(torch.autograd.grad(surrogate(s := torch.tensor(m).exp().requires_grad_(), a, 3e-4, 4e-4), s)[0])
        for m, a in zip(MEANS, NORMALIZED, strict=True)
    ]
    assert kept == [True, False, True, False]


def test_cispo_with_a_lower_bound_is_a_clamp() -> None:
    names = problem(0)
    advantages = oc.group_advantages(names["rewards"], names["prompt_ids"])
    batch = oc.flatten_batch(
        names["logits"], names["input_ids"], names["records"], advantages, attention_mask=names["attention_mask"]
    )  # fmt: skip
    correction = oc.Correction.from_name("clamp", low=0.8, high=1.28)
    (ours,) = torch.autograd.grad(
        oc.policy_loss(**vars(batch), correction=correction).loss, names["logits"], retain_graph=True
    )
    expected = weighted(names, lambda r: r.clamp(0.8, 1.28))
    torch.testing.assert_close(ours, torch.autograd.grad(expected, names["logits"])[0])


def test_the_readmes_table_says_what_the_page_does() -> None:
    table = [row for row in pages.section("README.md", "Algorithms").splitlines() if row.startswith("| ")]
    rows = dict(row.strip("| ").split(" | ", 1) for row in table[1:])
    assert list(rows) == list(PUBLISHED)
    for title, arguments in rows.items():
        block = re.sub(r"\s+", " ", block_of(title))
        for fragment in re.findall(r"`([^`]+)`", arguments):
            assert fragment in block, f"{title}: {fragment}"
