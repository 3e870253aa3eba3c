"""Reader: tokens without a log-prob, whether the answer says so or sends an exact 0.0 in its place."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

from offpolicy_corr.records.errors import RecordWarning
from offpolicy_corr.records.missing import is_missing
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.validation import SAME_VALUE
from offpolicy_corr.records.zero_runs import unsupported_zero_runs

from ._answer import Answer, ReadOptions, Rows
from ._arrays import fail, offsets_of

MISSING_REMEDY = (
    "Sample again, mask the token with on_missing='mask', or see why the engine returned no number."
)
FIRST_MISSING = "Prefill/decode disaggregation loses the first token's value in some releases. "
NEARLY_CERTAIN = -1e-3  # nats
ZEROS_PER_NEARLY_CERTAIN = 4


def find_missing(answer: Answer, record: SamplerRecord, options: ReadOptions) -> NDArray[np.bool_]:
    """bool [T]. Raises for the first missing value, or warns with their number."""
    rows, own = answer.rows, answer.logprobs
    found: list[tuple[NDArray[np.bool_], str, str, NDArray[np.float32] | None]]
    found = [(is_missing(own), answer.field, "log-prob is missing", own)]
    if rows is not None and rows.absent is not None:
        found.append((rows.absent, answer.rows_field, "candidates are missing", None))
    if rows is not None and rows.logprobs is not None:
        if np.isnan(rows.logprobs).any():
            has_nan = np.zeros(len(own), dtype=np.bool_)
            has_nan[rows.row_index[np.isnan(rows.logprobs)]] = True
            found.append((has_nan, answer.rows_field, "a candidate's log-prob is missing", None))
        problem = "log-prob is missing: 0.0 stands for it, and the token's candidates say otherwise"
        found.append((_contradicted_zeros(answer.tokens, own, rows), answer.field, problem, own))
    missing: NDArray[np.bool_] = np.logical_or.reduce([mask for mask, *_ in found])
    if options.on_missing == "raise":
        for mask, field, problem, values in found:
            if mask.any():
                position = int(mask.argmax())
                only_first = options.spec.engine == "sglang" and position == 0 and mask.sum() == 1 < len(own)
                remedy = (FIRST_MISSING if only_first else "") + MISSING_REMEDY
                value = None if values is None else float(values[position])
                raise fail(problem, field, value, remedy, position)
        return missing
    missing |= suspected_zeros(answer, record, ~missing, options.spec)
    if missing.any():
        problem = f"{int(missing.sum())} of {len(missing)} tokens have no log-prob and must be masked"
        warnings.warn(RecordWarning(problem + ": see offpolicy_corr.missing_tokens"), stacklevel=6)
    return missing


def warn_suspected_zeros(answer: Answer, record: SamplerRecord, spec: SamplerSpec) -> None:
    """One `RecordWarning` for the `suspected_zeros` of an answer."""
    found = suspected_zeros(answer, record, np.ones(len(answer.tokens), dtype=np.bool_), spec)
    if not found.any():
        return
    ends = "ends in" if found[-1] and found.sum() == _trailing(found) else "holds"
    problem = f"the answer {ends} {int(found.sum())} log-probs of exactly 0.0 that nothing else supports"
    remedy = "padding, an appended end token, or drafted tokens? ask for candidates, or read with on_missing='mask'"
    warnings.warn(
        RecordWarning(f"{problem} (token {int(found.argmax())}, field {answer.field}: {remedy})"),
        stacklevel=6,
    )


def suspected_zeros(
    answer: Answer, record: SamplerRecord, given: NDArray[np.bool_], spec: SamplerSpec
) -> NDArray[np.bool_]:
    """Log-probs of exactly 0.0 that probably stand for missing ones, bool [T]; ``given`` are those not missing.

    A token with q > 1 − 6e-8 has exactly 0.0 in float32, so without candidates to ask a zero is only suspected:

    - at the answer's end (an end token that was appended afterwards; from two on also where the answer was cut);
    - inside it where speculative decoding is declared (drafted tokens), or where the zeros are at least two and
      more than four times as many as the other nearly certain tokens (log q > −1e-3), which stand beside real ones.
    """
    mask = torch.from_numpy(given)
    each = torch.arange(len(given))  # a sample per token: every zero stands at its sample's end
    unsupported: NDArray[np.bool_] = unsupported_zero_runs(record, mask, sequence_ids=each, run=1).numpy()
    if not unsupported.any():
        return unsupported
    found: NDArray[np.bool_] = unsupported_zero_runs(record, mask, run=2 if answer.truncated else 1).numpy()
    inside = unsupported & ~found
    values = answer.logprobs
    nearly_certain = int((given & (values < 0) & (values > NEARLY_CERTAIN)).sum())
    many = inside.sum() >= 2 and inside.sum() > ZEROS_PER_NEARLY_CERTAIN * nearly_certain
    return found | inside if many or spec.speculative is not None else found


def _trailing(found: NDArray[np.bool_]) -> int:
    others = np.flatnonzero(~found)
    return len(found) - 1 - int(others[-1]) if len(others) else len(found)


def _contradicted_zeros(
    tokens: NDArray[np.int64], logprobs: NDArray[np.float32], rows: Rows
) -> NDArray[np.bool_]:
    """bool [T]: log-probs of exactly 0.0 in whose rows the token is not (nearly) certain."""
    assert rows.logprobs is not None
    found = np.zeros(len(tokens), dtype=np.bool_)
    zero = np.flatnonzero((logprobs == 0) & (np.diff(rows.offsets) > 0))
    counts = np.diff(rows.offsets)[zero]
    starts = offsets_of(counts)
    at = np.arange(starts[-1]) + np.repeat(rows.offsets[:-1][zero] - starts[:-1], counts)
    row_index = np.repeat(zero, counts)
    certain = (rows.ids[at] == tokens[row_index]) & ~(rows.logprobs[at] < -SAME_VALUE[1])
    found[zero] = True
    found[row_index[certain]] = False
    return found
