"""The default model at a high temperature keeps to varied schemas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.engine.generation_schemas import SCHEMAS

from trunkline import Engine

PROMPT = "Here is an example of what was asked for, as JSON:\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_total_tokens=32768) as engine:
        yield engine


def generate(engine: Engine, schemas: list[Any], seed: int, most: int) -> Counter[str]:
    """One generation for each schema; what ends with stop is valid."""
    params = [
        {
            "json_schema": schema,
            "temperature": 1.5,
            "max_new_tokens": most,
            "sampling_seed": seed + index,
        }
        for index, schema in enumerate(schemas)
    ]
    outputs = engine.generate([PROMPT] * len(schemas), params)
    reasons: Counter[str] = Counter()
    for schema, output in zip(schemas, outputs, strict=True):
        reason = output["meta_info"]["finish_reason"]["type"]
        reasons[reason] += 1
        if reason == "stop":
            checker = jsonschema.FormatChecker()
            validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
            validator.validate(json.loads(output["text"]))
    return reasons


def test_there_are_enough_schemas():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) >= 60


def test_every_schema_is_kept(engine: Engine):
    schemas = SCHEMAS[::4]
    reasons = generate(engine, schemas, seed=0, most=40)
    assert reasons.keys() <= {"stop", "length"}
    assert reasons["stop"] > len(schemas) / 2
    engine.check_integrity()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_generations(engine: Engine):
    reasons: Counter[str] = Counter()
    for seed in range(0, -(-1000 // len(SCHEMAS))):
        reasons += generate(engine, SCHEMAS, seed=1000 * seed, most=512)
    print(dict(reasons))
    assert reasons.total() >= 1000
    assert reasons.keys() <= {"stop", "length"}
    assert reasons["stop"] >= reasons.total() / 2
    engine.check_integrity()
