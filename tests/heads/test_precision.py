"""`train.precision` and `features.precision`."""

import pytest

from heads import precision


@pytest.mark.parametrize(("setting", "expected"), [("fp32", False), ("bf16", True)])
def test_named(setting, expected):
    assert precision.in_bf16(setting) is expected


@pytest.mark.parametrize(("bf16", "expected"), [(0.4, True), (0.6, False), (30.0, False)])
def test_auto_takes_what_is_twice_as_fast(monkeypatch, bf16, expected):
    """A CPU that emulates bfloat16 trains in float32."""
    monkeypatch.setattr(precision.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_product_seconds", lambda dtype: bf16 if dtype == precision.torch.bfloat16 else 1.0)
    assert precision.in_bf16("auto") is expected


def test_auto_measures_this_machine():
    assert isinstance(precision.in_bf16("auto"), bool)
    assert 0 < precision._product_seconds(precision.torch.float32, budget=0.01) < 5
