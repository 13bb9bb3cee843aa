"""From a model's operations to a native program: which are fused, and which buffers they use.

Operations are recorded as a graph in the order in which the model calls them. A value is *wide*
(float32), an *operand* (rounded to the model's dtype, ready to be multiplied) or *quantised* (ready
to be multiplied with quantised weights); which one follows from the operation that yields it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind = Literal["embed", "norm", "linear", "linear_add", "norm_add", "gated", "attend", "quantise"]
Form = Literal["wide", "operand", "quantised"]
Record: TypeAlias = tuple[str, list[int | None]]

FORMS: dict[Kind, Form] = {
    "embed": "wide",
    "norm": "operand",
    "linear": "wide",
    "linear_add": "wide",
    "norm_add": "wide",
    "gated": "operand",
    "attend": "operand",
    "quantise": "quantised",
}


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What an operation yields.

    `inputs` are the values that it reads (`linear_add` and `norm_add`: what is added, then the
    residual), `numbers` what the native operation needs besides buffers.
    """

    kind: Kind
    width: int
    inputs: tuple[Value, ...] = ()
    numbers: tuple[int | None, ...] = ()
    fusible: bool = False  # a linear whose product can be gated at once

    @property
    def form(self) -> Form:
        """How the value is stored."""
        return FORMS[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class LogitsValue:
    """Logits at the step's logit tokens."""

    hidden: Value
    norm: int
    head: int
    soft_cap: int | None = None  # bits of a float32


@dataclass(frozen=True, slots=True)
class PooledValue:
    """Pooled states: what the logits are made of, but not rounded."""

    hidden: Value
    norm: int


@dataclass(slots=True)
class NativeProgram:
    """Arguments of `CpuModel.start`."""

    buffers: list[tuple[str, int]] = field(default_factory=list)
    operations: list[Record] = field(default_factory=list)
    head: tuple[int, int, int, int | None] = (0, 0, 0, None)


class Lowering:
    """One pass over recorded values."""

    def __init__(self, values: list[Value], logits: LogitsValue) -> None:
        self._program = NativeProgram()
        self._logits = logits
        self._buffers: dict[Value, int] = {}
        self._free: dict[tuple[Form, int], list[int]] = {}
        self._rounded: list[tuple[int, int]] = []  # operands of the operation being lowered
        self._uses: dict[Value, int] = {logits.hidden: 1}
        readers: dict[Value, list[Value]] = {}
        for value in values:
            for read in value.inputs:
                self._uses[read] = self._uses.get(read, 0) + 1
                readers.setdefault(read, []).append(value)
        self._gated_at_once = {
            value
            for value in values
            if value.fusible and [reader.kind for reader in readers.get(value, [])] == ["gated"]
        }
        for value in values:
            self._lower(value)
        if logits.hidden.form != "wide":
            raise ValueError("the CPU kernels take logits of values in float32 only")
        hidden = self._buffers[logits.hidden]
        self._program.head = (hidden, logits.norm, logits.head, logits.soft_cap)

    @property
    def program(self) -> NativeProgram:
        """The result."""
        return self._program

    def _lower(self, value: Value) -> None:
        if value in self._gated_at_once:
            return
        if value.kind == "gated" and value.inputs[0] in self._gated_at_once:
            self._lower_linear("linear_gated", value, value.inputs[0])
        elif value.kind == "linear":
            self._lower_linear("linear", value, value)
        elif value.kind in ("linear_add", "norm_add"):
            self._lower_add(value)
        elif value.kind == "quantise":
            operand = self._operand(value.inputs[0])
            self._emit("quantise", [operand, self._allocate(value)])
            self._release(*value.inputs)
        else:
            reads = [self._wide(read) for read in value.inputs]
            to = self._allocate(value)
            order: dict[str, list[int | None]] = {
                "embed": [*value.numbers, to],
                "norm": [*reads, *value.numbers, to],
                "gated": [*reads, *value.numbers, to],
                "attend": [*reads, to, *value.numbers],
            }
            self._emit(value.kind, order[value.kind])
            self._release(*value.inputs)

    def _lower_linear(self, name: str, value: Value, linear: Value) -> None:
        operand = self._operand(linear.inputs[0])
        gate = value.numbers if value is not linear else ()
        self._emit(name, [operand, *linear.numbers, *gate, self._allocate(value)])
        self._release(*linear.inputs)

    def _lower_add(self, value: Value) -> None:
        x, residual = value.inputs
        if self._uses[residual] != 1 or residual.form != "wide":
            raise ValueError("a residual is used again, or is not in float32")
        added = self._operand(x) if value.kind == "linear_add" else self._wide(x)
        buffer = self._buffers[residual]
        self._emit(value.kind, [added, *value.numbers, buffer])
        self._buffers[value] = buffer
        self._release(x)

    def _wide(self, value: Value) -> int:
        if value.form != "wide":
            raise ValueError(f"the CPU kernels have no operation on the result of {value.kind!r}")
        return self._buffers[value]

    def _operand(self, value: Value) -> int:
        if value.form != "wide":
            return self._buffers[value]
        rounded = self._new("operand", value.width)
        self._emit("round", [self._buffers[value], rounded])
        self._rounded.append((value.width, rounded))
        return rounded

    def _emit(self, name: str, numbers: list[int | None]) -> None:
        self._program.operations.append((name, numbers))

    def _new(self, form: Form, width: int) -> int:
        self._program.buffers.append((form, width))
        return len(self._program.buffers) - 1

    def _allocate(self, value: Value) -> int:
        free = self._free.get((value.form, value.width), [])
        buffer = free.pop() if free else self._new(value.form, value.width)
        self._buffers[value] = buffer
        return buffer

    def _release(self, *values: Value) -> None:
        for width, rounded in self._rounded:
            self._free.setdefault(("operand", width), []).append(rounded)
        self._rounded = []
        for value in values:
            self._uses[value] -= 1
            if self._uses[value] == 0:
                self._free.setdefault((value.form, value.width), []).append(self._buffers[value])
