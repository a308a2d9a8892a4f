"""Sokoban: puzzles that can be solved, in no fewer moves than their solution has, and the episodes that solve them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.episodes import ClassConfig
from rollover.environments.rewards.episode import EnvironmentRewardConfig
from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import train_source
from rollover.tasks.sokoban import MOVES, Board, puzzle
from rollover.tasks.sources import GeneratedConfig
from tests.environments.test_episodes import stepped_in
from tests.environments.words import char_tokenizer

SIZES: list[Mapping[str, int]] = [{}, {"width": 3, "height": 3, "walls": 0}, {"boxes": 2, "walls": 1, "moves": 4}]


@pytest.mark.parametrize("size", SIZES)
def test_a_puzzle_has_no_shorter_solution_than_its_answer(size: Mapping[str, int]) -> None:
    """An oracle that searches forwards finds the same number of moves."""
    lengths = set()
    for seed in range(40):
        made = puzzle(seed, **size)
        board, moves = Board.read(made["prompt"]), made["answer"].split("\n")
        assert board.draw(size.get("height", 4), size.get("width", 4)) == made["prompt"]
        reached, seen = {board}, {board}
        for _ in moves:
            assert not any(one.is_solved for one in reached)
            reached = {after for one in reached for move in MOVES if (after := one.moved(move))} - seen
            seen |= reached
        assert any(one.is_solved for one in reached)
        for move in moves:
            after = board.moved(move)
            assert after is not None
            board = after
        assert board.is_solved
        lengths.add(len(moves))
    assert lengths == set(range(1, size.get("moves", 6) + 1)), "puzzles of every length"


def test_an_episode_ends_solved_or_at_an_impossible_move() -> None:
    row = {"prompt": "@ $ . \n- - - \n"}
    config = ClassConfig(factory="rollover.tasks.sokoban:Sokoban")
    down, up, solved = stepped_in(config, row, "down", " up\n", "right")
    assert (down["text"], down["reward"], down["done"]) == ("\n- $ . \n@ - - \n", 0.0, False)
    assert up["text"] == f"\n{row['prompt']}"
    assert (solved["text"], solved["reward"], solved["done"]) == ("\n- @ * \n- - - \n", 1.0, True)
    for wrong in ("up", "left", "jump", ""):
        (end,) = stepped_in(config, row, wrong)
        assert (end["reward"], end["done"]) == (0.0, True)


pytestmark = pytest.mark.usefixtures("harmless_modules")


def boxes(**fields: Any) -> GeneratedConfig:
    environment = ClassConfig(factory="rollover.tasks.sokoban:Sokoban")
    function = fields.pop("function", "rollover.tasks.sokoban:puzzle")
    reward = EnvironmentRewardConfig()
    return GeneratedConfig(name="boxes", function=function, reward=reward, environment=environment, **fields)


def test_a_generated_row_depends_on_its_seed_alone() -> None:
    made, again, other = (
        train_source(TasksConfig(train=(boxes(params={"width": 3}),)), char_tokenizer(), seed=seed)
        for seed in (1, 1, 2)
    )
    backwards = [again.prompt(i) for i in reversed(range(5))][::-1]
    assert [made.prompt(i) for i in range(5)] == backwards
    assert made.prompt(3).text != other.prompt(3).text
    prompt = made.prompt(3)
    assert prompt.prompt_id == "boxes/3@0" and prompt.text == prompt.columns["prompt"]
    assert made.solution(prompt) == prompt.columns["answer"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def row(seed): return 1 / 0", r"rows:row, seed \d+: ZeroDivisionError: division by zero; correct"),
        ("def row(seed): return seed", r"a row is a table, got int"),
        ("def row(seed): return {'prompt': {1}}", r"not JSON serializable"),
        ("def row(seed): return {'text': 'a'}", r"column 'prompt' is missing"),
        ("def line(seed): pass", r"no function 'row'"),
    ],
)
def test_who_makes_no_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    (tmp_path / "rows.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "rows", raising=False)
    with pytest.raises(DataError, match=message):
        train_source(TasksConfig(train=(boxes(function="rows:row"),)), char_tokenizer(), seed=0).prompt(0)
