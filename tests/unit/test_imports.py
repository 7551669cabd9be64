"""What may import what: pyproject.toml says it, import-linter looks."""

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]


def test_imports_go_where_they_may() -> None:
    """A failure prints each import that is in the way."""
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0
