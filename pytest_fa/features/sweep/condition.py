"""Conditions over defines, such as `STAGES * BLOCK_N * 256 <= 227 * 1024`, in a manifest's `sweep.where`.

A manifest is data, so a condition is never executed as Python code.  It is parsed, each node must be on a list, and the
tree is evaluated here.  Arithmetic is on integers; texts can only be compared.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping

from pytest_fa.errors import UsageProblem, suggestion

LONGEST_CONDITION = 200  # characters
ALLOWED = "integers, texts, names of defines, + - * // %, comparisons, in, and, or, not"

Value = int | str
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Condition:
    """One condition; `names` are the defines that it reads."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LONGEST_CONDITION:
            raise self._problem(f"has {len(text)} characters; at most {LONGEST_CONDITION} are allowed")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._problem("cannot be parsed") from None
        self._require_condition(self._tree)
        self.names = frozenset(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))

    def require_names(self, known: Collection[str]) -> None:
        """Raise `UsageProblem` for a name that is no define."""
        for name in sorted(self.names - set(known)):
            listed = ", ".join(known) or "none"
            raise UsageProblem(
                f"sweep.where: {self.text!r} has {name!r}{suggestion(name, known)} (the defines are: {listed})"
            )

    def holds(self, defines: Mapping[str, Value]) -> bool:
        """Whether the condition holds for these defines.  Raises `UsageProblem` if it cannot be evaluated."""
        try:
            return self._is_true(self._tree, defines)
        except ZeroDivisionError:
            read = ", ".join(f"{name}={defines[name]}" for name in sorted(self.names))
            raise self._problem(f"divides by zero at {read}") from None

    # -- what is allowed ----------------------------------------------------------------------------------------------

    def _require_condition(self, node: ast.expr) -> None:
        """Raise `UsageProblem` unless the node is a comparison, or an `and`, `or`, `not` of such."""
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self._require_condition(part)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._require_condition(node.operand)
        elif isinstance(node, ast.Compare):
            self._require_value(node.left)
            for comparison, right in zip(node.ops, node.comparators, strict=True):
                self._require_operand(comparison, right)
        else:
            raise self._problem(f"has {ast.unparse(node)!r}, which is no comparison")

    def _require_operand(self, comparison: ast.cmpop, right: ast.expr) -> None:
        if isinstance(comparison, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List) or not right.elts:
                raise self._problem(f"has `in {ast.unparse(right)}`; write a list, such as in (32, 64)")
            for element in right.elts:
                self._require_value(element)
        elif isinstance(comparison, ast.Eq | ast.NotEq) or type(comparison) in _ORDER:
            self._require_value(right)
        else:
            raise self._problem("has `is`")

    def _require_value(self, node: ast.expr) -> None:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            self._require_value(node.left)
            self._require_value(node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._require_value(node.operand)
        elif not isinstance(node, ast.Name) and not (isinstance(node, ast.Constant) and type(node.value) in (int, str)):
            raise self._problem(f"has {ast.unparse(node)!r}")

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _is_true(self, node: ast.expr, defines: Mapping[str, Value]) -> bool:
        if isinstance(node, ast.BoolOp):
            combined = all if isinstance(node.op, ast.And) else any
            return combined(self._is_true(part, defines) for part in node.values)
        if isinstance(node, ast.UnaryOp):
            return not self._is_true(node.operand, defines)
        assert isinstance(node, ast.Compare)  # noqa: S101  # the constructor allows no other node
        left = node.left
        for comparison, right in zip(node.ops, node.comparators, strict=True):
            if not self._compares(left, comparison, right, defines):
                return False
            left = right
        return True

    def _compares(self, left: ast.expr, comparison: ast.cmpop, right: ast.expr, defines: Mapping[str, Value]) -> bool:
        value = self._value(left, defines)
        if isinstance(right, ast.Tuple | ast.List):
            return (value in [self._value(each, defines) for each in right.elts]) is isinstance(comparison, ast.In)
        other = self._value(right, defines)
        if isinstance(comparison, ast.Eq | ast.NotEq):
            return (value == other) is isinstance(comparison, ast.Eq)
        return _ORDER[type(comparison)](self._integer(value), self._integer(other))

    def _value(self, node: ast.expr, defines: Mapping[str, Value]) -> Value:
        if isinstance(node, ast.Name):
            return defines[node.id]
        if isinstance(node, ast.BinOp):
            left, right = (self._integer(self._value(each, defines)) for each in (node.left, node.right))
            return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp):
            return -self._integer(self._value(node.operand, defines))
        assert isinstance(node, ast.Constant) and isinstance(node.value, int | str)  # noqa: S101, PT018  # as above
        return node.value

    def _integer(self, value: Value) -> int:
        if isinstance(value, int):
            return value
        raise self._problem(f"uses the text {value!r} as a number; texts can only be compared with == and != and in")

    def _problem(self, text: str) -> UsageProblem:
        return UsageProblem(f"sweep.where: {self.text[:LONGEST_CONDITION]!r} {text} (allowed: {ALLOWED})")
