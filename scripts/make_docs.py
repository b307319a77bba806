"""Writes docs/config.md and docs/config.schema.json from the config's own models."""

import json
import sys
from pathlib import Path

from danlu.config.describe import reference, schema

DOCS = Path(__file__).parent.parent / "docs"


def main() -> int:
    """Writes both files; says which of them changed."""
    wanted = {
        DOCS / "config.md": reference(),
        DOCS / "config.schema.json": json.dumps(schema(), indent=1) + "\n",
    }
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
