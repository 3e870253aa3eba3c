"""The error that refuses a bad record."""

from __future__ import annotations

from typing import Any


class RecordError(ValueError):
    """A sampler's record is wrong. Says where, what stands there, and what to do.

    Attributes:
        problem: what is wrong, without the place.
        sample: sequence id of the token, or None where no sequence ids are known.
        token: index of the token in the packed row, or None for a fault of the whole record.
        field: name of the field at fault, for example ``"candidates.logprobs"``.
        value: the offending value.
        remedy: what would put it right.
    """

    def __init__(
        self,
        problem: str,
        *,
        sample: int | None = None,
        token: int | None = None,
        field: str | None = None,
        value: Any = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.sample, self.token, self.field, self.value, self.remedy = sample, token, field, value, remedy
        places = [("sample", sample), ("token", token), ("field", field), ("value", value)]
        where = ", ".join(f"{name} {place}" for name, place in places if place is not None)
        super().__init__(f"{problem} ({where})" + (f". {remedy}" if remedy else ""))
