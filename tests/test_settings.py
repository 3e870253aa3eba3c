"""The mapping ``offpolicy_corr:`` of a framework's configuration."""

from __future__ import annotations

import math
import random
from collections import UserDict, UserList
from typing import Any

import pytest

import offpolicy_corr as oc
from offpolicy_corr.settings import Settings, SettingsError, number_remedy


def test_the_mapping_becomes_a_correction() -> None:
    settings = Settings.of(
        {"correction": "mis", "low": 0.2, "high": 4, "denominator": "kept", "band": [0.1, 10]}
    )
    assert settings.correction == oc.Correction(oc.MaskedIS(0.2, 4.0), center=False)
    assert (settings.denominator, settings.band) == ("kept", (0.1, 10.0))
    assert Settings.of({}).correction == oc.Correction()


@pytest.mark.parametrize(
    "mapping, says",
    [
        ({"corection": "mis"}, "did you mean correction"),
        ({"correction": "sc+miss"}, "unknown correction"),
        ({"correction": "tis", "low": 0.5}, "cap"),
        ({"correction": "mis", "low": 3, "high": 1}, "low <= high"),
        ({"correction": "mis", "low": "1e-4"}, "with a point"),
        ({"correction": "mis", "low": True}, "must be a number"),
        ({"candidates": "top"}, "heads, supports, none"),
        ({"candidates": "none"}, "needs candidates"),
        ({"denominator": "kept"}, "contradicts"),
        ({"denominator": "mean"}, "all, kept"),
        ({"band": 0.2}, r"\[low, high\]"),
        ({"band": [5, 0.2]}, "low <= high"),
        ({"guards": {"geometric": {}}}, "unknown guard"),
        ({"guards": {"geometric_mean": {"low": 0.5}}}, "exactly low, high"),
        ({"guards": {"product": {"low": 2, "high": 1}}}, "low <= high"),
        ({"guards": {"off_policy": {"delta": -1}}}, ">= 0"),
        ({"groups": "b200"}, "list of names"),
        ({"groups": ["a", "a"]}, "twice"),
        ({"vocab_size": 0}, "positive integer"),
        ({"backend": "cuda"}, "auto, torch, triton"),
        ({"inplace_logits": 1}, "true or false"),
        ([], "mapping"),
        (None, "no offpolicy_corr"),
    ],
)
def test_a_wrong_mapping_is_refused_by_name(mapping: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.of(mapping)


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"hihg": 5}, "no setting 'hihg': did you mean high"),
        ({"zzz": 5}, "known are backend, band, candidates"),
        ({None: 1}, "no setting None"),
        ({True: 1}, "no setting True"),
        ({"low": "0.5"}, "low must be a number, got '0.5'. Remove the quotes: 0.5"),
        ({"high": "1.0e3"}, "YAML reads 1.0e3 as text: write it with a point and a signed exponent, 1.0e.3"),
        ({"band": ["0,2", 5]}, "Write it with a point: 0.2"),
        ({"band": "0.2"}, r"\[low, high\]"),
        ({"low": float("nan")}, "NaN is none"),
        ({"low": 10**400}, "low must be a number that fits 64 bits"),
        ({"low": None}, "low must be a number, got None"),
        ({"correction": ["mis"]}, "must be a name"),
        ({"candidates": "hedas"}, "did you mean heads"),
        ({"candidates": ["heads"]}, "heads, supports, none"),
        ({"denominator": "kep"}, "did you mean kept"),
        ({"guards": {"geometric_men": {"low": 0.5, "high": 2}}}, "did you mean geometric_mean"),
        ({"guards": {"product": {"low": 0.5, "hihg": 2}}}, "exactly low, high"),
        ({"guards": {"product": {"low": "0.5", "high": 2}}}, "guards.product.low must be a number"),
        ({"guards": ["product"]}, "must be a mapping"),
        ({"groups": ["a", ""]}, "list of names"),
        ({"groups": {"a": 1}}, "list of names"),
        ({"vocab_size": "152064"}, "Remove the quotes: 152064"),
        ({"vocab_size": True}, "positive integer"),
        ({"validate": "false"}, "true or false, without quotes"),
    ],
)
def test_a_wrong_value_is_refused_with_the_remedy(mapping: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.of(mapping)


def test_names_of_the_literature_are_taken() -> None:
    assert Settings.of({"correction": "icepop"}).correction.rule == oc.MaskedIS()
    assert Settings.of({"correction": "sc+icepop"}).correction.center
    assert Settings.of({"correction": "cispo", "cap": 3}).correction.rule == oc.TruncatedIS(3.0)


def test_a_list_of_any_framework_is_a_list() -> None:
    given = UserDict({"band": UserList([0.5, 2]), "groups": UserList(["a"])})
    assert Settings.of(given) == Settings.of({"band": [0.5, 2], "groups": ["a"]})


def test_what_is_said_of_a_number_in_text_is_what_yaml_then_reads() -> None:
    """The remedy names a spelling; written without quotes, YAML reads it as the number that the text means."""
    yaml = pytest.importorskip("yaml")
    rng = random.Random(0)
    signs, digits = ("", "+", "-"), ("", "0", "1", "05", "12", "000")
    seen = 0
    for _ in range(3000):
        text = rng.choice(signs) + rng.choice(digits) + rng.choice(("", ".")) + rng.choice(digits)
        text += rng.choice(("", f"{rng.choice('eE')}{rng.choice(signs)}{rng.choice(digits)}"))
        try:
            meant = float(text)
        except ValueError:
            assert number_remedy(text) is None, text
            continue
        remedy = number_remedy(text)
        assert remedy is not None, text
        spelled = remedy.removeprefix("Write ").removesuffix(" without quotes").split()[-1]
        read = yaml.safe_load(spelled)
        assert isinstance(read, (int, float)) and math.isclose(read, meant, rel_tol=1e-15), (text, remedy)
        if remedy.startswith("Remove the quotes"):
            assert spelled == text
        if remedy.startswith("YAML reads"):
            assert isinstance(yaml.safe_load(text), str), text
        seen += 1
    assert seen > 1000
    for text in ("", "much", "1e", "e5", "0x1f", "1_000", "nan", "true", ".", "+", "--1"):
        assert number_remedy(text) is None, text
