"""Writes ``configuration.md`` from the config dataclasses: their fields, defaults and docstrings.

Run ``python docs/generate_configuration.py`` after any change to a config; a test fails while the page is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rollover.algorithms import ALGORITHMS, Algorithm, AlgorithmConfig
from rollover.run.config import RunConfig
from rollover.settings import toml
from rollover.settings.changes import FIXED, OnResume, said_by
from rollover.settings.plain import plain
from rollover.swarm.worker.config import WorkerConfig

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_configuration.py from the source: edit the docstrings there. -->

One TOML file describes one run. Keys that are not listed here are refused, and so are values of the wrong type;
every mistake is reported with its file and line. A file that begins with `extends = "quickstart"` contains only the
differences from that packaged experiment, or from another file (its path is relative to this file).
`rollover train --dry-run CONFIG` prints the complete file with all defaults filled in, and that output is itself a
valid config, except for the values of secrets. Numbers are finite unless stated otherwise.

Secrets are hidden in everything that is printed, drawn or sent away: the values of `launch_env`, the values of keys and
flags with names like token, key, password or cookie, and the logins and queries of URLs. `config.json` in the run
directory contains them, because a resumed run needs them; only its owner can read it. A server that the run starts and
that prints its own arguments or environment writes them into its log there, which likewise only its owner can read.

You can set any key on the command line, after the command and in any order:

```
rollover train run.toml --steps 200 --rollout.group_size 16 --tasks.train.0.weight=2
```

Values are written as in TOML; quotes around strings are optional; `none` unsets a key that can be unset.
Elements of lists of tables are counted from 0. Paths are relative to the directory where the command is run.

A setting may be changed when a run is resumed (`rollover train --resume RUN --trainer.micro_batch_tokens 4096`) if
this page says so: what the run learns does not depend on it. Any other change is refused, with the reason.
"""


def render() -> str:
    """Return the whole page."""
    sections = [*_sections(RunConfig, "", {}, FIXED), [*_worker()]]
    pages = "\n".join(line for section in sections for line in section)
    return f"{INTRODUCTION}\n{pages.strip()}\n"


def _sections(cls: type, path: str, described: dict[type, str], around: OnResume) -> Iterator[list[str]]:
    """Yield the section of ``cls``, then those of the tables within it; each class is described once. ``around`` says
    whether the table may change on resume, for keys that do not say so themselves."""
    described[cls] = path
    hints, documents = get_type_hints(cls), _field_docstrings(cls)
    on_resume = {name: said_by(hint) or around for name, hint in get_type_hints(cls, include_extras=True).items()}
    tables: list[tuple[str, type, OnResume]] = []
    lines = [f"## {_heading(cls, path)}", "", _prose(re.split(r"Examples?:", inspect.getdoc(cls) or "")[0]), ""]
    for field in dataclasses.fields(cls):
        classes, is_list = _tables(hints[field.name])
        if not classes:
            note = on_resume[field.name].note
            about = "; ".join([_type(hints[field.name]), _default(field), *([note] if note else [])])
            lines.append(f"- **`{field.name}`** ({about}). {_prose(documents.get(field.name, ''))}".rstrip())
            continue
        name = f"{path.strip('[]')}.{field.name}".strip(".")
        name = f"[[{name}]]" if is_list else f"[{name}]"
        note = _prose(documents.get(field.name, ""))
        known = [described[table] for table in classes if table in described]
        as_before = f" Keys as in `{known[0]}`." if known else ""
        if path or note or as_before:
            lines.append(f"- **`{name}`** ({'tables' if is_list else 'table'}). {note}{as_before}".rstrip())
        tables += [(name, table, on_resume[field.name]) for table in classes if table not in described]
        described.update((table, name) for table in classes if table not in described)
    if cls is AlgorithmConfig:
        lines += ["", *_algorithms()]
    yield [*lines, ""]
    for name, table, said in tables:
        yield from _sections(table, name, described, said)


def _worker() -> Iterator[str]:
    """Yield what ``rollover worker`` takes."""
    hints, documents = get_type_hints(WorkerConfig), _field_docstrings(WorkerConfig)
    yield from ("## Flags of `rollover worker`", "", "`--engine.KEY`, with the keys of `[engine]`, and:", "")
    for field in dataclasses.fields(WorkerConfig):
        if field.name in documents:
            about = f"{_type(hints[field.name])}; {_default(field)}"
            yield f"- **`--{field.name}`** ({about}). {_prose(documents[field.name])}"


def _algorithms() -> Iterator[str]:
    """Yield the table of algorithms: each row with the settings that differ from the defaults."""
    plain = {field.name: field.default for field in dataclasses.fields(Algorithm)}
    yield from ("| name | paper | settings |", "|---|---|---|")
    for row in ALGORITHMS.values():
        own = {key: value for key, value in row.settings().items() if key != "name" and value != plain[key]}
        settings = ", ".join(f"`{key} = {toml.literal(value)}`" for key, value in own.items())
        yield f"| `{row.name}` | {row.paper} | {settings} |"


def _heading(cls: type, path: str) -> str:
    """Return the heading of a section; a table of several kinds has a section for each kind."""
    kind = get_type_hints(cls).get("kind")
    of_one_kind = get_origin(kind) is Literal and len(get_args(kind)) == 1
    suffix = f' of kind `"{get_args(kind)[0]}"`' if of_one_kind else ""
    return f"`{path}`{suffix}" if path else "Top-level settings"


def _tables(annotation: Any) -> tuple[list[type], bool]:
    """Return the dataclasses of a key, if it is a table, and whether the key holds a list of them."""
    classes: list[type] = []
    is_list = False
    for option in _options(annotation):
        is_list = get_origin(option) is tuple
        inner = _options(get_args(option)[0]) if is_list else (option,)
        classes += [table for table in inner if isinstance(table, type) and dataclasses.is_dataclass(table)]
    return classes, is_list


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _type(annotation: Any) -> str:
    names = {int: "whole number", float: "number", bool: "true or false", str: "string"}
    options = [o for o in _options(annotation) if o is not types.NoneType]
    described = []
    for option in options:
        arguments = get_args(option)
        if get_origin(option) is Literal:
            described.append(", ".join(f"`{toml.literal(a)}`" for a in arguments))
        elif get_origin(option) is tuple:
            length = "" if arguments[-1] is ... else f"{len(arguments)} "
            described.append(f"list of {length}{_type(arguments[0])}s")
        else:
            described.append(names.get(option, "table"))
    return " or ".join(described)


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        value = field.default_factory()
    elif field.default is MISSING:
        return "required"
    else:
        value = field.default
    return "default unset" if value is None else f"default `{toml.literal(plain(value))}`"


def _field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each field, those of base classes first."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found[name] = docstring
    return found


def _prose(docstring: str) -> str:
    """Return a docstring as one Markdown paragraph."""
    return re.sub(r"\s+", " ", docstring.replace("``", "`")).strip()


if __name__ == "__main__":
    PAGE.write_text(render())
