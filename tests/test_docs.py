"""The documentation is whole, and what is generated of it is what the source says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_what_the_source_says() -> None:
    assert (DOCS / "configuration.md").read_text() == generator("generate_configuration").render(), "run: make docs"


@pytest.mark.parametrize("page", ["cli", "api"])
def test_the_reference_is_what_the_source_says(page: str) -> None:
    written = (DOCS / "reference" / f"{page}.md").read_text()
    assert written == getattr(generator("generate_reference"), f"render_{page}")(), "run: make docs"


def test_every_public_name_is_in_the_reference() -> None:
    import rollover

    page = (DOCS / "reference" / "api.md").read_text()
    assert [name for name in rollover.__all__ if name != "__version__" and f".{name}\n" not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [str(page) for page in sorted(DOCS.rglob("*.md")) if str(page.relative_to(DOCS)) not in navigation] == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "api" / "index.html").exists()
