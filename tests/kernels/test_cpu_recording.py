"""How recorded operations become a native program."""

from __future__ import annotations

import pytest

from trunkline.kernels.cpu.recording import LogitsValue, Lowering, NativeProgram, Value


def lower(values: list[Value]) -> NativeProgram:
    return Lowering(values, LogitsValue(values[-1], norm=9, head=8)).program


def embed() -> Value:
    return Value("embed", 64, (), (0,))


def mlp(x: Value, fusible: bool) -> list[Value]:
    norm = Value("norm", 64, (x,), (1,))
    gate_up = Value("linear", 256, (norm,), (2,), fusible)
    gated = Value("gated", 128, (gate_up,), (1,))
    return [norm, gate_up, gated, Value("linear_add", 64, (gated, x), (3,))]


def test_a_gate_is_fused_where_the_weights_allow_it() -> None:
    x = embed()
    program = lower([x, *mlp(x, fusible=True)])
    assert program.operations == [
        ("embed", [0, 0]),
        ("norm", [0, 1, 1]),
        ("linear_gated", [1, 2, 1, 2]),
        ("linear_add", [2, 3, 0]),
    ]
    assert program.buffers == [("wide", 64), ("operand", 64), ("operand", 128)]
    assert program.head == (0, 9, 8, None)


def test_elsewhere_it_is_an_operation_of_its_own() -> None:
    x = embed()
    program = lower([x, *mlp(x, fusible=False)])
    assert program.operations[2:4] == [("linear", [1, 2, 2]), ("gated", [2, 1, 3])]
    assert ("wide", 256) in program.buffers


def test_a_product_that_is_read_twice_is_not_fused() -> None:
    x = embed()
    norm = Value("norm", 64, (x,), (1,))
    linear = Value("linear", 256, (norm,), (2,), True)
    gated = Value("gated", 128, (linear,), (0,))
    added = Value("linear_add", 64, (gated, x), (3,))
    again = Value("linear_add", 64, (linear, added), (4,))
    names = [name for name, _ in lower([x, norm, linear, gated, added, again]).operations]
    assert names == ["embed", "norm", "linear", "gated", "linear_add", "round", "linear_add"]


def test_layers_use_the_same_buffers() -> None:
    x = embed()
    values = [x]
    for _ in range(5):
        values += mlp(values[-1], fusible=True)
    assert len(lower(values).buffers) == 3


def test_a_rounded_input_never_shares_its_buffer_with_the_output() -> None:
    x = embed()
    first = Value("linear", 256, (Value("norm", 64, (x,), (1,)),), (2,), True)
    norm = first.inputs[0]
    gated = Value("gated", 128, (first,), (0,))
    wide = Value("linear", 128, (gated,), (3,))
    second = Value("linear", 256, (wide,), (4,), True)
    again = Value("gated", 128, (second,), (0,))
    values = [x, norm, first, gated, wide, second, again]
    program = lower([*values, Value("linear_add", 64, (again, x), (5,))])
    rounded = dict(program.operations)["round"][1]
    fused = [numbers for name, numbers in program.operations if name == "linear_gated"][1]
    assert fused[0] == rounded
    assert fused[3] != rounded


def test_what_is_normed_is_added_in_place() -> None:
    x = embed()
    norm = Value("norm", 64, (x,), (1,))
    linear = Value("linear", 64, (norm,), (2,))
    added = Value("norm_add", 64, (linear, x), (3,))
    program = Lowering([x, norm, linear, added], LogitsValue(added, 9, 8, soft_cap=7)).program
    assert program.operations[2:] == [("linear", [1, 2, 2]), ("norm_add", [2, 3, 0])]
    assert program.buffers == [("wide", 64), ("operand", 64), ("wide", 64)]
    assert program.head == (0, 9, 8, 7)


def test_programs_that_break_the_rules_are_refused() -> None:
    x = embed()
    norm = Value("norm", 64, (x,), (1,))
    added = Value("linear_add", 64, (norm, x), (2,))
    with pytest.raises(ValueError, match="residual"):
        lower([x, norm, added, Value("linear_add", 64, (norm, x), (2,))])
    with pytest.raises(ValueError, match="no operation on the result of 'norm'"):
        lower([x, norm, Value("norm", 64, (norm,), (1,))])
    with pytest.raises(ValueError, match="no operation on the result of 'norm'"):
        lower([x, norm, Value("norm_add", 64, (norm, x), (1,))])
