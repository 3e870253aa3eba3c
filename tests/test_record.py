"""SamplerRecord: what is refused and how the error reads; selection and concatenation."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr.records import validation
from offpolicy_corr.records.sampler_spec import SamplerSpec
from support import ENTRANCES, Problem, gradient_through


def good(**changes: Any) -> oc.SamplerRecord:
    """Three tokens: a head, an empty head, a complete set."""
    candidates = oc.CandidateSet(
        torch.tensor([4, 1, 7, 2, 5]),
        torch.tensor([0.5, 0.3, 0.5, 0.25, 0.25]).log(),
        torch.tensor([0, 2, 2, 5]),
        torch.tensor([False, False, True]),
    )
    fields: dict[str, Any] = {
        "tokens": torch.tensor([1, 6, 7]),
        "logprobs": torch.tensor([0.3, 0.01, 0.5]).log(),
        "candidates": candidates,
        "temperature": torch.tensor([1.0, 0.7, 1.3]),
        "group": torch.tensor([0, 1, 0]),
        "group_names": ("b200", "h100"),
        "weight_version": torch.tensor([-1, 3, 4]),
    }
    return oc.SamplerRecord(**(fields | changes))


def with_candidates(**changes: Any) -> oc.SamplerRecord:
    return good(candidates=dataclasses.replace(good().candidates, **changes))


def set_at(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


CANDIDATES = good().candidates
assert CANDIDATES is not None and CANDIDATES.logprobs is not None
FAULTS = {
    "sampled token absent from a complete set": (
        good(tokens=torch.tensor([1, 6, 4])),
        2, "candidates.ids", "absent from its complete set", "support"),
    "duplicate id": (
        with_candidates(ids=torch.tensor([4, 1, 7, 2, 7])),
        2, "candidates.ids", "stands twice", "Merge"),
    "candidate id beyond the vocabulary": (
        with_candidates(ids=torch.tensor([9, 1, 7, 2, 5])),
        0, "candidates.ids", r"outside \[0, 9\)", "padding"),
    "candidate id negative": (
        with_candidates(ids=torch.tensor([-1, 1, 7, 2, 5])),
        0, "candidates.ids", "outside", "padding"),
    "token beyond the vocabulary": (
        good(tokens=torch.tensor([1, 9, 7])),
        1, "tokens", "outside", "Mask"),
    "token negative": (
        good(tokens=torch.tensor([1, -1, 7])),
        1, "tokens", "outside", "Mask"),
    "log-prob above 0": (
        good(logprobs=torch.tensor([-1.2039728, 2e-6, -0.6931472])),
        1, "logprobs", "above 0", "Logits"),
    "log-prob NaN": (
        good(logprobs=torch.tensor([-1.2039728, torch.nan, -0.6931472])),
        1, "logprobs", "not a finite", "mask"),
    "log-prob −inf": (
        good(logprobs=torch.tensor([-1.2039728, -torch.inf, -0.6931472])),
        1, "logprobs", "not a finite", "mask"),
    "candidate NaN": (
        with_candidates(logprobs=set_at(CANDIDATES.logprobs, 0, torch.nan)),
        0, "candidates.logprobs", "NaN", "log q"),
    "candidate above 0": (
        with_candidates(logprobs=set_at(CANDIDATES.logprobs, 0, 0.1)),
        0, "candidates.logprobs", "above 0", "log q"),
    "head above one": (
        with_candidates(logprobs=set_at(CANDIDATES.logprobs, 0, -0.3)),
        0, "candidates.logprobs", "more than 1", "dup"),
    "complete set below one": (
        with_candidates(logprobs=set_at(CANDIDATES.logprobs, 4, -1.5)),
        2, "candidates.logprobs", "not sum to 1", "post"),
    "sampled token's entry differs": (
        good(logprobs=torch.tensor([-1.3, -4.6, -0.6931])),
        0, "candidates.logprobs", "differs from its entry", "log q"),
    "temperature zero": (
        good(temperature=torch.tensor([1.0, 0.0, 1.0])),
        1, "temperature", "positive and finite", "Greedy"),
    "group without a name": (
        good(group=torch.tensor([0, 1, 2])),
        2, "group", r"outside \[0, 2\)", "group_names"),
    "weight version below −1": (
        good(weight_version=torch.tensor([0, -2, 0])),
        1, "weight_version", "outside", "-1"),
    "offsets that fall": (
        with_candidates(offsets=torch.tensor([0, 3, 2, 5])),
        2, "candidates.offsets", "not CSR", "never fall"),
    "offsets that end early": (
        with_candidates(offsets=torch.tensor([0, 2, 2, 4])),
        2, "candidates.offsets", "not CSR", "end at"),
    "log-prob that stands for a missing one": (
        good(logprobs=torch.tensor([-1.2039728, -9999.0, -0.6931472])),
        1, "logprobs", "stands for a missing one", "mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_with_place_and_remedy(name: str) -> None:
    record, token, field, problem, remedy = FAULTS[name]
    with pytest.raises(oc.RecordError, match=problem) as caught:
        record.validate(vocab_size=9, sequence_ids=torch.tensor([5, 5, 8]))
    error = caught.value
    assert (error.token, error.field, error.sample) == (token, field, [5, 5, 8][token])
    assert error.value is not None and error.remedy is not None and remedy in error.remedy
    assert re.search(rf"sample {error.sample}, token {token}, field {field}, value ", str(error))


@pytest.mark.parametrize("name", FAULTS)
def test_a_long_record_is_checked_in_pieces_and_says_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = oc.SamplerRecord.concat([good(), FAULTS[name][0], good()])
    if "offsets" in FAULTS[name][2]:
        whole = FAULTS[name][0]  # nothing else can be joined to it
    options: dict[str, Any] = {"vocab_size": 9, "sequence_ids": torch.arange(len(whole)) * 2}
    said = []
    for size in (1 << 19, 2, 1):
        monkeypatch.setattr(validation, "CHECKED_AT_ONCE", size)
        with pytest.raises(oc.RecordError) as caught:
            whole.validate(**options)
        said.append(str(caught.value))
        if len(whole) > 3:
            whole.validate(vocab_size=9, loss_mask=torch.arange(9) != 3 + FAULTS[name][1])
            good().validate(vocab_size=9)
    assert len(set(said)) == 1


@pytest.mark.parametrize("name", [n for n, fault in FAULTS.items() if "offsets" not in fault[2]])
def test_the_same_faults_are_ignored_under_the_mask(name: str) -> None:
    record, token, *_ = FAULTS[name]
    mask = torch.ones(3)
    mask[token] = 0
    record.validate(vocab_size=9, loss_mask=mask)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_entrance_refuses_before_any_gradient(name: str, entrance: str) -> None:
    record, _, _, problem, _ = FAULTS[name]
    logits = torch.zeros(3, 9, requires_grad=True)
    options = {"correction": oc.Correction(center=False), "vocab_size": 9}
    if entrance == "logprobs":
        # uniform logits: the trainer's own numbers are right, so the record alone can be at fault
        logp, candidate_logp, _ = oc.selected_logprobs(logits, good().tokens, good().candidates)
        oc.policy_loss_from_logprobs(logp, candidate_logp, good(), torch.ones(3), **options)
        call = lambda: oc.policy_loss_from_logprobs(logp, candidate_logp, record, torch.ones(3), **options)
    elif entrance == "hidden":
        call = lambda: oc.policy_loss_from_hidden(logits, torch.eye(9), record, torch.ones(3), **options)
    else:
        call = lambda: oc.policy_loss(
            logits * 1, record, torch.ones(3), inplace=entrance == "inplace", **options
        )
    with pytest.raises(oc.RecordError, match=problem):
        call()
    assert logits.grad is None


LENGTHS = {
    "logprobs": good(logprobs=torch.zeros(2)),
    "temperature": good(temperature=torch.ones(4)),
    "group": good(group=torch.zeros(2, dtype=torch.int64)),
    "weight_version": good(weight_version=torch.zeros(2, dtype=torch.int64)),
    "candidates.offsets": with_candidates(offsets=torch.tensor([0, 2, 5])),
    "candidates.logprobs": with_candidates(logprobs=torch.full((4,), -1.0)),
    "tokens": good(tokens=torch.tensor([[1, 6, 7]])),
}
TYPES = {
    "tokens": [
        good(tokens=[1, 6, 7]),
        good(tokens=torch.tensor([1.0, 6.0, 7.0])),
        good(tokens=torch.ones(3).bool()),
    ],
    "logprobs": [good(logprobs=[-1.0] * 3), good(logprobs=torch.full((3,), -1.0).bfloat16())],
    "temperature": [
        good(temperature=None),
        good(temperature=[1.0] * 3),
        good(temperature=torch.ones(3).long()),
    ],
    "group": [good(group=torch.zeros(3).bool()), good(group=torch.zeros(3, device="meta").long())],
    "candidates.ids": [with_candidates(ids=torch.zeros(5, device="meta").long())],
}


@pytest.mark.parametrize("field", TYPES)
def test_types_and_devices_are_checked_before_values(field: str) -> None:
    for record in TYPES[field]:
        with pytest.raises(oc.RecordError) as caught:
            oc.policy_loss(torch.zeros(3, 9), record, torch.ones(3), validate=False)
        assert caught.value.field == field and caught.value.remedy


@pytest.mark.parametrize("field", LENGTHS)
def test_lengths_that_disagree_raise_even_without_validation(field: str) -> None:
    with pytest.raises(oc.RecordError) as caught:
        LENGTHS[field].validate()
    assert caught.value.field == field and caught.value.remedy
    with pytest.raises(oc.RecordError) as caught:
        oc.policy_loss(torch.zeros(3, 9), LENGTHS[field], torch.ones(3), validate=False)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_for_all_tokens_must_be_positive(value: float) -> None:
    with pytest.raises(oc.RecordError, match="temperature must be positive"):
        good(temperature=value).validate()


def test_a_centered_loss_refuses_an_empty_head_and_an_uncentered_one_does_not() -> None:
    options = {"sequence_ids": torch.tensor([5, 5, 8])}
    logits = torch.zeros(3, 9, requires_grad=True)
    with pytest.raises(oc.RecordError, match="no candidates") as caught:
        oc.policy_loss(logits, good(), torch.ones(3), **options)
    assert (caught.value.token, caught.value.sample) == (1, 5)
    oc.policy_loss(logits, good(), torch.ones(3), correction=oc.Correction(center=False), **options)
    oc.policy_loss(logits, good(), torch.ones(3), loss_mask=torch.tensor([1, 0, 1]), **options)


def test_what_a_correction_needs_and_the_record_lacks() -> None:
    logits = torch.zeros(3, 9)
    ids_only = with_candidates(logprobs=None)
    for record, field, words in [
        (good(logprobs=None), "logprobs", "MaskedIS weights by p/q"),
        (good(candidates=None), "candidates", "needs candidates"),
        (ids_only, "candidates.logprobs", "needs log-probs of candidates"),
    ]:
        with pytest.raises(oc.RecordError, match=words) as caught:
            oc.policy_loss(logits, record, torch.ones(3), loss_mask=torch.tensor([1, 0, 1]))
        assert caught.value.field == field
    unweighted = oc.Correction.from_name("none")
    out = oc.policy_loss(logits, good(logprobs=None, candidates=None), torch.ones(3), correction=unweighted)
    assert out.diagnostics.log_ratio.isnan().all() and (out.diagnostics.weight == 1).all()
    assert out.diagnostics.sampler_head_mass.isnan().all() and (out.diagnostics.centering_term == 0).all()


def test_ids_alone_can_be_replayed() -> None:
    problem = Problem(kind="support", seed=1)
    record = dataclasses.replace(
        problem.record(), candidates=dataclasses.replace(problem.candidates, logprobs=None)
    )
    correction = oc.Correction.from_name("mis")
    ours, gradient = gradient_through(
        "logits", problem.logits, record, problem.advantages, correction=correction
    )
    _, expected = gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages, correction=correction
    )
    torch.testing.assert_close(gradient, expected)
    assert (ours.diagnostics.sampler_head_mass == 1).all()


def test_a_candidate_with_q_zero_is_legal() -> None:
    logq = torch.tensor([0.5, 0.5, 0.0]).log()
    candidates = oc.CandidateSet.from_support(torch.arange(3), torch.tensor([0, 3]), logq)
    record = oc.SamplerRecord(torch.tensor([0]), logq[:1], candidates).validate(vocab_size=3)
    out, gradient = gradient_through("logits", torch.zeros(1, 3), record, torch.ones(1))
    assert out.loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1, -1, 0])])
def test_a_loss_mask_holds_zeros_and_ones(mask: torch.Tensor) -> None:
    with pytest.raises(oc.RecordError, match="bool, 0 or 1") as caught:
        good().validate(loss_mask=mask)
    assert caught.value.token == 1


def test_ragged_rows_of_every_width_are_searched_for_duplicates() -> None:
    make = torch.Generator().manual_seed(0)
    counts = torch.tensor([0, 1, 2, 3, 5, 8, 17, 33, 64, 1, 130])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ids = torch.cat([torch.randperm(1000, generator=make)[:n] for n in counts]).int()
    complete = torch.zeros(11, dtype=torch.bool)
    logq = torch.full((int(counts.sum()),), -9.0)
    record = lambda i: oc.SamplerRecord(
        torch.full((11,), 999_999), None, oc.CandidateSet(i, logq, offsets, complete)
    )
    record(ids).validate()
    for row in range(11):
        if counts[row] > 1:
            first, last = int(offsets[row]), int(offsets[row + 1]) - 1
            with pytest.raises(oc.RecordError, match="stands twice") as caught:
                record(set_at(ids, last, int(ids[first]))).validate()
            assert caught.value.token == row


def test_an_error_reads_the_same_after_a_worker_sent_it() -> None:
    with pytest.raises(oc.RecordError) as caught:
        FAULTS["duplicate id"][0].validate(sequence_ids=torch.tensor([5, 5, 8]))
    sent = pickle.loads(pickle.dumps(caught.value))
    assert str(sent) == str(caught.value) and vars(sent) == vars(caught.value)
    assert str(oc.RecordError("plain")) == "plain"


def test_a_mask_of_another_length_selects_nothing() -> None:
    for part in (good(), good().candidates):
        with pytest.raises(ValueError, match=r"a bool index must be \[3\]"):
            part.select(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"sequence_ids must be \[T\]"):
        good().validate(sequence_ids=torch.tensor([0]))


def test_select_and_concat_keep_everything_together() -> None:
    record = good()
    parts = [record.select(torch.tensor([0])), record.select(torch.tensor([1, 2]))]
    whole = oc.SamplerRecord.concat(parts)
    for field in ("tokens", "logprobs", "temperature", "group", "weight_version"):
        assert torch.equal(getattr(whole, field), getattr(record, field)), field
    assert torch.equal(whole.candidates.ids, record.candidates.ids)
    assert whole.group_names == record.group_names
    assert torch.equal(record.select(torch.tensor([False, True, True])).tokens, record.tokens[1:])


def test_concat_merges_names_and_fills_what_may_be_missing() -> None:
    left = good(version_names=("a", "b", "c", "d", "e"))
    right = good(
        group_names=("h100", "a100"), temperature=0.5, candidates=None,
        version_names=("e", "f"), weight_version=torch.tensor([0, 1, -1]),
    )  # fmt: skip
    both = oc.SamplerRecord.concat([left, right])
    assert both.group_names == ("b200", "h100", "a100")
    assert both.group.tolist() == [0, 1, 0, 1, 2, 1]
    assert both.version_names == ("a", "b", "c", "d", "e", "f")
    assert both.weight_version.tolist() == [-1, 3, 4, 4, 5, -1]
    torch.testing.assert_close(both.temperature, torch.tensor([1.0, 0.7, 1.3, 0.5, 0.5, 0.5]))
    assert both.candidates.offsets.tolist() == [0, 2, 2, 5, 5, 5, 5]
    assert (
        oc.SamplerRecord.concat([good(weight_version=None), good()]).weight_version.tolist()[:3] == [-1] * 3
    )
    for broken in (good(logprobs=None), good(group=None)):
        with pytest.raises(ValueError, match="some records have"):
            oc.SamplerRecord.concat([good(), broken])
    with pytest.raises(ValueError, match="at least one"):
        oc.SamplerRecord.concat([])


def test_specs_travel_with_the_record() -> None:
    a, b = (
        SamplerSpec(engine="vllm", logprobs="processed", group=g, tokenizer_hash="x")
        for g in ("b200", "h100")
    )
    both = oc.SamplerRecord.concat([good(specs=(a,)), good(), good(specs=(b, a))])
    assert both.specs == (a, b)
    assert both.select(torch.tensor([0])).specs == both.to("cpu").specs == (a, b)
    other = dataclasses.replace(b, tokenizer_hash="y")
    with pytest.raises(oc.RecordError, match="tokenizer_hash"):
        oc.SamplerRecord.concat([good(specs=(a,)), good(specs=(other,))])
    for wrong in ([a], ("h100",), None):
        with pytest.raises(oc.RecordError, match="tuple of SamplerSpec"):
            good(specs=wrong).validate()


def test_concat_keeps_one_temperature_a_number() -> None:
    record = good(temperature=0.7)
    assert oc.SamplerRecord.concat([record, record]).temperature == 0.7


def test_undeclared_versions_need_no_names_and_join_those_that_have_some() -> None:
    def part(version: int, names: tuple[str, ...] | None, size: int = 1) -> oc.SamplerRecord:
        versions = torch.full((size,), version)
        return oc.SamplerRecord(torch.zeros_like(versions), weight_version=versions, version_names=names)

    undeclared, named, number = part(-1, None), part(1, ("a", "b")), part(7, None)
    for parts, versions in ([undeclared, named], [-1, 1]), ([named, undeclared], [1, -1]):
        both = oc.SamplerRecord.concat(parts)
        assert (both.weight_version.tolist(), both.version_names) == (versions, ("a", "b"))
    both = oc.SamplerRecord.concat([number, part(0, ("a",), size=0), part(-1, ("a",))])
    assert (both.weight_version.tolist(), both.version_names) == ([7, -1], None)
    with pytest.raises(ValueError, match="everywhere or nowhere"):
        oc.SamplerRecord.concat([number, named])


def test_an_index_without_a_name_does_not_become_undeclared() -> None:
    broken = oc.SamplerRecord(torch.tensor([1]), weight_version=torch.tensor([2]), version_names=("a", "b"))
    with pytest.raises(oc.RecordError, match="outside what is declared"):
        oc.SamplerRecord.concat([broken, broken]).validate()


def head_beside(token: int, logq: float, ids: list[int], logprobs: list[float]) -> oc.SamplerRecord:
    head = oc.CandidateSet.from_topk(torch.tensor([ids]), torch.tensor([logprobs]))
    return oc.SamplerRecord(torch.tensor([token]), torch.tensor([logq]), head)


@pytest.mark.parametrize("entrance", ["logits", "logprobs", "hidden"])
@pytest.mark.parametrize(
    ("record", "field", "words"),
    [
        (head_beside(77, 0.0, [5, 8], [-0.9, -1.1]), "logprobs", "likelier than the head's least entry"),
        (head_beside(9, -1.0, [5, 7], [-0.7, -0.9]), "candidates.logprobs", "sum to more than 1"),
        (head_beside(9, -2.0, [5, 7], [-0.9, -2.1]), "logprobs", "likelier than the head's least entry"),
        (head_beside(9, -2.2, [5, 7], [-0.4, -1.2]), "candidates.logprobs", "sum to more than 1"),
    ],
)
def test_a_token_outside_its_head_is_one_of_the_tail(
    record: oc.SamplerRecord, field: str, words: str, entrance: str
) -> None:
    """Stale candidates of a retried request pass lengths and masses of their own; this is what gives them away."""
    logits = torch.zeros(1, 100)
    with pytest.raises(oc.RecordError, match=words) as caught:
        if entrance == "logits":
            oc.policy_loss(logits, record, torch.ones(1))
        elif entrance == "hidden":
            oc.policy_loss_from_hidden(torch.zeros(1, 4), torch.zeros(100, 4), record, torch.ones(1))
        else:
            oc.policy_loss_from_logprobs(
                torch.full((1,), -4.6), torch.full((2,), -4.6), record, torch.ones(1)
            )
    assert (caught.value.token, caught.value.field) == (0, field) and caught.value.remedy
    record.validate(loss_mask=torch.tensor([False]))  # nobody looks at a masked token


def test_a_tail_token_as_likely_as_the_least_entry_is_a_tie() -> None:
    head_beside(9, -2.1, [5, 7], [-0.9, -2.1]).validate()
    head_beside(9, -2.10001, [5, 7], [-0.9, -2.1]).validate()
    trimmed = oc.CandidateSet.from_topk(torch.tensor([[5, 7, 9]]), torch.tensor([[-0.5, -1.2, -3.0]])).trim(
        0.8
    )
    assert trimmed.ids.tolist() == [5, 7]
    oc.SamplerRecord(torch.tensor([9]), torch.tensor([-3.0]), trimmed).validate()


def test_an_impossible_entry_of_a_head_measures_nothing() -> None:
    offsets, complete = torch.tensor([0, 2]), torch.tensor([False])
    head = oc.CandidateSet(torch.tensor([5, 7]), torch.tensor([-0.9, -torch.inf]), offsets, complete)
    oc.SamplerRecord(torch.tensor([9]), torch.tensor([-1.5]), head).validate()
    longer = oc.CandidateSet(
        torch.tensor([5, 7, 8]), torch.tensor([-0.9, -2.0, -torch.inf]), torch.tensor([0, 3]), complete
    )
    with pytest.raises(oc.RecordError, match="likelier than the head's least entry"):
        oc.SamplerRecord(torch.tensor([9]), torch.tensor([-1.5]), longer).validate()
