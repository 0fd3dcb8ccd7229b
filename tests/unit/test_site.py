"""The site of the pages builds without a warning, and asks nothing of a network, where its packages are installed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))), reason="`make docs` installs them"
)


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in (tmp_path / "site").glob("*.html")}
    assert {"index.html", "quickstart.html", "api.html", "changelog.html"} <= pages.keys()
    assert 'id="phalanx.shard"' in pages["api.html"]
    loaded = [re.findall(r'(?:src|<link[^>]*href)="(https?://[^"]+)"', page) for page in pages.values()]
    assert [address for addresses in loaded for address in addresses] == []
