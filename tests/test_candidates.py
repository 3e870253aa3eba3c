"""CandidateSet: forms, trimming, certificates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offpolicy_corr as oc


def ragged() -> oc.CandidateSet:
    """Three rows of 2, 0 and 3 candidates; the last one complete."""
    return oc.CandidateSet(
        torch.tensor([4, 1, 7, 2, 5]),
        torch.tensor([0.5, 0.3, 0.5, 0.25, 0.25]).log(),
        torch.tensor([0, 2, 2, 5]),
        torch.tensor([False, False, True]),
    )


def same(left: oc.CandidateSet, right: oc.CandidateSet) -> bool:
    pairs = zip(vars_of(left), vars_of(right), strict=True)
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def vars_of(candidates: oc.CandidateSet) -> list[torch.Tensor]:
    return [candidates.ids, candidates.logprobs, candidates.offsets, candidates.complete]


def test_topk_leaves_padding_out_and_padded_puts_it_back() -> None:
    ids = torch.tensor([[4, 1, -1], [-1, -1, -1], [7, 2, 5]])
    logprobs = torch.tensor([[-0.7, -1.2, 0.0], [0.0, 0.0, 0.0], [-0.7, -1.4, -1.4]])
    candidates = oc.CandidateSet.from_topk(ids, logprobs)
    assert candidates.offsets.tolist() == [0, 2, 2, 5] and not candidates.complete.any()
    padded, values = candidates.to_padded()
    assert torch.equal(padded, ids)
    assert torch.equal(values, logprobs.masked_fill(ids == -1, -torch.inf))
    other, _ = candidates.to_padded(pad_id=-7)
    assert (other == -7).sum() == 4


def test_support_swapped_arguments_and_half_precision_raise() -> None:
    offsets = torch.tensor([0, 2])
    ids, logprobs = torch.tensor([3, 5]), torch.tensor([0.5, 0.5]).log()
    assert oc.CandidateSet.from_support(ids, offsets, logprobs).complete.all()
    with pytest.raises(TypeError, match="ids must be integers"):
        oc.CandidateSet.from_support(logprobs, offsets, ids)
    with pytest.raises(TypeError, match="float32 or float64"):
        oc.CandidateSet.from_support(ids, offsets, ids)
    with pytest.raises(TypeError, match="half precision loses the mass"):
        oc.CandidateSet.from_support(ids, offsets, logprobs.bfloat16())
    with pytest.raises(TypeError, match="offsets must be int64"):
        oc.CandidateSet.from_support(ids, offsets.int(), logprobs)
    with pytest.raises(TypeError, match=r"\[T, K\]"):
        oc.CandidateSet.from_topk(ids, logprobs)


@given(index=st.lists(st.integers(0, 2), max_size=6))
def test_select_takes_rows_in_any_order(index: list[int]) -> None:
    chosen = ragged().select(torch.tensor(index, dtype=torch.int64))
    rows = [[(4, 0.5), (1, 0.3)], [], [(7, 0.5), (2, 0.25), (5, 0.25)]]
    expected = [pair for i in index for pair in rows[i]]
    assert chosen.ids.tolist() == [pair[0] for pair in expected]
    torch.testing.assert_close(chosen.logprobs.exp(), torch.tensor([pair[1] for pair in expected]))
    assert chosen.complete.tolist() == [i == 2 for i in index]
    assert chosen.offsets.tolist()[-1] == len(expected) and len(chosen) == len(index)


def test_select_by_mask_and_concat_undo_each_other() -> None:
    whole = ragged()
    parts = [whole.select(torch.tensor(mask)) for mask in ([True, True, False], [False, False, True])]
    assert same(oc.CandidateSet.concat(parts), whole)
    empty = oc.CandidateSet.concat([oc.CandidateSet.empty(2), whole, oc.CandidateSet.empty(1)])
    assert len(empty) == 6 and same(empty.select(torch.tensor([2, 3, 4])), whole)
    ids_only = oc.CandidateSet.from_support(torch.tensor([1]), torch.tensor([0, 1]))
    assert oc.CandidateSet.concat([ids_only, ids_only]).logprobs is None
    with pytest.raises(ValueError, match="some candidate sets carry log-probs"):
        oc.CandidateSet.concat([whole, ids_only])


def test_trim_keeps_the_smallest_head_that_holds_the_mass() -> None:
    q = torch.tensor([[0.1, 0.5, 0.2, 0.05], [0.25, 0.25, 0.25, 0.25]])
    candidates = oc.CandidateSet.from_topk(torch.arange(8).view(2, 4), q.log())
    trimmed = candidates.trim(mass=0.69)
    assert trimmed.ids.tolist() == [1, 2, 4, 5, 6]  # the second row's ties stay in order
    assert candidates.trim(mass=1.0, max_k=1).ids.tolist() == [1, 4]
    assert same(candidates.trim(mass=1.0), candidates)
    certain = oc.CandidateSet.from_topk(torch.tensor([[3, 1]]), torch.tensor([[0.0, -torch.inf]]))
    assert certain.trim(mass=1.0).ids.tolist() == [3]  # exactly the mass is enough
    assert ragged().trim(mass=0.1).ids.tolist() == [4, 7, 2, 5]  # the complete row is left alone
    for bad in ({"mass": 0.0}, {"mass": 1.1}, {"max_k": 0}):
        with pytest.raises(ValueError, match="trim needs"):
            candidates.trim(**bad)


@given(seed=st.integers(0, 2**31), mass=st.floats(0.01, 1.0), max_k=st.integers(1, 9))
def test_trim_is_minimal_and_chosen_by_q_alone(seed: int, mass: float, max_k: int) -> None:
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(5, 9, generator=make, dtype=torch.float64).mul(2).softmax(1)[:, :7]
    candidates = oc.CandidateSet.from_topk(torch.arange(35).view(5, 7), q.log())
    trimmed = candidates.trim(mass, max_k)
    for row in range(5):
        own = trimmed.select(torch.tensor([row]))
        kept = own.logprobs.exp().sort(descending=True).values
        everything = q[row].sort(descending=True).values
        torch.testing.assert_close(kept, everything[: len(kept)])  # a head: the most likely ones
        assert len(kept) <= max_k
        if len(kept) < min(7, max_k):
            assert kept.sum() >= mass - 1e-12
        if len(kept) > 1:
            assert kept[:-1].sum() < mass
    rule = oc.MaskedIS()
    assert (trimmed.certificate(rule) >= candidates.certificate(rule) - 1e-12).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 800.0])
def test_what_is_no_probability_stays_in_its_row(garbage: float) -> None:
    ids, logprobs = torch.arange(6).view(3, 2), torch.full((3, 2), 0.5).log()
    logprobs[0, 0] = garbage
    trimmed = oc.CandidateSet.from_topk(ids, logprobs).trim(mass=0.9)
    assert trimmed.select(torch.tensor([1, 2])).ids.tolist() == [2, 3, 4, 5]


def test_offsets_that_are_not_csr_are_refused_rather_than_followed() -> None:
    ids, logprobs, complete = torch.tensor([1, 2]), torch.tensor([-1.0, -1.0]), torch.tensor([True])
    for offsets in ([0, 10**9], [1, 2], [0, 1]):
        for method in ("mass", "trim"):
            with pytest.raises(ValueError, match="never fall and end at"):
                getattr(oc.CandidateSet(ids, logprobs, torch.tensor(offsets), complete), method)()
    with pytest.raises(ValueError, match="same shape"):
        oc.CandidateSet(ids, logprobs[:1], torch.tensor([0, 2]), complete).mass()


def test_certificate_by_hand() -> None:
    q = torch.tensor([[0.5, 0.3], [0.6, 0.4]]).double()
    candidates = oc.CandidateSet(
        torch.arange(4), q.log().reshape(-1), torch.tensor([0, 2, 4]), torch.tensor([False, True])
    )
    tail = torch.tensor([0.1, 0.1]).double()
    cases = [
        (oc.Unweighted(), 1.0, 2 * 0.2),
        (oc.TruncatedIS(0.25), 1.0, 2 * 0.05),
        (oc.TruncatedIS(4.0), 1.0, 2 * 0.1),
        (oc.MaskedIS(0.5, 0.75), 1.0, 2 * 0.1),
        (oc.MaskedIS(0.1, 0.25), 1.0, 2 * 0.05),
        (oc.PPOClip(), 1.0, 2 * 0.1),
        (oc.PPOClip(), -1.0, 2 * 0.1),
        (oc.ClampedIS(0.1, 5.0), 1.0, 2 * (0.1 + 0.02)),
        (oc.FullIS(), 1.0, 0.0),
    ]
    for rule, sign, expected in cases:
        value = candidates.certificate(rule, torch.full((2,), sign), tail)
        torch.testing.assert_close(value, torch.tensor([expected, 0.0]).double()), rule
    unknown = candidates.certificate(oc.MaskedIS(0.5, 4.0))
    torch.testing.assert_close(unknown[0].item(), 2 * 0.8)


def test_to_moves_everything() -> None:
    moved = ragged().to("meta")
    assert all(part.device.type == "meta" for part in vars_of(moved))


@pytest.mark.parametrize("filler", [-9999.0, -99999.0, -3.4028234663852886e38, -torch.inf])
def test_padded_slots_are_no_candidates(filler: float) -> None:
    """Tinker pads with (0, −99999.0): kept, id 0 would stand twice in a row."""
    ids = torch.tensor([[5, 0, 0], [7, 8, 0]])
    logprobs = torch.tensor([[-0.1, filler, filler], [-0.5, -1.2, filler]])
    heads = oc.CandidateSet.from_topk(ids, logprobs)
    assert heads.ids.tolist() == [5, 7, 8] and heads.offsets.tolist() == [0, 1, 3]
    from offpolicy_corr.records.rollout_fields import LOG_PROBS, TOPK, from_fields

    fields = {LOG_PROBS: [-0.1, -1.2], TOPK[0]: ids.numpy(), TOPK[1]: logprobs.numpy()}
    read = from_fields([5, 8], fields)
    assert read.candidates is not None and read.candidates.ids.tolist() == [5, 7, 8]
