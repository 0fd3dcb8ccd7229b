"""Pages of the site that lie outside docs/: the README as its home, changes, contributing, recipes, and the API."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
           "tests/accelerator/README.md": "simulated-accelerator.md"}  # fmt: skip
# Public names by subject, the order of the page.
SUBJECTS = {
    "Runs": ["train", "Run", "load_recipe", "Config", "plan", "Plan", "export", "generate_text", "import_megatron"],
    "Custom tasks, models and callbacks": [
        "Task", "Batch", "DataSet", "Images", "load_mnist", "Model", "CounterRNG", "Llama", "ModelSpec", "Callback",
        "RunState",
    ],
    "Training loops": [
        "shard", "ShardedModel", "ShardedStep", "start_of", "rebuild_buffers", "BatchSplitter", "init", "transform",
    ],
    "Machines": ["Cluster"],
    "Errors": ["errors"],
}  # fmt: skip
OPTIONS = '{heading_level: 3, filters: ["!^_", "!^is_out_of_memory$", "!^fetch_hint$"]}'
# Names in tables are not broken; a table that is too wide scrolls.
STYLE = ".md-typeset td code { word-break: normal; }\n"
LINK = re.compile(r"\]\(([^)\s#:]*)(#[^)\s]*)?\)")


def move_links(text: str, folder: Path) -> str:
    """Links of a file in a folder of the repository, as links of a page of the site."""

    def moved(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if not path:
            return match[0]
        target = (folder / path).resolve()
        name = target.relative_to(ROOT).as_posix()
        if name in OUTSIDE:
            return f"]({OUTSIDE[name]}{anchor})"
        if target.is_relative_to(ROOT / "docs"):
            return f"]({target.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        return f"]({name}.txt)" if target.is_file() else "](index.md)"

    return LINK.sub(moved, text)


def on_files(files: Files, config: Any) -> Files:
    for name, page in OUTSIDE.items():
        text = move_links((ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent)
        files.append(File.generated(config, page, content=text))
    for path in [*(ROOT / "recipes").glob("*.yaml"), ROOT / "LICENSE"]:
        name = f"{path.relative_to(ROOT).as_posix()}.txt"
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=api_page()))
    files.append(File.generated(config, "extra.css", content=STYLE))
    return files


def api_page() -> str:
    """The page of the public names, from their docstrings."""
    text = "# API\n\nEverything that `import phalanx` offers. Other modules may change with any release.\n"
    for subject, names in SUBJECTS.items():
        text += f"\n## {subject}\n"
        text += "".join(f"\n::: phalanx.{name}\n    options: {OPTIONS}\n" for name in names)
    return text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return move_links(markdown, ROOT / "docs") if (ROOT / "docs" / page.file.src_uri).is_file() else markdown
