"""What must not matter: garbage under the mask, padding, order, chunks, splits, precision within its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import offpolicy_corr as oc
from offpolicy_corr import lm_head, torch_loss
from support import ENTRANCES, RULES, Problem, gradient_through

rules = st.sampled_from(RULES)
kinds = st.sampled_from(["head", "support", "mixed"])
seeds = st.integers(0, 2**31)
entrances = st.sampled_from(ENTRANCES)
GARBAGE = (torch.nan, torch.inf, -torch.inf, -9999.0, 0.0)


def spoil(problem: Problem, mask: Tensor, garbage: float) -> tuple[Tensor, oc.SamplerRecord, Tensor]:
    """Logits, record and advantages whose masked tokens hold garbage everywhere."""
    record, rows = problem.record(), problem.candidates.rows
    trained = mask[rows]
    assert record.logprobs is not None and problem.candidates.logprobs is not None
    candidates = oc.CandidateSet(
        torch.where(trained, problem.candidates.ids, -1),
        torch.where(trained, problem.candidates.logprobs, garbage),
        problem.candidates.offsets,
        torch.where(mask, problem.complete, True),
    )
    temperature = problem.temperature
    if isinstance(temperature, Tensor):
        temperature = torch.where(mask, temperature, garbage)
    bad = oc.SamplerRecord(
        torch.where(mask, record.tokens, -1),
        torch.where(mask, record.logprobs, garbage),
        candidates,
        temperature,
    )
    logits = torch.where(mask[:, None], problem.logits, garbage)
    return logits, bad, torch.where(mask, problem.advantages, garbage)


@settings(max_examples=60)
@given(
    rule=rules, kind=kinds, seed=seeds, entrance=entrances, garbage=st.sampled_from(GARBAGE),
    mask=st.lists(st.booleans(), min_size=6, max_size=6), center=st.booleans(),
)  # fmt: skip
def test_masked_positions_may_hold_anything(
    rule: oc.WeightRule, kind: str, seed: int, entrance: str, garbage: float, mask: list[bool], center: bool
) -> None:
    problem, trained = Problem(kind=kind, seed=seed), torch.tensor(mask)
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    options: dict[str, Any] = {
        "correction": oc.Correction(rule, center=center),
        "reduction": ["token-mean", "sequence-mean", "sum", "none"][seed % 4],
        "entropy_coef": 0.1,
        "sequence_ids": ids,
    }
    logits, record, advantages = spoil(problem, trained, garbage)
    out, gradient = gradient_through(entrance, logits, record, advantages, loss_mask=trained, **options)
    assert (gradient[~trained] == 0).all()
    clean, expected = gradient_through(
        entrance, problem.logits[trained], problem.record().select(trained), problem.advantages[trained],
        **options | {"sequence_ids": ids[trained]},
    )  # fmt: skip
    torch.testing.assert_close(gradient[trained], expected, atol=1e-12, rtol=1e-12)
    loss = out.loss[trained] if out.loss.dim() else out.loss
    torch.testing.assert_close(loss, clean.loss, atol=1e-12, rtol=1e-12)
    for name, values in vars(out.diagnostics).items():
        assert (values[~trained] == 0).all(), name
        torch.testing.assert_close(values[trained], getattr(clean.diagnostics, name), equal_nan=True)


@settings(max_examples=40)
@given(rule=rules, kind=kinds, seed=seeds, entrance=entrances)
def test_rows_do_not_see_each_other(rule: oc.WeightRule, kind: str, seed: int, entrance: str) -> None:
    """Shuffled rows, and each row's candidates shuffled, give the shuffled gradient to the last bit but one."""
    problem = Problem(kind=kind, seed=seed)
    options = {"correction": oc.Correction(rule), "reduction": "sum"}
    record = problem.record()
    _, gradient = gradient_through(entrance, problem.logits, record, problem.advantages, **options)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    shuffled = record.select(order)
    _, moved = gradient_through(
        entrance, problem.logits[order], shuffled, problem.advantages[order], **options
    )
    torch.testing.assert_close(moved, gradient[order], atol=1e-14, rtol=1e-14)

    inner = (problem.candidates.rows * 100 + torch.randperm(24)).argsort()
    by_row = problem.candidates.rows[inner].argsort(stable=True)
    inner = inner[by_row]
    candidates = oc.CandidateSet(
        problem.candidates.ids[inner],
        problem.candidates.logprobs[inner],
        problem.candidates.offsets,
        problem.complete,
    )
    reordered = oc.SamplerRecord(record.tokens, record.logprobs, candidates, record.temperature)
    _, same = gradient_through(entrance, problem.logits, reordered, problem.advantages, **options)
    torch.testing.assert_close(same, gradient, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_and_a_row_in_a_batch_are_bitwise_equal(dtype: torch.dtype) -> None:
    problem = Problem(size=9, vocab=37, dtype=dtype, seed=4)
    record = problem.record()
    options = {"reduction": "sum", "correction": oc.Correction(oc.MaskedIS(0.5, 2.0))}
    _, together = gradient_through("logits", problem.logits, record, problem.advantages, **options)
    for row in range(9):
        index = torch.tensor([row])
        _, alone = gradient_through(
            "logits", problem.logits[index], record.select(index), problem.advantages[index], **options
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kind", ["head", "support", "mixed"])
@pytest.mark.parametrize("block,tile", [(1, 1), (22, 11), (33, 33), (10**6, 11)])
def test_chunk_sizes_do_not_matter(monkeypatch: pytest.MonkeyPatch, kind: str, block: int, tile: int) -> None:
    problem = Problem(kind=kind, seed=8)
    mask = torch.tensor([True, True, False, True, True, True])
    call = lambda entrance: gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, loss_mask=mask, entropy_coef=0.1
    )
    expected = {entrance: call(entrance) for entrance in ENTRANCES}
    monkeypatch.setattr(torch_loss, "_BLOCK_ON_CPU", block)
    monkeypatch.setattr(torch_loss, "_TILE_ON_CPU", tile)
    monkeypatch.setattr(lm_head, "_LOGITS_ON_CPU", block)
    monkeypatch.setattr("offpolicy_corr.lm_head_on_supports._GATHERED", block)
    for entrance, (out, gradient) in expected.items():
        again, same = call(entrance)
        torch.testing.assert_close(same, gradient, atol=1e-13, rtol=1e-12)
        torch.testing.assert_close(again.loss, out.loss, atol=1e-13, rtol=1e-12)


@settings(max_examples=30)
@given(
    seed=seeds,
    cut=st.integers(0, 6),
    entrance=entrances,
    reduction=st.sampled_from(["token-mean", "sequence-mean"]),
)
def test_splitting_a_batch_changes_nothing_under_an_explicit_denominator(
    seed: int, cut: int, entrance: str, reduction: str
) -> None:
    problem = Problem(seed=seed)
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    if reduction == "sequence-mean":
        cut -= cut % 2  # a micro-batch holds whole sequences
    mask = torch.tensor([True, True, True, False, True, True])
    options: dict[str, Any] = {"reduction": reduction}
    whole, gradient = gradient_through(
        entrance,
        problem.logits,
        problem.record(),
        problem.advantages,
        loss_mask=mask,
        sequence_ids=ids,
        **options,
    )
    denominator = oc.global_denominator(mask) if reduction == "token-mean" else 3.0
    parts = []
    for part in (slice(0, cut), slice(cut, 6)):
        index = torch.arange(6)[part]
        parts.append(
            gradient_through(
                entrance, problem.logits[part], problem.record().select(index), problem.advantages[part],
                loss_mask=mask[part], sequence_ids=ids[part], denominator=denominator, **options,
            )
        )  # fmt: skip
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(sum(out.loss for out, _ in parts), whole.loss, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("entrance", ["logits", "inplace"])
def test_columns_of_padding_are_never_read_and_receive_nothing(entrance: str) -> None:
    problem = Problem(seed=1)
    options = {"correction": oc.Correction(oc.ClampedIS()), "entropy_coef": 0.2}
    out, gradient = gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, **options
    )
    padded = torch.cat([problem.logits, torch.full((6, 5), torch.nan, dtype=torch.float64)], 1)
    again, wide = gradient_through(
        entrance, padded, problem.record(), problem.advantages, vocab_size=11, **options
    )
    torch.testing.assert_close(wide[:, :11], gradient)
    assert (wide[:, 11:] == 0).all()
    torch.testing.assert_close(again.loss, out.loss)


@pytest.mark.parametrize("layout", ["transposed", "row stride", "column stride"])
def test_strided_logits_give_the_same_gradient(layout: str) -> None:
    problem = Problem(seed=2)
    _, expected = gradient_through("logits", problem.logits, problem.record(), problem.advantages)
    wide = torch.cat([problem.logits, torch.full((6, 3), torch.nan, dtype=torch.float64)], 1)
    view = {
        "transposed": lambda x: x.t(),
        "row stride": lambda x: x[:, :11],
        "column stride": lambda x: x[:, ::2],
    }
    source = {
        "transposed": problem.logits.t().contiguous(),
        "row stride": wide,
        "column stride": problem.logits.repeat_interleave(2, 1),
    }[layout]
    for inplace in (False, True):
        leaf = source.clone().requires_grad_()
        strided = view[layout](leaf * 1.0)
        assert not strided.is_contiguous()
        oc.policy_loss(strided, problem.record(), problem.advantages, inplace=inplace).loss.backward()
        torch.testing.assert_close(view[layout](leaf.grad), expected)


@pytest.mark.parametrize("kind", ["head", "support"])
@pytest.mark.parametrize(
    "dtype,factor", [(torch.float32, 0.0), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)]
)
def test_low_precision_inputs_cost_one_rounding_of_the_gradient(
    kind: str, dtype: torch.dtype, factor: float
) -> None:
    """Against fp64 on the *same rounded* logits: arithmetic is fp32, then each gradient element rounds once."""
    problem = Problem(size=16, vocab=301, k=20, kind=kind, seed=6, temperature=1.0)
    low = problem.logits.to(dtype)
    options = {"correction": oc.Correction(oc.TruncatedIS(1.5)), "reduction": "sum"}
    record = problem.record()
    _, exact = gradient_through("logits", low.double(), record, problem.advantages, **options)
    _, ours = gradient_through("logits", low, record, problem.advantages, **options)
    assert ours.dtype == dtype
    error = (ours.double() - exact).abs()
    assert (error <= factor * exact.abs() + 2e-6).all(), error.max()
