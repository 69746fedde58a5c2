"""Integer polynomials over symbolic sizes: the analysis' representation of dimensions and shape arithmetic.

Symbols are integers. Odd symbols depend on the number of rows, even symbols do not; ROWS is the number of rows itself.
A symbol stands for one size (0 or more) within a run, and an even symbol has the same value in all runs of requests
that may be batched. A polynomial that grows too large becomes a new symbol, so the cost of an operation is bounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import mul

from millstream.services.model.manifest import ROWS_MAX

Monomial = tuple[int, ...]
"""The sorted symbols of a product, repeated for powers; () for a constant."""

_ROWS_SYMBOL = 1
#: limits beyond which a polynomial is replaced by a new symbol
_TERMS_MAX = 8
_DEGREE_MAX = 12
#: limit on constants: larger ones do not occur in shapes, whose sizes are 64-bit integers
_COEFFICIENT_MAX = 2**63
#: limits on the result of one operation, before it is replaced by a symbol
_TERMS_BETWEEN, _COEFFICIENT_BETWEEN = 256, 2**192


class TooLarge(ValueError):
    """A polynomial exceeds the limits of an operation."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of monomials with integer coefficients; `terms` is sorted by monomial and has no zero coefficient."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def constant(self) -> int | None:
        """The value of a polynomial without symbols; None for any other."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @property
    def counted(self) -> bool:
        """Whether the polynomial depends on the number of rows."""
        return any(symbol & 1 for monomial, _ in self.terms for symbol in monomial)

    def __add__(self, other: Expression) -> Expression:
        sums = dict(self.terms)
        for monomial, coefficient in other.terms:
            sums[monomial] = sums.get(monomial, 0) + coefficient
        return _expression(sums)

    def __mul__(self, other: Expression) -> Expression:
        if self == ONE:
            return other
        if other == ONE:
            return self
        if len(self.terms) * len(other.terms) > _TERMS_BETWEEN:
            raise TooLarge
        sums: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = tuple(sorted(left + right))
                sums[monomial] = sums.get(monomial, 0) + a * b
        return _expression(sums)

    def __neg__(self) -> Expression:
        return Expression(tuple((monomial, -coefficient) for monomial, coefficient in self.terms))

    def __sub__(self, other: Expression) -> Expression:
        return self + -other

    def over(self, divisor: Expression) -> Expression | None:
        """Return the exact quotient by a monomial or by an equal polynomial; None if there is none."""
        if self == divisor:
            return ONE
        if len(divisor.terms) != 1:
            return None
        bottom, coefficient = divisor.terms[0]
        quotient: list[tuple[Monomial, int]] = []
        for monomial, value in self.terms:
            rest = _without(monomial, bottom)
            if rest is None or value % coefficient:
                return None
            quotient.append((rest, value // coefficient))
        return Expression(tuple(sorted(quotient)))

    @property
    def least(self) -> int | None:
        """A lower bound: symbols are sizes, and a run has 1 to ROWS_MAX rows. None if there is none."""
        bound = 0
        for monomial, coefficient in self.terms:
            others = {*monomial} - {_ROWS_SYMBOL}
            if coefficient < 0 and others:
                return None
            rows = ROWS_MAX if coefficient < 0 else 1
            bound += 0 if others else coefficient * rows ** len(monomial)
        return bound

    @property
    def known_positive(self) -> bool:
        """Whether the value is at least 1."""
        return (self.least or 0) >= 1

    @property
    def known_natural(self) -> bool:
        """Whether the value is at least 0."""
        least = self.least
        return least is not None and least >= 0


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    rest = list(monomial)
    for symbol in factors:
        if symbol not in rest:
            return None
        rest.remove(symbol)
    return tuple(rest)


def _expression(sums: dict[Monomial, int]) -> Expression:
    if len(sums) > _TERMS_BETWEEN or any(abs(value) > _COEFFICIENT_BETWEEN for value in sums.values()):
        raise TooLarge
    return Expression(tuple(sorted((monomial, value) for monomial, value in sums.items() if value)))


def number(value: int) -> Expression:
    """Return a constant polynomial."""
    return Expression((((), value),) if value else ())


ZERO = number(0)
ONE = number(1)
ROWS = Expression((((_ROWS_SYMBOL,), 1),))


def product(factors: Iterable[Expression]) -> Expression:
    """Return the product of all factors; 1 if there are none."""
    return reduce(mul, factors, ONE)


class Symbols:
    """Creates the symbols of one analysis. Equal computations on equal operands get the same symbol."""

    def __init__(self) -> None:
        self._next = _ROWS_SYMBOL + 1
        self._known: dict[Hashable, Expression] = {}

    def fresh(self, *, counted: bool = False) -> Expression:
        """Return a new symbol; `counted` says whether it depends on the number of rows."""
        self._next += 2
        return Expression((((self._next | 1 if counted else self._next & ~1,), 1),))

    def derived(self, operation: str, *operands: Hashable) -> Expression:
        """Return the symbol for a computation that is not polynomial; it is counted if an operand is."""
        key = (operation, *operands)
        symbol = self._known.get(key)
        if symbol is None:
            counted = any(operand.counted for operand in operands if isinstance(operand, Expression))
            symbol = self._known[key] = self.fresh(counted=counted)
        return symbol

    def bounded(self, expression: Expression) -> Expression:
        """Return the expression, or a symbol for it if it exceeds the limits on terms, degree or coefficients."""
        terms = expression.terms
        if len(terms) <= _TERMS_MAX and all(
            len(monomial) <= _DEGREE_MAX and abs(value) < _COEFFICIENT_MAX for monomial, value in terms
        ):
            return expression
        return self.derived("large", expression)
