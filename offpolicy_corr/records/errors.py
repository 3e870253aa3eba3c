"""Records: the error that refuses a bad record, and the warning about a suspicious one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RecordWarning(UserWarning):
    """A record looks wrong in a way that only its statistics show."""


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
        super().__init__(problem + (f" ({where})" if where else "") + (f". {remedy}" if remedy else ""))

    def at(self, *, sample: int | None = None, token: int | None = None) -> RecordError:
        """The same fault at another place: what is not given stays."""
        return RecordError(
            self.problem,
            sample=self.sample if sample is None else sample,
            token=self.token if token is None else token,
            field=self.field,
            value=self.value,
            remedy=self.remedy,
        )


@contextmanager
def within_sample(sample: int | None) -> Iterator[None]:
    """Errors raised inside get this sample id, unless they carry one. None changes nothing."""
    try:
        yield
    except RecordError as error:
        if sample is None or error.sample is not None:
            raise
        raise error.at(sample=sample) from None
