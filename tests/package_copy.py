"""A copy of the package to which a test adds what a developer would: one file, and one row of a table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.speed import within

ROOT = Path(__file__).parent.parent


class PackageCopy:
    """A copy of ``rollover/`` and of the generator of the configuration page, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "rollover", folder / "rollover", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "docs").mkdir()
        shutil.copy(ROOT / "docs" / "generate_configuration.py", folder / "docs")

    def add_kind(self, file: str, content: str, *, name: str, last: str) -> None:
        """Write ``file`` and give its class ``name`` a row behind that of ``last`` in the table beside it, with the
        import."""
        path = self.folder / file
        assert not path.exists()
        path.write_text(content)
        table = path.with_name("__init__.py")
        lines = table.read_text().splitlines(keepends=True)
        row = lines.index(f"    | {last}\n")
        lines.insert(row + 1, f"    | {name}\n")
        module = ".".join(Path(file).with_suffix("").parts)
        first_import = next(i for i, line in enumerate(lines) if line.startswith("from rollover."))
        lines.insert(first_import, f"from {module} import {name}\n")
        table.write_text("".join(lines))

    def run(self, code: str, *, writes_page: bool = True) -> str:
        """What ``code`` prints, in an interpreter that finds the copy in place of the package."""
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        if writes_page:
            page = str(self.folder / "docs" / "generate_configuration.py")
            code += f"\nimport runpy\nrunpy.run_path({page!r}, run_name='__main__')\n"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": path},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=within(300),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def configuration_page(self) -> str:
        """The page that the generator wrote behind the code that ran."""
        return (self.folder / "docs" / "configuration.md").read_text()
