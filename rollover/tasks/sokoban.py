"""Sokoban: push every box onto a goal. Puzzles and environment of the packaged experiment ``sokoban``.

A board is drawn with a blank after each cell and without the wall around it: ``@`` is the player, ``$`` a box, ``.`` a
goal, ``*`` a box on a goal, ``+`` the player on a goal, ``#`` a wall and ``-`` a free cell.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollover.environments.episodes.base import Action

Cell = tuple[int, int]
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_SIGNS = {"@": (True, False, False), "+": (True, False, True), "$": (False, True, False), "*": (False, True, True)}
_SIGN_OF = {found: sign for sign, found in _SIGNS.items()} | {(False, False, True): ".", (False, False, False): "-"}


@dataclass(frozen=True, slots=True)
class Board:
    """A position. Cells are (row, column).

    Examples:
        >>> board = Board.read("@ $ . \\n- - - \\n")
        >>> board.moved("right").is_solved, board.moved("up")
        (True, None)
    """

    free: frozenset[Cell]
    """Cells that are no wall."""
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @classmethod
    def read(cls, text: str) -> Board:
        """Read a drawing."""
        signs = {
            (row, column): sign for row, line in enumerate(text.split("\n")) for column, sign in enumerate(line.split())
        }
        return cls(
            free=frozenset(cell for cell, sign in signs.items() if sign != "#"),
            goals=frozenset(cell for cell, sign in signs.items() if sign in ".*+"),
            boxes=frozenset(cell for cell, sign in signs.items() if sign in "$*"),
            player=next(cell for cell, sign in signs.items() if sign in "@+"),
        )

    def draw(self, height: int, width: int) -> str:
        def sign(cell: Cell) -> str:
            return _SIGN_OF[cell == self.player, cell in self.boxes, cell in self.goals] if cell in self.free else "#"

        return "".join("".join(f"{sign((row, column))} " for column in range(width)) + "\n" for row in range(height))

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.goals

    def moved(self, move: str) -> Board | None:
        """Return the position after a move; ``None`` if it is impossible."""
        there, behind = _beside(self.player, move), _beside(self.player, move, 2)
        if there not in self.free or (there in self.boxes and behind not in self.free - self.boxes):
            return None
        boxes = (self.boxes - {there}) | {behind} if there in self.boxes else self.boxes
        return replace(self, boxes=boxes, player=there)

    def before(self) -> Iterator[tuple[str, Board]]:
        """Yield each move that may have led here, with the position before it: the player walked, or pushed a box."""
        for move in MOVES:
            there, ahead = _beside(self.player, move, -1), _beside(self.player, move)
            if there in self.free - self.boxes:
                yield move, replace(self, player=there)
                if ahead in self.boxes:
                    yield move, replace(self, player=there, boxes=(self.boxes - {ahead}) | {self.player})


def _beside(cell: Cell, move: str, distance: int = 1) -> Cell:
    return cell[0] + distance * MOVES[move][0], cell[1] + distance * MOVES[move][1]


def puzzle(
    seed: int, *, width: int = 4, height: int = 4, boxes: int = 1, walls: int = 2, moves: int = 6, detours: float = 0.0
) -> dict[str, Any]:
    """Make a puzzle backwards: from the solved positions, every position that a solution can begin with is visited, the
    nearest first, and a position at most ``moves`` moves away is drawn, each number of moves alike.

    Returns:
        ``prompt``, the board, and ``answer``, a shortest solution with a move on each line; a share ``detours`` of the
        moves is drawn from all those after which the rest can still be done in ``moves`` moves.
    """
    draw = random.Random(seed)
    while True:
        cells = [(row, column) for row in range(height) for column in range(width)]
        draw.shuffle(cells)
        free = frozenset(cells[walls:])
        goals = frozenset(cells[walls : walls + boxes])
        layer: dict[Board, tuple[str, ...]] = {Board(free, goals, goals, player): () for player in sorted(free - goals)}
        known = dict(layer)
        layers: list[dict[Board, tuple[str, ...]]] = []
        while layer and len(layers) < moves:
            found = [(b, (m, *way)) for board, way in layer.items() for m, b in board.before() if b not in known]
            layer = dict(reversed(found))
            known.update(layer)
            layers += [layer] if layer else []
        if layers:
            board = draw.choice(list(draw.choice(layers)))
            prompt, answer = board.draw(height, width), []
            while not board.is_solved:
                possible = {move: after for move in MOVES if (after := board.moved(move)) in known}
                answer.append(draw.choice(list(possible)) if draw.random() < detours else known[board][0])
                board = possible[answer[-1]]
            return {"prompt": prompt, "answer": "\n".join(answer)}


class Sokoban:
    """Answers a move with the next position. The episode ends when the puzzle is solved, with a reward of 1, or at a
    turn that is no possible move."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        lines = row["prompt"].strip().split("\n")
        self._size = len(lines), len(lines[0].split())
        self._board = Board.read(row["prompt"])

    def step(self, action: Action) -> dict[str, Any]:
        move = action.text.strip()
        board = self._board.moved(move) if move in MOVES else None
        if board is None:
            return {"messages": "That is no possible move.", "reward": 0.0, "done": True}
        self._board = board
        answer = {"messages": "\n" + board.draw(*self._size), "reward": float(board.is_solved)}
        return answer | {"done": board.is_solved}

    def demonstrate(self, row: Mapping[str, Any]) -> list[str]:
        """Return the moves of a shortest solution."""
        return str(row["answer"]).split("\n")
