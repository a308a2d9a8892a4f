"""Writes ``reference/cli.md`` from the commands' own help, ``reference/api.md`` from the public names, and
``reference/what-works.md`` from the newest record of ``benchmarks/what_works.py``.

``make docs`` runs it; a test fails while a page is stale.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

import rollover
from rollover.cli import cli

FOLDER = Path(__file__).parent / "reference"
GROUPS = {
    "run": "Runs",
    "rollout": "Scheduling",
    "engine": "Engines",
    "trainer": "Training",
    "algorithms": "Algorithms",
    "types": "Records",
    "errors": "Errors",
}
"""The heading under which the page lists the public names of each package."""
INTRODUCTION = """\
These names make up the public interface: import them from `rollover` itself, as in `from rollover import Scheduler`.
They are imported on first use, so `import rollover` is instant and needs no PyTorch. Everything else may change between
versions."""
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
WIDTH = 100
"""Characters per line of help."""


def render_cli() -> str:
    """Return the page of the command line: the output of ``--help`` for each command."""
    sections = "\n\n".join(
        f"## `{name}`\n\n```text\n{text.strip()}\n```" for name, text in _helps("rollover", cli, None)
    )
    return f"# Command line\n\n<!-- Written by docs/generate_reference.py. -->\n\n{sections}\n"


def _helps(name: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Yield the full name and the help of ``command`` and of each command below it."""
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent, name, color=False, **settings)
    yield context.command_path, click.unstyle(command.get_help(context))
    if isinstance(command, click.Group):
        for part, inner in command.commands.items():
            yield from _helps(part, inner, context)


def render_api() -> str:
    """Return the page of the public names, which mkdocstrings fills with their docstrings."""
    lines = ["# Python", "", "<!-- Written by docs/generate_reference.py. -->", "", INTRODUCTION]
    for room, heading in GROUPS.items():
        lines += ["", f"## {heading}"]
        for name, module in rollover.PUBLIC_MODULES.items():
            if module.split(".")[0] == room:
                lines += ["", f"::: rollover.{module}.{name}"]
    return "\n".join(lines) + "\n"


def record() -> dict[str, Any]:
    """Return the newest record of what works."""
    read: dict[str, Any] = json.loads(max(RESULTS.glob("what-works-*.json")).read_text(encoding="utf-8"))
    return read


def render_works() -> str:
    """Return the page of what was tried, with its result."""
    found = record()
    models, templates, rows, answers, rewards = (
        found[part] for part in ("models", "templates", "rows", "answers", "rewards")
    )
    contents = [name for name in templates[0] if name != "template"]
    trained = sum(not model["result"].startswith("refused") for model in models)
    read = sum(row["refused"] is None for row in rows)
    right = sum(answer["is right"] == answer["judged right"] for answer in answers)
    by_topic = Counter(answer["topic"] for answer in answers if answer["topic"])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    heads = ["several devices", "adapters", "embedded engine"]
    sections = [
        "# What works",
        "<!-- Written by docs/generate_reference.py. -->",
        f"`{found['command']}` tries each of these with {versions}. A model, a template or a row that is not exact is"
        " refused, with the reason.",
        f"## Models: {trained} of {len(models)} are trained",
        "A small random model of each family computes the log-probs of samples that share a row, and of each sample"
        " alone with the attention of transformers. *packed*: these agree within 0.001 nats. *padded*: they agree"
        " with one sample per line. The other columns say whether several devices share the model, whether it is"
        " trained with adapters, and whether the embedded engine runs it; servers run what they support.",
        _table(
            ["model", "result", *heads],
            ([f"`{one['model']}`", one["result"], *map(_mark, (one[head] for head in heads))] for one in models),
        ),
        f"## Chat templates: {len(templates)}",
        "Each template of a real model writes each of these prompts. ✓: its ids are those of transformers with all"
        " markers of the text escaped, or, if the template reads the date, its text is whole. —: refused, since the"
        " template has no place for it, drops it or rewrites it. *Another turn* is a question that contains"
        " `<|im_end|>` and a new turn; *tools* offers a function.",
        _table(
            ["template", *contents],
            ([f"`{one['template']}`", *map(_mark, (one[name] for name in contents))] for one in templates),
        ),
        f"## Rows: {read} of {len(rows)} are read",
        "The columns of public data sets and other frameworks, and what is wrong with rows.",
        _table(
            ["row", "columns", "result"],
            ([one["row"], ", ".join(f"`{name}`" for name in one["columns"]), one["refused"] or "read"] for one in rows),
        ),
        f"## Answers: {right} of {len(answers)} are judged as they are",
        "Responses of known truth, judged by `math_verify` (`tests/environments/answers.txt`).",
        _table(["kind of answer", "responses"], ([topic, str(count)] for topic, count in by_topic.items())),
        f"## Rewards: {len(rewards)}",
        "What a function may return, and what its sample gets.",
        _table(["returned", "result"], ([one["returned"], _outcome(one)] for one in rewards)),
    ]
    return "\n\n".join(sections) + "\n"


def _outcome(reward: dict[str, Any]) -> str:
    if "reward" in reward:
        parts = ", ".join(f"{name} {value:g}" for name, value in reward["components"].items())
        return f"reward {reward['reward']:g}" + (f" ({parts})" if parts else "")
    kind = "sample fails" if "sample fails" in reward else "stops the run"
    return f"{kind}: {reward[kind]}"


def _mark(is_so: bool) -> str:
    return "✓" if is_so else "—"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cli.md").write_text(render_cli(), encoding="utf-8")
    (FOLDER / "api.md").write_text(render_api(), encoding="utf-8")
    (FOLDER / "what-works.md").write_text(render_works(), encoding="utf-8")


if __name__ == "__main__":
    main()
