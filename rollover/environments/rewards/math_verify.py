"""``kind = "math_verify"``: 1 for an answer that is mathematically equal to the reference, else 0."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, ClassVar, Literal

from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec
from rollover.environments.rewards.extraction import AnswerSettings, ReferenceExtraction, reference_texts
from rollover.environments.rewards.final_expression import final_expression, measure, readings, reference_expression
from rollover.errors import RewardError, require

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its time limits are off
_MOST_DIGITS = 1e5
_MOST_TERMS = 1e4
"""Largest power of an expression with variables, and number of terms of a sum or product."""
_EXACT, _ROUNDED = 1e-12, 1e-3
"""Relative difference at which exact numbers, and numbers of which one is a decimal, are not equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MathVerifyConfig(AnswerSettings):
    """Scores 1 when math-verify finds the response's final expression equal to the reference; else 0.

    Example: with the reference ``"0.5"``, a response that ends in ``$\\boxed{\\frac{1}{2}}$`` scores 1.
    """

    compares_answer: ClassVar[bool] = True

    kind: Literal["math_verify"] = "math_verify"
    """``"math_verify"`` chooses this reward, which finds the answer in the response itself."""
    reference_extract: ReferenceExtraction = "whole"
    """Location of the reference answer in the answer column: ``hashes`` suits worked solutions that end in
    ``#### 72``."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        if self.workers == 0:
            raise ValueError("reward.workers must be at least 1 for 'math_verify': only a process can be stopped")

    def judged_part(self, sample: RewardSample) -> str:
        return final_expression(self.answer_text(sample) or "") or ""

    def references(self, spec: RewardSpec, columns: Mapping[str, Any]) -> list[str]:
        texts = reference_texts(spec, columns, self.reference_extract)
        for text in texts:
            if not _is_read(reference_expression(text)):
                raise RewardError(f"the reference answer {text[:80]!r} is not mathematics; use reward kind 'exact'")
        return texts

    def build(self, spec: RewardSpec) -> MathVerifyReward:
        return MathVerifyReward(self, spec)


class MathVerifyReward:
    """Compares with math-verify.

    The library's own time limits use signals and are switched off: the process has a deadline. A response on which the
    library fails counts as wrong.
    """

    def __init__(self, config: MathVerifyConfig, spec: RewardSpec) -> None:
        require("math_verify", purpose="reward kind 'math_verify'")
        self._config = config
        self._spec = spec
        _parsed("$1$")  # loads the grammar, which must not count against the deadline of the first response

    def score(self, sample: RewardSample) -> float:
        expressions = map(reference_expression, self._config.references(self._spec, sample.columns))
        references = [one for expression in expressions for one in _read(expression)]
        try:
            pairs = product(references, _read(self._config.judged_part(sample)))
            return float(any(self._fits(reference, answer) for reference, answer in pairs))
        except Exception:  # a number with more digits than Python reads, say
            return 0.0

    def _fits(self, reference: _Reading, answer: _Reading) -> bool:
        """Return whether two expressions agree, with no other label or unit if both have one."""
        is_alike = all(None in pair or len({*pair}) == 1 for pair in zip(reference[:2], answer[:2], strict=True))
        return is_alike and any(starmap(self._equal, product(reference[2], answer[2])))

    def _equal(self, reference: Any, answer: Any) -> bool:
        import math_verify

        if is_endless(reference) or is_endless(answer):
            return bool(reference == answer)
        pair = [  # an i alone is the imaginary unit
            one.subs(dict.fromkeys(one.free_symbols, "I")) if str(getattr(one, "free_symbols", "")) == "{i}" else one
            for one in (reference, answer)
        ]
        equal = math_verify.verify(*pair, timeout_seconds=None, allow_set_relation_comp=True)
        return equal and not are_apart(*pair)


_Reading = tuple[str | None, str | None, list[Any]]


def _read(text: str) -> list[_Reading]:
    """Return the ways to read an expression: its label as a choice, its unit, and what math-verify reads."""
    return [(label, measure(form), _parsed(form)) for label, form in readings(text)]


def _parsed(text: str) -> list[Any]:
    import math_verify

    return list(math_verify.parse(text, parsing_timeout=None))


def _is_read(expression: str) -> bool:
    """Return whether math-verify reads anything in a reference. It reads every box with a letter or digit in it, so
    that few references have to be parsed for this."""
    bare = re.sub(r"\\(?:[a-zA-Z]+|.)", "", expression)
    is_closed = expression.startswith(r"\boxed{") and bare.count("{") == bare.count("}")
    return bool(is_closed and re.search(r"[^\W_]", bare)) or bool(_parsed(expression))


def is_endless(expression: Any) -> bool:
    """Return whether computing the expression would take forever, such as ``9^{9^{9}}`` with its 369,693,100 digits."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return False
    try:
        return _digits(expression) > _MOST_DIGITS or _terms(expression) > _MOST_TERMS
    except OverflowError:
        return True


def _digits(expression: Any) -> float:
    """Estimate the decimal digits that computing the expression takes, from above. Raises ``OverflowError``."""
    import sympy
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    if isinstance(expression, sympy.Rational):
        return math.log10(1 + max(abs(expression.p), expression.q))
    digits = [_digits(part) for part in expression.args]
    match expression:
        case sympy.Pow():
            power = 10.0 ** digits[1]
            if expression.base.free_symbols and expression.exp.is_number:
                return math.inf if power > _MOST_TERMS and expression.exp.is_integer is not False else digits[0]
            return digits[0] * power if expression.is_number else max(digits)
        case CombinatorialFunction() | sympy.gamma():
            return 10.0 ** min(digits) * digits[0] if expression.is_number else max(digits)
        case sympy.Sum() | sympy.Product():
            lengths = [abs(high - low) for _, low, high in expression.limits if (high - low).is_finite]
            return math.inf if any(length.is_number and length > _MOST_TERMS for length in lengths) else max(digits)
    return sum(digits)


def _terms(expression: Any) -> float:
    """Return the number of terms of the expression once it is expanded. Raises ``OverflowError``.

    Example: ``(x + y + z)^{100}`` has 102 * 101 / 2 = 5151 terms.
    """
    import sympy

    if expression.is_number:
        return 1.0
    match expression:
        case sympy.Add():
            return sum(map(_terms, expression.args))
        case sympy.Mul():
            return math.prod(map(_terms, expression.args))
        case sympy.Pow() if expression.exp.is_Integer:
            power, others = abs(int(expression.exp)), _terms(expression.base) - 1
            return math.exp(math.lgamma(power + others + 1) - math.lgamma(power + 1) - math.lgamma(others + 1))
    return max(map(_terms, expression.args), default=1.0)


def are_apart(reference: Any, answer: Any) -> bool:
    """Return whether two numbers, or two collections of numbers, differ relative to their size. math-verify compares
    15 digits after the point, which are all 0 in ``1/2004!`` and ``1/2006!``."""
    import sympy

    pair = [one.rhs if isinstance(one, sympy.Eq) else one for one in (reference, answer)]
    if pair[0] == pair[1]:  # also infinity, which is not apart from itself
        return False
    if all(isinstance(one, sympy.FiniteSet | sympy.Tuple) for one in pair) and len(pair[0]) == len(pair[1]):
        parts = [
            list(one) if isinstance(one, sympy.Tuple) else sorted(one, key=lambda n: sympy.default_sort_key(n.evalf()))
            for one in pair
        ]
        return any(are_apart(*both) for both in zip(*parts, strict=True))
    if not all(isinstance(one, sympy.Expr) and one.is_number for one in pair):
        return False
    if any(one.has(sympy.UnevaluatedExpr) for one in pair):  # per cent
        return False
    try:
        first, second = (one.evalf(30, strict=True) for one in pair)
    except sympy.core.evalf.PrecisionExhausted:  # a number that is 0 without looking so
        return False
    bound = _ROUNDED if any(one.has(sympy.Float) for one in pair) else _EXACT
    return bool(abs(first - second) > bound * max(abs(first), abs(second)))
