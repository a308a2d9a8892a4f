from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from rollover.errors import ConfigError
from rollover.settings.overrides import parse_overrides
from rollover.settings.schema import build
from rollover.settings.shape import ByKind, keys
from rollover.settings.toml import parse
from rollover.types import UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    group_size: int = 4
    temperature: float = 1.0
    strategy: Literal["sync", "april"] = "april"
    name: str | None = None
    stops: tuple[str, ...] = ()
    bounds: Annotated[tuple[float, float] | None, UNBOUNDED] = None

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"source {self.name!r}: weight must be above 0, got {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    steps: int = 8
    fast: bool = False
    rollout: Rollout = field(default_factory=Rollout)
    warmup: Rollout | None = None
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if self.steps % self.rollout.group_size:
            raise ValueError(
                f"steps ({self.steps}) must be a multiple of rollout.group_size ({self.rollout.group_size})"
            )


def made(text: str, *overrides: str) -> Run:
    return build(Run, parse(text, "run.toml"), parse_overrides(overrides))


def complaints(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        made(text, *overrides)
    return str(caught.value).splitlines()


def test_a_document_becomes_the_dataclasses_it_describes() -> None:
    config = made(
        'steps = 6\n[rollout]\ngroup_size = 3\ntemperature = 2\nstops = ["a"]\n'
        '[[sources]]\nname = "s"\nconfig = { a = [1], b = inf }'
    )
    assert config == Run(
        steps=6,
        rollout=Rollout(group_size=3, temperature=2.0, stops=("a",)),
        sources=(Source(name="s", config={"a": [1], "b": float("inf")}),),
    )
    assert made("") == Run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rollout]\n\ngroup_sise = 2", "run.toml:3: rollout.group_sise: unknown key; did you mean 'group_size'?"),
        ("[rolout]", "run.toml:1: rolout: unknown key; did you mean 'rollout'?"),
        ("[rollout]\nsteps = 2", "run.toml:2: rollout.steps: unknown key; did you mean 'steps'?"),
        ("temperature = 1.0", "run.toml:1: temperature: unknown key; did you mean 'rollout.temperature'?"),
        ("steps = '8'", 'run.toml:1: steps: expected a whole number, got the string "8"'),
        ("steps = 8.5", "run.toml:1: steps: expected a whole number, got the number 8.5"),
        ("fast = 1", "run.toml:1: fast: expected true or false, got the whole number 1"),
        ("fast = 'true'", 'run.toml:1: fast: expected true or false, got the string "true"'),
        ("[rollout]\nname = 7", "run.toml:2: rollout.name: expected a string or nothing, got the whole number 7"),
        ("[rollout]\nstops = [\n  'a',\n  1,\n]", "run.toml:2: rollout.stops.1: expected a string, got the whole number 1"),
        ("rollout = 2", "run.toml:1: rollout: expected a table, got the whole number 2"),
        ("sources = 2", "run.toml:1: sources: expected a list, got the whole number 2"),
        ("[rollout]\nstrategy = 'aprl'", "run.toml:2: rollout.strategy: 'aprl' is not allowed; choose 'sync' or 'april'"),
        ("[rollout]\nbounds = [1.0, 2.0, 3.0]", "run.toml:2: rollout.bounds: expected at most 2 values, got the list [1.0, 2.0, 3.0]"),
        ("[[sources]]\nweight = 1", "run.toml:1: sources.0.name: this key is required"),
        ("[warmup]\nsize = 1", "run.toml:2: warmup.size: unknown key; known: bounds, group_size, name, stops, strategy, temperature"),
        ("[rollout]\ngroup_size = 0", "run.toml:2: rollout.group_size must be at least 1, got 0"),
        ("[[sources]]\nname = 's'\nweight = 0", "run.toml:3: sources.0: source 's': weight must be above 0, got 0.0"),
        ("# a\nsteps = 9", "run.toml:2: steps (9) must be a multiple of rollout.group_size (4)"),
        ("[rollout]\ngroup_size = 3", "run.toml:2: steps (8) must be a multiple of rollout.group_size (3)"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_with_place_finding_and_mend(text: str, message: str) -> None:
    assert complaints(text) == [message]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    told = complaints("[rollout]\nstrategy = 'x'\ngroup_sise = 2\n[[sources]]\nweight = 'a'", "--steps", "many")
    assert [line.split(" ")[0] for line in told] == [*(f"run.toml:{line}:" for line in (2, 3, 4, 5)), "command"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--rollout.group_sise", "2"], "command line: --rollout.group_sise: unknown key; did you mean 'group_size'?"),
        (["--rollout.group_size", "0"], "command line: --rollout.group_size must be at least 1, got 0"),
        (["--rollout.group_size=3"], "command line: --steps (8) must be a multiple of rollout.group_size (3)"),
        (["--rollout.group_size.x", "3"], "command line: --rollout.group_size.x: rollout.group_size has no keys of its own"),
        (["--rollout", "3"], "command line: --rollout: expected a table, got the whole number 3"),
        (["--sources.1.weight", "2"], "command line: --sources.1.weight: sources is a list of 0; write an index from 0 to 0 (0 appends) in place of '1'"),
        (["--sources.0.weight", "2"], "command line: --sources.0.name: this key is required"),
        (["--steps"], "command line: --steps needs a value: --steps VALUE"),
        (["--steps", "--fast"], "command line: --steps needs a value: --steps VALUE"),
        (["--rollout..x", "1"], "command line: '--rollout..x' is not a key; overrides are --section.key value"),
        (["steps=1"], "command line: unexpected 'steps=1'; overrides are --section.key value"),
    ],
)  # fmt: skip
def test_a_mistake_of_an_override_is_placed_on_the_command_line(override: list[str], message: str) -> None:
    assert complaints("[rollout]\ngroup_size = 2", *override) == [message]


def test_overrides_lie_over_the_document_and_over_earlier_ones() -> None:
    text = "steps = 4\n[[sources]]\nname = 'a'\n[[sources]]\nname = 'b'"
    config = made(
        text,
        *("--steps", "9", "--steps", "12", "--rollout.group-size=3", "--fast", "true", "--rollout.stops", '["x"]'),
        *("--sources.1.weight", "2", "--sources.2.name", "c", "--sources.0.config.my-depth", "5"),
    )
    assert config == Run(
        steps=12,
        fast=True,
        rollout=Rollout(group_size=3, stops=("x",)),
        sources=(Source(name="a", config={"my-depth": 5}), Source(name="b", weight=2.0), Source(name="c")),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("april", "april"), ("2024", "2024"), ("true", "true"), ('"quoted"', "quoted"), ("a b", "a b"), ("none", None)],
)
def test_an_override_of_a_string_is_taken_as_it_stands(text: str, value: str | None) -> None:
    assert made("", "--rollout.name", text).rollout.name == value


def test_none_unsets_what_can_be_unset() -> None:
    assert made("[warmup]\ngroup_size = 2", "--warmup", "none").warmup is None
    run = made('warmup = "none"\n[rollout]\nname = "none"')
    assert run.warmup is None and run.rollout.name is None


def test_keys_lists_every_key_outside_lists() -> None:
    found = {".".join(key) for key in keys(Run)}
    assert {"steps", "rollout", "rollout.group_size", "warmup.strategy", "sources"} <= found
    assert "sources.name" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rollout]\ntemperature = nan", "run.toml:2: rollout.temperature: this must be a finite number, got the number nan"),
        ("[rollout]\ntemperature = inf", "run.toml:2: rollout.temperature: this must be a finite number, got the number inf"),
        ("[rollout]\ntemperature = 1e999", "run.toml:2: rollout.temperature: this must be a finite number, got the number inf"),
        ("[warmup]\ntemperature = -inf", "run.toml:2: warmup.temperature: this must be a finite number, got the number -inf"),
        ("[rollout]\nbounds = [nan, 1.0]", "run.toml:2: rollout.bounds.0: this must be a finite number, got the number nan"),
        ("[rollout]\nbounds = [-inf, 1.0]", "run.toml:2: rollout.bounds.0: this must be a finite number, got the number -inf"),
        ("[rollout]\ntemperature = 1e300", "run.toml:2: rollout.temperature: this must be 0 or between 1e-30 and 1e30 in size, so that float32 can compute with it, got the number 1e+300"),
        ("[rollout]\ntemperature = 1e-300", "run.toml:2: rollout.temperature: this must be 0 or between 1e-30 and 1e30 in size, so that float32 can compute with it, got the number 1e-300"),
        ("[rollout]\nbounds = [0.0, -1e31]", "run.toml:2: rollout.bounds.1: this must be 0 or between 1e-30 and 1e30 in size, so that float32 can compute with it, got the number -1e+31"),
        ("[[sources]]\nname = 'a'\nweight = inf", "run.toml:3: sources.0.weight: this must be a finite number, got the number inf"),
        (f"steps = {10**30}", f"run.toml:1: steps: whole numbers are limited to 64 bits, got the whole number {10**30}"),
        (f"[[sources]]\nname = 'a'\nconfig = {{ deep = [{-(10**30)}] }}", f"run.toml:3: sources.0.config.deep.0: whole numbers are limited to 64 bits, got the whole number {-(10**30)}"),
        ("[rollout]\nname = '[hidden]'", 'run.toml:2: rollout.name: this is the placeholder of a hidden secret: write the secret itself, got the string "[hidden]"'),
    ],
)  # fmt: skip
def test_numbers_fit_float32_and_64_bits_and_hidden_secrets_are_no_values(text: str, message: str) -> None:
    assert complaints(text) == [message]


def test_a_field_that_says_so_may_be_infinite_and_so_may_what_has_no_type() -> None:
    assert made("[rollout]\nbounds = [0.5, inf]").rollout.bounds == (0.5, float("inf"))
    assert made("[[sources]]\nname = 'a'\nconfig = { x = inf }").sources[0].config == {"x": float("inf")}


def test_text_that_is_none_is_refused() -> None:
    assert complaints("", "--rollout.name", "a\udcffb") == [
        'command line: --rollout.name: this is not text in UTF-8, got the string "a\\udcffb"'
    ]


def test_a_secret_is_not_repeated_by_a_complaint() -> None:
    secret = "s3cret-s3cret"
    found = complaints(
        "", "--sources", f"[{{name = 'a', config = {{x = 1, api_key = '{secret}'}}, weight = '{secret}'}}]"
    )
    assert found == ['command line: --sources.0.weight: expected a number, got the string "[hidden]"']
    assert complaints("", "--steps", f"{{padding = '{'x' * 50}', token = '{secret}'}}") == [
        'command line: --steps: expected a whole number, got the table {"padding": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...'
    ]


@dataclass(frozen=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Square:
    kind: Literal["square"] = "square"
    side: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Drawing:
    shape: Annotated[Circle | Square, ByKind(elsewhere={"cube": "it has a side too many; use 'square'"})] = Circle()
    more: tuple[Annotated[Circle | Square, ByKind()], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Book:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    drawings: tuple[Drawing, ...] = ()


def drawn(text: str, *overrides: str) -> Drawing:
    return build(Drawing, parse(text, "a.toml"), parse_overrides(overrides))


@pytest.mark.parametrize(
    ("text", "overrides", "shape"),
    [
        ("", (), Circle()),
        ("shape = 'square'", (), Square()),
        ("[shape]\nradius = 3.0", (), Circle(radius=3.0)),
        ("shape = 'square'", ("--shape.side", "5.0"), Square(side=5.0)),
        ("[shape]\nradius = 3.0", ("--shape", "square"), Square()),
        ("[shape]\nradius = 3.0", ("--shape", "circle"), Circle(radius=3.0)),
        ("[shape]\nradius = 3.0", ("--shape", "{ kind = 'square', side = 4.0 }"), Square(side=4.0)),
        ("[shape]\nradius = 3.0", ("--shape.side=5.0", "--shape.kind=square"), Square(side=5.0)),
    ],
)
def test_a_string_in_place_of_a_table_is_its_kind(text: str, overrides: tuple[str, ...], shape: object) -> None:
    assert drawn(text, *overrides).shape == shape


def test_a_string_in_place_of_a_table_in_a_list_is_its_kind() -> None:
    assert drawn("more = ['square', { kind = 'circle', radius = 2.0 }]").more == (Square(), Circle(radius=2.0))
    assert drawn("more = ['square']", "--more.0", "circle", "--more.0.radius", "9").more == (Circle(radius=9.0),)


def test_a_table_inside_a_list_takes_nothing_over_from_another_kind() -> None:
    document = parse("[[drawings]]\n[[drawings]]\n[drawings.shape]\nradius = 3.0", "a.toml")
    book = build(Book, document, parse_overrides(["--drawings.1.shape", "square"]))
    assert book == Book(drawings=(Drawing(), Drawing(shape=Square())))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shape = 'squire'", "a.toml:1: shape.kind: 'squire' is not allowed; did you mean 'square'?"),
        ("shape = 'cube'", "a.toml:1: shape.kind: 'cube' is not allowed: it has a side too many; use 'square'"),
        ("[shape]\nside = 1.0", "a.toml:2: shape.side: unknown key of kind 'circle'; it belongs to kind 'square'"),
        ("radius = 1.0", "a.toml:1: radius: unknown key; did you mean 'shape.radius'?"),
    ],
)
def test_a_wrong_kind_and_an_option_out_of_place_are_said_with_their_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        drawn(text)
    assert str(caught.value) == message
