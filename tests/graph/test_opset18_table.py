"""The table of operators that mean the same in opset 18, against the schemas of onnx."""

from __future__ import annotations

import onnx
import pytest
from onnx.defs import OpSchema, SchemaError, get_schema

from attn_export.graph.lower.opset18 import DECOMPOSED, ONLY_TYPES_ADDED, OPSET, SAME_IF

NEWEST = 25
NO_FUNCTIONS = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike", "NegativeLogLikelihoodLoss", "QLinearMatMul", "DFT",
}  # fmt: skip
"""Operators that draw random numbers, that models for inference do not have, or of other inputs."""


def pair(name: str) -> tuple[OpSchema, OpSchema] | None:
    """Return the schemas of opset 18 and of the newest, if they differ."""
    try:
        then, now = get_schema(name, OPSET), get_schema(name, NEWEST)
    except SchemaError:
        return None
    return None if then.since_version == now.since_version else (then, now)


NAMES = sorted({s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain})
CHANGED = [name for name in NAMES if pair(name) is not None]


def interface(schema: OpSchema) -> tuple[object, ...]:
    ends = [[(end.name, end.option) for end in part] for part in (schema.inputs, schema.outputs)]
    defaults = {name: str(a.default_value) for name, a in schema.attributes.items()}
    return (*ends, defaults)


@pytest.mark.parametrize("name", CHANGED)
def test_every_operator_that_changed_is_in_a_table(name: str):
    assert name in {*ONLY_TYPES_ADDED, *SAME_IF, *DECOMPOSED, *NO_FUNCTIONS}


@pytest.mark.parametrize("name", sorted(ONLY_TYPES_ADDED - {"Cast", "CastLike"}))
def test_an_operator_that_only_takes_more_types_has_the_same_interface(name: str):
    schemas = pair(name)
    assert schemas is not None, f"{name} did not change: take it out of the table"
    assert interface(schemas[0]) == interface(schemas[1])
