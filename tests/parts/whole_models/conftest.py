"""Fewer cases of whole models in the tests that run by default."""

from __future__ import annotations

import pytest

from attn_export.parts.whole_models import model_cases, model_reference


@pytest.fixture(scope="session", autouse=True)
def _few_sizes(pytestconfig: pytest.Config) -> None:
    """Leave out most lengths: the truth takes half of the time of these tests."""
    if not pytestconfig.getoption("--all"):
        model_cases.SIZES = (1, 9, 33)
        model_reference.MOST = 48
