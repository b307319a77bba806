from pathlib import Path

from danlu.config.describe import reference

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_up_to_date():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference(), "run `make docs`"
