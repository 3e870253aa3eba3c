"""Public: `policy_loss` and its two other entrances, the same loss from hidden states and from log-probs."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .autograd import LossFromLogits, needs_gradient
from .correction import Correction
from .from_logprobs import loss_from_logprobs
from .hidden import loss_from_hidden
from .lm_head import LMHead
from .loss_inputs import VocabShard
from .prepare import LossOptions, check_matrix, prepare
from .records.record import SamplerRecord
from .result import PolicyLoss


def policy_loss(
    logits: Tensor,
    record: SamplerRecord,
    advantages: Tensor,
    *,
    correction: Correction | str | None = None,
    loss_mask: Tensor | None = None,
    reduction: str = "token-mean",
    sequence_ids: Tensor | None = None,
    sequence_keep: Tensor | None = None,
    denominator: str | float | Tensor | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    ref_logprobs: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
    inplace: bool = False,
    validate: bool = True,
) -> PolicyLoss:
    """Corrected policy-gradient loss from the trainer's raw logits.

    ``loss = Σ_t (policy − entropy_coef·H + kl_coef·KL) / denominator``, the policy term as in `centering`. Loss
    and gradient are computed together, row by row: besides the gradient nothing of size ``[T, V]`` exists, and
    with ``inplace`` not even that. With ``reduction="none"`` the gradient is computed in the backward pass, from the
    logits, which must not be written to until then.

    Args:
        logits: raw ``[T, V]``, before temperature; row ``t`` is the distribution token ``t`` was drawn from.
            Any floating dtype; arithmetic is fp32 (fp64 for fp64). The only differentiable input.
        record: what the samplers recorded. Complete rows are replayed (p over their set) whatever the
            correction.
        advantages: ``[T]``, constants.
        correction: a `Correction`, or a name such as ``"sc+mis"`` (see `Correction.from_name`). None is SC + MIS.
        loss_mask: bool or {0, 1} ``[T]``; False contributes exactly 0, whatever the record holds there.
        reduction: ``"token-mean"``, ``"sequence-mean"`` (mean over sequences of each one's token mean),
            ``"sum"``, or ``"none"`` (``[T]``).
        sequence_ids: int ``[T]``, need not be contiguous; names the sample in errors.
        sequence_keep: bool, indexed by sequence id (from `guards`); a dropped sequence contributes 0, its
            centering included, and stays in the denominator.
        denominator: None: trained tokens, or sequences with one; ``"kept"``: tokens with weight > 0; or a
            positive number, so that micro-batches and ranks add up to the full batch.
        entropy_coef: weight of the entropy bonus, over the vocabulary or the support.
        kl_coef, kl_estimator, ref_logprobs: KL to a reference on the sampled token, ``"k1" "k2" "k3" "low_var_kl"``;
            ``ref_logprobs`` is ``[T]``, on complete rows over the set.
        process_group: tensor-parallel group when ``logits`` is this rank's shard of columns, in rank order;
            two collectives, and with ``reduction="none"`` two more in the backward pass. Loss and diagnostics are
            the same on every rank.
        vocab_size: true vocabulary (over all ranks), where the columns are padded.
        backend: ``"auto"``, ``"torch"``, ``"triton"``.
        inplace: write the gradient over ``logits``; nobody else may read them afterwards.
        validate: check record, advantages and logits; on a GPU that waits for the device twice, once before and
            once after the loss is computed. False skips only those checks.

    Returns:
        `PolicyLoss`.

    Raises:
        RecordError: a bad record, before anything is computed.
        ValueError: contradicting options; logits that make a trained token's loss non-finite.
    """
    check_matrix("logits", logits, "[T, V]")
    options = LossOptions(
        correction, loss_mask, reduction, sequence_ids, sequence_keep, denominator, entropy_coef, kl_coef,
        kl_estimator, ref_logprobs, backend, validate,
    )  # fmt: skip
    shard = VocabShard.of(logits.shape[1], vocab_size, process_group)
    prepared = prepare(record, advantages, options, shard, logits, shard.vocab_size)
    loss, results = LossFromLogits.apply(
        logits, prepared.problem, prepared.backend, prepared.reduce, inplace, *needs_gradient(logits)
    )  # type: ignore[no-untyped-call]
    return prepared.finish(loss, results)


def policy_loss_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    record: SamplerRecord,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    logit_softcap: float | None = None,
    correction: Correction | str | None = None,
    loss_mask: Tensor | None = None,
    reduction: str = "token-mean",
    sequence_ids: Tensor | None = None,
    sequence_keep: Tensor | None = None,
    denominator: str | float | Tensor | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    ref_logprobs: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
    inplace: bool = False,
    validate: bool = True,
) -> PolicyLoss:
    """`policy_loss` from hidden states: row chunks go through the LM head, ``[T, V]`` never exists.

    ``logits = hidden @ lm_head_weight.T + bias``, then ``softcap · tanh(logits / softcap)``. Products over the
    vocabulary are made in the dtype of ``hidden`` (under autocast, in its dtype), as the model's own head makes
    them; those with the candidates of complete rows in fp32. Statistics are fp32, and the weight's gradient is
    summed over chunks in fp32.

    Args:
        hidden: ``[T, D]``, differentiable. With ``process_group`` it is replicated; its gradient is summed over
            the group here (one more collective).
        lm_head_weight: ``[V, D]``, or this rank's rows of it, differentiable; ``bias`` likewise ``[V]``.
        logit_softcap: positive, or None.
        inplace: must be False: there are no logits to write over.

    Everything else is as in `policy_loss`. With ``reduction="none"`` the weight's gradient cannot be summed ahead
    of time: the backward pass goes through the head a second time.
    """
    if inplace:
        raise ValueError("inplace has no effect from hidden states: logits are never kept")
    check_matrix("hidden", hidden, "[T, D]")
    lm_head = LMHead.of(hidden, lm_head_weight, bias, logit_softcap)
    options = LossOptions(
        correction, loss_mask, reduction, sequence_ids, sequence_keep, denominator, entropy_coef, kl_coef,
        kl_estimator, ref_logprobs, backend, validate,
    )  # fmt: skip
    shard = VocabShard.of(lm_head_weight.shape[0], vocab_size, process_group)
    prepared = prepare(record, advantages, options, shard, hidden, shard.vocab_size)
    return prepared.finish(*loss_from_hidden(lm_head, prepared.problem, prepared.backend, prepared.reduce))


def policy_loss_from_logprobs(
    logprobs: Tensor,
    candidate_logprobs: Tensor | None,
    record: SamplerRecord,
    advantages: Tensor,
    *,
    entropy: Tensor | None = None,
    correction: Correction | str | None = None,
    loss_mask: Tensor | None = None,
    reduction: str = "token-mean",
    sequence_ids: Tensor | None = None,
    sequence_keep: Tensor | None = None,
    denominator: str | float | Tensor | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    ref_logprobs: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
    inplace: bool = False,
    validate: bool = True,
) -> PolicyLoss:
    """`policy_loss` for frameworks that own the softmax: from log-probs, by ordinary autograd.

    Args:
        logprobs: log p of the sampled tokens, ``[T]``, after temperature, differentiable.
        candidate_logprobs: log p of ``record.candidates.ids``, CSR ``[nnz]``, differentiable; None where the
            record has no candidates. On complete rows both are over the set, as `selected_logprobs` gives them.
        entropy: ``[T]``, differentiable; required with ``entropy_coef``. Without it ``diagnostics.entropy`` is NaN.
        process_group, inplace: must be left alone; there are no logits here.

    Everything else is as in `policy_loss`.

    The trainer's tail mass is ``1 − Σ p`` here, subtracted in fp64 from log-probs of their own precision. With
    fp32 log-probs it is good to about 1e-7, so where a tail holds less than 1e-4 its scale ρ loses digits, and
    with it the gradient of rules that let α grow (`Unweighted`, `ClampedIS`). The other entrances do not.

    Raises:
        RecordError, ValueError: as `policy_loss`; also where a complete row's mass under p is not 1.
    """
    if inplace or process_group is not None:
        raise ValueError("inplace and process_group have no effect from log-probs: there are no logits here")
    if logprobs.dim() != 1 or not logprobs.dtype.is_floating_point:
        remedy = ": use .flatten()" if logprobs.dim() > 1 else ""
        raise ValueError(
            f"logprobs must be floating [T], got {logprobs.dtype} {tuple(logprobs.shape)}{remedy}"
        )
    if entropy_coef and entropy is None:
        raise ValueError("entropy_coef needs entropy=, the trainer's entropy at every token")
    if backend == "triton":
        raise ValueError("backend='triton' has no effect from log-probs: there is no kernel to run")
    options = LossOptions(
        correction, loss_mask, reduction, sequence_ids, sequence_keep, denominator, entropy_coef, kl_coef,
        kl_estimator, ref_logprobs, "torch" if backend == "auto" else backend, validate,
    )  # fmt: skip
    prepared = prepare(record, advantages, options, None, logprobs, vocab_size)
    return prepared.finish(*loss_from_logprobs(logprobs, candidate_logprobs, entropy, prepared))
