"""Tests of the marker `xdist_group`, by which tests with shared results run in one process."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.xdist_group("grouping")


def test_a_group_of_tests_is_known_to_what_distributes_them(request: pytest.FixtureRequest):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return  # one process runs all
    # By this suffix; pytest 9.2 makes of it a field that is not read.
    assert request.node.nodeid.endswith("@grouping")
