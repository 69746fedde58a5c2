"""Integer polynomials over symbolic sizes: what the analysis knows about dimensions and shape arithmetic.

Symbols are integers. Odd symbols depend on the number of rows, even ones do not; ROWS is the number of rows itself.
Every symbol stands for one size (0 or more) within a run, and an even one has the same value in every run of requests
that may be batched. A polynomial that grows too large becomes a new symbol, so the cost of an operation is bounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import mul

Monomial = tuple[int, ...]
"""The symbols of a product, sorted, each as often as it occurs; () for a constant."""

_ROWS_SYMBOL = 1
#: beyond these a polynomial is replaced by a new symbol
_TERMS_MAX = 8
_DEGREE_MAX = 12
#: constants beyond 64 bits do not occur in shapes
_COEFFICIENT_MAX = 2**63
#: what one operation on bounded polynomials may give before the result is bounded, too
_TERMS_BETWEEN, _COEFFICIENT_BETWEEN = 256, 2**192


class TooLarge(ValueError):
    """A polynomial is too large to calculate with."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of monomials with integer coefficients; `terms` is sorted by monomial and has no zero coefficient."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def constant(self) -> int | None:
        """The value of a polynomial without symbols, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @property
    def counted(self) -> bool:
        """Whether it depends on the number of rows."""
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
        """The exact quotient as a polynomial, None if there is none of a simple form."""
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
    def known_positive(self) -> bool:
        """True if the coefficients show that it is at least 1 (all symbols are sizes, and there is at least one row)."""
        return self.known_natural and any(set(monomial) <= {_ROWS_SYMBOL} for monomial, _ in self.terms)

    @property
    def known_natural(self) -> bool:
        """True if the coefficients show that it is at least 0."""
        return all(coefficient > 0 for _, coefficient in self.terms)


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
    """A constant."""
    return Expression((((), value),) if value else ())


ZERO = number(0)
ONE = number(1)
ROWS = Expression((((_ROWS_SYMBOL,), 1),))


def product(factors: Iterable[Expression]) -> Expression:
    """The product of all factors, 1 if there are none."""
    return reduce(mul, factors, ONE)


class Symbols:
    """The symbols of one analysis. Equal computations on equal operands give the same symbol."""

    def __init__(self) -> None:
        self._next = _ROWS_SYMBOL + 1
        self._known: dict[Hashable, Expression] = {}

    def fresh(self, *, counted: bool = False) -> Expression:
        """A size of which nothing else is known."""
        self._next += 2
        return Expression((((self._next | 1 if counted else self._next & ~1,), 1),))

    def derived(self, operation: str, *operands: Hashable) -> Expression:
        """The result of a computation that is no polynomial. Operands that are expressions decide what it depends on."""
        key = (operation, *operands)
        found = self._known.get(key)
        if found is None:
            counted = any(operand.counted for operand in operands if isinstance(operand, Expression))
            found = self._known[key] = self.fresh(counted=counted)
        return found

    def bounded(self, expression: Expression) -> Expression:
        """The expression, or a symbol in its place if it is too large to calculate with."""
        terms = expression.terms
        if len(terms) <= _TERMS_MAX and all(
            len(monomial) <= _DEGREE_MAX and abs(value) < _COEFFICIENT_MAX for monomial, value in terms
        ):
            return expression
        return self.derived("large", expression)
