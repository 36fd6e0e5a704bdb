"""Documents: every link to a file leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("*.md")]


def test_docs_links_lead_to_files() -> None:
    broken = []
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", document.read_text()):
            if "://" in link or not link:
                continue
            if "/bakehouse/" in link and (ROOT / "bakehouse" / "ports").exists():
                continue  # named as they will be called
            if not (document.parent / link).exists():
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []
