"""Benchmark: the implementations that are compared, each as a function that does loss and gradient once.

A peer that is not installed, or does not accept the case, raises `Skip` with the reason.
"""

# peers need not be installed, and have no types
# mypy: disable-error-code="import-not-found, import-untyped"
from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import offpolicy_corr as oc

from .cases import Case, HiddenCase
from .plain import plain_loss

Step = Callable[[], Any]


class Skip(Exception):
    """This peer sits out, and says why."""


@dataclass(frozen=True)
class OnLogits:
    """``build`` makes a step of a case.

    ``touches``: how often a step reads or writes a logit in the logits' own dtype, at least and at most; ``copies``:
    bytes per logit that it moves besides, in fp32; ``on_supports``: touches, without copies, where every row is
    replayed and nothing outside its support has a gradient. Read off the source, not measured.
    """

    build: Callable[[Case], Step]
    touches: tuple[int, int]
    copies: tuple[int, int] = (0, 0)
    on_supports: int | None = None
    overwrites: bool = False

    def traffic(self, case: Case) -> str:
        """Bytes per logit, as text."""
        size = case.logits.dtype.itemsize
        if case.support and self.on_supports is not None:
            return str(size * self.on_supports)
        low, high = (size * t + c for t, c in zip(self.touches, self.copies, strict=True))
        return str(low) if low == high else f"{low}-{high}"


def _installed(module: str, package: str) -> Any:
    """Raises Skip where the package is not installed, or cannot be imported here."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            raise Skip(f"{package} is not installed") from error
        raise Skip(f"{package} lacks {error.name}") from error


def _step(case: Case, loss: Callable[[Tensor], Tensor]) -> Step:
    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)

    return step


def _ours(upstream: float = 1.0, **options: Any) -> Callable[[Case], Step]:
    def build(case: Case) -> Step:
        def loss(logits: Tensor) -> Tensor:
            out = oc.policy_loss(
                logits, case.record, case.advantages, correction=case.correction, validate=False, **options
            )
            return out.loss if upstream == 1.0 else out.loss * upstream

        return _step(case, loss)

    return build


def _pair(case: Case) -> Step:
    """`selected_logprobs`, then the loss by autograd on what it gives."""
    record = case.record

    def loss(logits: Tensor) -> Tensor:
        logp, head, _ = oc.selected_logprobs(
            logits, record.tokens, record.candidates, backend="triton", validate=False
        )
        return oc.policy_loss_from_logprobs(
            logp,
            head if case.k else None,
            record,
            case.advantages,
            correction=case.correction,
            validate=False,
        ).loss

    return _step(case, loss)


def _eager(case: Case) -> Step:
    return _step(case, plain_loss(case.record, case.advantages))


def _compiled(case: Case) -> Step:
    torch.compiler.reset()  # or shapes of earlier cases would make this one's dynamic
    return _step(case, torch.compile(plain_loss(case.record, case.advantages)))


def _liger(case: Case) -> Step:
    """Cross-entropy of one token: a fraction of the work, on the same bytes."""
    loss = _installed("liger_kernel.transformers", "liger-kernel").LigerCrossEntropyLoss()
    return _step(case, lambda logits: loss(logits, case.record.tokens))


def _quack(case: Case) -> Step:
    """Cross-entropy of one token, forward and backward, in place."""
    loss = _installed("quack.cross_entropy", "quack-kernels").cross_entropy
    return _step(case, lambda logits: loss(logits, case.record.tokens, inplace_backward=True))


def _quack_one_read(case: Case) -> Step:
    """Its forward alone, which reads each row once and writes the gradient over it."""
    forward = _installed("quack.cross_entropy", "quack-kernels").cross_entropy_fwd
    return lambda: forward(case.logits, case.record.tokens, return_dx=True, inplace_backward=True)


ON_LOGITS: dict[str, OnLogits] = {
    "ours": OnLogits(_ours(backend="triton", inplace=True), (2, 3), on_supports=2, overwrites=True),
    "ours-buffer": OnLogits(_ours(backend="triton"), (2, 3), on_supports=2),
    # a loss scaler's factor, which is not 1: one more pass over the gradient
    "ours-upstream3": OnLogits(
        _ours(3.0, backend="triton", inplace=True), (4, 5), on_supports=4, overwrites=True
    ),
    "ours-pair": OnLogits(_pair, (3, 3), on_supports=2),
    "ours-torch": OnLogits(_ours(backend="torch", inplace=True), (2, 3), (16, 24), overwrites=True),
    "eager": OnLogits(_eager, (2, 2), (16, 26), on_supports=1),
    "compile": OnLogits(_compiled, (2, 3), (2, 4), on_supports=1),
    "liger": OnLogits(_liger, (2, 3), overwrites=True),
    "quack": OnLogits(_quack, (3, 3), overwrites=True),
    "quack-1read": OnLogits(_quack_one_read, (2, 2), overwrites=True),
}


def _hidden_step(case: HiddenCase, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step() -> Any:
        leaves = [t.detach().requires_grad_() for t in (case.hidden, case.weight)]
        return torch.autograd.grad(loss(*leaves), leaves)

    return step


def _hidden_ours(hidden: HiddenCase) -> Step:
    case = hidden.case

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        return oc.policy_loss_from_hidden(
            states, weight, case.record, case.advantages, correction=case.correction, validate=False
        ).loss

    return _hidden_step(hidden, loss)


def _hidden_eager(hidden: HiddenCase) -> Step:
    """The plain loss over materialized logits."""
    loss = plain_loss(hidden.case.record, hidden.case.advantages)
    return _hidden_step(hidden, lambda states, weight: loss(states @ weight.T))


def _hidden_torch(hidden: HiddenCase) -> Step:
    """Torch's own cross-entropy of one token, a chunk of rows at a time."""
    make_options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if make_options is None:
        raise Skip(f"torch {torch.__version__} has no linear_cross_entropy by chunks")
    loss, options = torch.nn.functional.linear_cross_entropy, make_options()
    tokens = hidden.case.record.tokens
    return _hidden_step(hidden, lambda states, weight: loss(states, weight, tokens, options=options))


def _hidden_cce(hidden: HiddenCase) -> Step:
    """Cross-entropy of one token, exact: without the filter that drops small gradients, which biases them."""
    loss = _installed("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    return _hidden_step(
        hidden, lambda e, c: loss(e, c, hidden.case.record.tokens, impl="cce", filter_eps=None)
    )


def _hidden_liger(hidden: HiddenCase) -> Step:
    loss = _installed("liger_kernel.transformers", "liger-kernel").LigerFusedLinearCrossEntropyLoss()
    return _hidden_step(hidden, lambda states, weight: loss(weight, states, hidden.case.record.tokens))


def _hidden_quack(hidden: HiddenCase) -> Step:
    module = _installed("quack.linear_cross_entropy", "quack-kernels")
    loss = module.chunked_linear_cross_entropy
    return _hidden_step(hidden, lambda states, weight: loss(states, weight, hidden.case.record.tokens))


ON_HIDDEN: dict[str, Callable[[HiddenCase], Step]] = {
    "ours": _hidden_ours,
    "eager": _hidden_eager,
    "torch-chunks": _hidden_torch,
    "cce": _hidden_cce,
    "liger": _hidden_liger,
    "quack": _hidden_quack,
}
