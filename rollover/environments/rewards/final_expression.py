r"""Finds the final expression of a response, and writes what math-verify does not read in a form that it reads."""

from __future__ import annotations

import re
import unicodedata

_BOX = re.compile(r"\\f?box(?:ed)?\b\s*")
_CUT = re.compile(r"\\(?:f?b(?:o(?:x(?:ed?)?)?)?|f)?\s*$")
"""Matches the beginning of a box at the end of a text."""
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[a-zA-Z]+|[^\s{}]")
_DISJUNCTION = r"\b(?:or|oder|ou|of|o|u|или|或|或者|または|또는|to|through|till|until|bis|à|a|do|до|至|到|から)\b"
_CONJUNCTION = r"\b(?:and|und|et|en|y|e|и|和|と|및|nor)\b"
_HEDGE = (
    r"\b(?:else|also|even|rather|maybe|perhaps|possibly|probably|alternatively|otherwise|about|if not|versus|vs)\b\.?"
    r"|as well as|\|\|?|[&∨∪–—…~→]|->|\.{3}|\\/|\\(?:lor|vee|mid|cup|sim|to|l?dots)\b|\\\\"
)
_ALTERNATIVE = rf"(?:\\text\s*\{{\s*(?:and|or|and/or|,)\s*\}}|{_DISJUNCTION}|{_CONJUNCTION}|{_HEDGE})"
"""Matches what joins the values of one answer: conjunctions of some languages, ranges, hedges and signs. All of these
can be listed, unlike the verbs between a value and its result: ``2 leaves 6``."""
_UNIT = rf"(?:\s[^\W\d_]{{2,}}(?=,?\s{_DISJUNCTION}))"
_JOINS = re.compile(rf"(?:{_UNIT}|\b[a-zA-Z]\w?\s*=|\s|[$,;/.]|\\q?quad|{_ALTERNATIVE})*+")
"""Text between boxes that are one answer together: ``\boxed{1} and \boxed{2}``, not ``..., no: ...``."""

_NUMBER = r"-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?"
_QUOTIENT = re.compile(r"(?<=\d) / (?=\d)")
_ATOM = rf"(?:-?\\[dt]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|{_NUMBER}(?:\\?%)?)"
_PART = _ATOM.replace(r"(?:,\d{3})*", "")
"""Between commas, a comma of thousands is one more: a list could be read in exponentially many ways."""
_ALL = r"\s+(?:(?:all|both)\s+)?(?:work|satisfy|are\s+(?:all\s+|both\s+)?(?:the|possible|candid|root|solution|answer))"
_OR = rf"{_UNIT}?\s*[,;(]?\s*(?:{_ALTERNATIVE}[\s,/]*)+(?:[a-zA-Z]\s*=\s*)?"
_ITEM = rf"(?:(?:\\?\$)?{_ATOM}(?![\w$/^]))"
_RUN = re.compile(rf"(?<![\w$\\.{{}}]){_ITEM}(?:(?:{_OR}|[,;]\s+|[ \t]+(?!\d{{3}}\b)){_ITEM})++(\Z|{_ALL})?")
"""Numbers with nothing but commas and words such as ``or`` between them. They are one answer together if there is such
a word, or if the text ends there or says ``are the roots``, which is its group."""
_SAME = re.compile(rf"\b([a-zA-Z])_?\d?\s*=\s*({_ATOM})[,;]\s*\1_?\d?\s*=\s*({_ATOM})\Z")
"""Two values of one variable: ``x = 5, x = 6``."""
_PAIR = re.compile(rf"(?<![\w$\\])([(\[{{]{_PART}(?:,\s*{_PART})+[)\]}}])\Z")
_FORMULAS = re.compile(rf"(?:(?<=\$)|(?<=\\\)))(?:{_OR}|;\s*)(?=\$\S|\\\()")
"""Text that joins two formulas."""
_BOXED_LIST = re.compile(rf"\s*(?:[a-zA-Z]\s*=\s*)?{_ATOM}(?:{_OR}{_ATOM})++\s*")
_EXPONENT = re.compile(r"(?<![\w\\.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_QUANTITY = re.compile(rf"\s*(\\?\$?{_NUMBER})\s+([a-zA-Z]{{2,}}(?:[.\s]+[a-zA-Z]{{2,}})*\.?(?:\^?\{{?[23]\}}?)?)\s*")
_NO_UNITS = re.compile(
    r"\b(?:and|or|to|of|mod|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|inf|infinity|percent\w*|pct|plus|minus|times|over|"
    r"choose|factorial|squared|cubed|dozen|hundred|\w+illion|thousand|half|halves|thirds|quarters|fourths)\b"
)

_WIDE = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
_MIXED = re.compile(rf"(?<![\w.,;/])(?<![\d,;] )(\d+)\s+(\d+)/(\d+)(?:\s+(?!{_NO_UNITS.pattern})[a-zA-Z]{{2,}})?\s*\Z")
"""Matches ``3 1/2`` and ``3 1/2 cups`` at the end."""
_RELATION = re.compile(r"\s*(?:<(?!.*>\s*\Z)|[>≠≤≥]|\\(?:neq?|not\s*=|[lg](?:eq?|t|eqslant))(?![a-zA-Z]))")
_ELEMENT = re.compile(r"\A\s*[a-zA-Z]\s*(?:\\in\b|∈)\s*(?=(?:\\left\s*)?(?:[(\[]|\\\{))")
_DATE = re.compile(r"(?<![\w./-])\d{4}-\d\d-\d\d\Z")
_RATIO = re.compile(r"(?<![\w.:/-])\d+(?::\d+)+\Z")
_THOUSANDS = re.compile(r"(?<![\w.^])\d{1,3}(?:(?:\\[,;:! ]|[\u2009\u202f])\d{3})+(?!\d)")
"""Digits in groups of three with a thin space between them."""
_VALUE = (
    r"(?!(?:\\text\s*\{\s*)?(?:and|or)\b|[+*/=^<>|&,(A-Z]|-\s|\\(?!frac|dfrac|tfrac|text|math|sqrt|pi|\$|left))\S.*"
)
_LABEL = re.compile(
    rf"\\boxed\{{\s*(?:\\(?:text|math|mbox)[a-z]*\s*\{{)?\s*\(([A-J])\)(?:\\[ ,;:]|[\s~}}])+({_VALUE})\}}\Z",
    re.DOTALL,
)
"""Matches the label of a choice before its value: ``(C) 12``."""
_CHOICE = re.compile(r"\b[Aa]nswer(?:\s+is)?:?\s*(?:option\s+)?[$*(]*([A-Z])[)*$]*\Z")
_TIME = re.compile(r"\\boxed\{\s*0?((?:1?\d|2[0-3]):[0-5]\d)\s*\}")
_MEASURES = ("mm", "cm", "m", "km", "mg", "g", "kg", "ml", "l", "s", "min", "h")
_MEASURE = re.compile(
    rf"\d[\s~\\,]*(?:\\(?:text|mathrm|mbox|rm)\s*\{{?\s*)?({'|'.join(_MEASURES)})(?:\^\{{?[23]\}}?)?[\s}}$.]*\Z"
)


def measure(expression: str) -> str | None:
    r"""Return the unit after a number if it is a usual one, or a time of day, which is no ratio. Example: ``cm`` of
    ``\boxed{5\text{ cm}}``."""
    found = _MEASURE.search(expression) or _TIME.fullmatch(expression)
    return found and found[1]


def readings(expression: str) -> list[tuple[str | None, str]]:
    r"""Return what an expression may be read as, each after the label of a choice that it belongs to. Example: for
    ``\boxed{\text{(C) } 12}``, ``\boxed{12}`` with the label ``C``, and ``\boxed{C}``."""
    found = _LABEL.fullmatch(expression)
    return [(found[1], boxed(found[2])), (None, boxed(found[1]))] if found else [(None, expression)]


def plain(text: str) -> str:
    """Write full-width signs, fractions and powers in ASCII, and thousands without spaces. Example: ``"3 1/2 cm^{2}"``
    for ``"３½ cm²"``."""
    text = re.sub("[¼-¾⅐-⅞]", lambda one: " " + unicodedata.normalize("NFKC", one[0]).replace("⁄", "/"), text)
    text = re.sub("[⁰¹²³⁴-⁹]+", lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}", text)
    return _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text.translate(_WIDE))


def final_expression(text: str) -> str | None:
    r"""Return the part of ``text`` that math-verify shall read, ``None`` when it ends within a box.

    Example: of ``\boxed{5} wait, no: \boxed{7}`` it is ``\boxed{7}``, of ``\boxed{1} and \boxed{2}`` it is
    ``\boxed{1,2}``. A text without a box is read as a whole.
    """
    text = plain(text)
    if _CUT.search(text):
        return None
    boxes = list(_boxes(text))
    if not boxes:
        text = _QUOTIENT.sub("/", text.rstrip(" \n.?!"))
        if found := _CHOICE.search(text) or _DATE.search(text) or _RATIO.search(text):
            return boxed(found[found.re.groups])
        text = _MIXED.sub(r"$\1\\frac{\2}{\3}$", text)
        text = _PAIR.sub(lambda found: "$" + re.sub("[{}]", r"\\\g<0>", found[1]) + "$", text)
        text = _RUN.sub(_as_list, _SAME.sub(r"\2, \3", text))
        return _FORMULAS.sub(" or ", text)
    last_start, last_end, content = boxes.pop()
    if last_end is None:
        return None
    contents = [content]
    while boxes and (end := boxes[-1][1]) is not None and _JOINS.fullmatch(text[end:last_start]):
        last_start, _, content = boxes.pop()
        if content not in contents:
            contents.insert(0, content)
    return boxed(",".join(contents))


def _as_list(found: re.Match[str]) -> str:
    if found[1] is None and not re.search(_ALTERNATIVE, found[0]):
        return found[0]
    return ", ".join(f"${number}$" for number in re.findall(_ATOM, found[0])) + (found[1] or "")


def boxed(expression: str) -> str:
    """Return the expression in a box, where math-verify reads all of it as one."""
    if _BOXED_LIST.fullmatch(expression):
        expression = ",".join(re.findall(_ATOM, expression))
    if _DATE.fullmatch(expression):
        return f"\\boxed{{\\text{{{expression}}}}}"
    if _RELATION.match(expression):  # math-verify would read \neq 5 as 5
        expression = "x" + re.sub(r"\\not\s*=", r"\\neq ", expression)
    expression = _MIXED.sub(r"\1\\frac{\2}{\3}", _ELEMENT.sub("", expression))
    quantity = _QUANTITY.fullmatch(expression)
    if quantity and not _NO_UNITS.search(quantity[2]):
        expression = f"{quantity[1]}\\text{{ {quantity[2]}}}" if quantity[2] in _MEASURES else quantity[1]
    expression = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", expression.replace(r"\varnothing", r"\emptyset"))
    return f"\\boxed{{{expression}}}"


def reference_expression(text: str) -> str:
    """Return a reference answer in the form that math-verify reads: bare LaTeX needs delimiters."""
    if _BOX.search(text := plain(text)):
        return final_expression(text) or text
    inner = text.strip()
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(inner) > len(start) + len(end) and inner.startswith(start) and inner.endswith(end):
            inner = inner[len(start) : -len(end)]
            break
    currency = re.sub(r"\\\$", "", inner)
    is_prose = currency.count("$") > 1 or r"\(" in inner or r"\[" in inner
    return text if is_prose else boxed(inner)


def _boxes(text: str) -> list[tuple[int, int | None, str]]:
    """Return the start, the end and the content of each outermost box; the end is ``None`` if it has none."""
    found: list[tuple[int, int | None, str]] = []
    closings = _closings(text)
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue
        if text[match.end() : match.end() + 1] == "{":
            close = closings.get(match.end())
            found.append((match.start(), None if close is None else close + 1, text[match.end() + 1 : close]))
        else:
            token = _TOKEN.match(text, match.end())
            found.append((match.start(), token and token.end(), token[0] if token else ""))
        end = found[-1][1] or match.end()
    return found


def _closings(text: str) -> dict[int, int]:
    """Return the place of each closing brace by the place of its opening brace; escaped braces are part of the
    content."""
    found, open_braces = {}, []
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif brace[0] == "}" and open_braces:
            found[open_braces.pop()] = brace.start()
    return found
