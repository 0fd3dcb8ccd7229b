"""Recipes and examples that come with Phalanx: package data where it is installed, folders of the repository else."""

import ast
import itertools
import re
from pathlib import Path

from phalanx.core.errors import ConfigError

FOLDERS = ("recipes", "examples")


def package_data_root() -> Path:
    """The folder that has recipes/ and examples/ in it: the installed package, or the repository that holds it."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / FOLDERS[0]).is_dir() else package.parent


def list_bundled_files() -> list[str]:
    """What there is, by the paths that the documentation uses: recipes/demo.yaml, examples/own_loop.py."""
    found = [
        path
        for folder in FOLDERS
        for kind in ("yaml", "py")
        for path in (package_data_root() / folder).rglob(f"*.{kind}")
    ]
    return sorted(
        (path.relative_to(package_data_root()).as_posix() for path in found), key=lambda name: (name[0] != "r", name)
    )


def short_name(name: str) -> str:
    """What a recipe or an example is called: demo, own_loop, sagemaker/plain_fsdp."""
    return name.partition("/")[2].rpartition(".")[0]


def describe_bundled_file(name: str) -> str:
    """The first sentence of a recipe's comment or an example's docstring, on one line."""
    text = (package_data_root() / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = "\n".join(line[2:] for line in itertools.takewhile(lambda line: line[:1] == "#", text.splitlines()))
    first = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"\. |\.$", first, maxsplit=1)[0]


def find_bundled_file(name: str) -> str:
    """The path of what is called `name`: demo, demo.yaml or recipes/demo.yaml; of a subfolder of the examples, such as
    sagemaker, its first file. Raises ConfigError."""
    found = [path for path in list_bundled_files() if name in (path, short_name(path), *Path(path).parts[1:])]
    if not found:
        raise ConfigError(f"no recipe or example is called {name}; `phalanx recipes list` shows what there is")
    return found[0]


def copy_bundled_files(name: str, folder: Path) -> list[Path]:
    """Copy a recipe or an example below `folder`, to the same path as in the documentation, with what it needs.

    A recipe brings the example that it names as its code; an example of a subfolder brings those beside it. Returns all
    of these files; one that is there already stays. Raises ConfigError, before anything is written, where a file of
    other content is in the way.
    """
    first = find_bundled_file(name)
    wanted = [
        first,
        *re.findall(r"^ +code: (examples/\S+)", (package_data_root() / first).read_text(encoding="utf-8"), re.M),
    ]
    if first.count("/") > 1:
        wanted = [path for path in list_bundled_files() if path.rpartition("/")[0] == first.rpartition("/")[0]]
    missing = {}
    for path in wanted:
        content, target = (package_data_root() / path).read_bytes(), folder / path
        if not target.exists():
            missing[target] = content
        elif target.read_bytes() != content:
            raise ConfigError(
                f"{target} is there already with other content, and is left as it is; move it away, or name another "
                "folder with --to"
            )
    for target, content in missing.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return [folder / path for path in wanted]
