"""The README's tables say what the checks say."""

from __future__ import annotations

from plugins.support import README, support_matrix, updated


def test_the_readme_has_todays_tables() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run python -m plugins.support --write"


def test_the_matrix_knows_refusals() -> None:
    """Smaller shared memory takes shorter pages."""
    rows = {tuple(cells[:3]): cells[3:] for line in support_matrix().splitlines()[2:] if (cells := _cells(line))}
    assert rows["sm_90a", "64", "bf16"][0] == "8 to 256"
    assert rows["sm_120", "128", "bf16"][0] != rows["sm_90a", "128", "bf16"][0]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
