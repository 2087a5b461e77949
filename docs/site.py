"""The part of the documentation site that is not in docs/: `make docs` runs it as a hook of mkdocs (mkdocs.yml).

It adds the repository's own pages (README as the start page, CONTRIBUTING, CHANGELOG, SECURITY), the programs of
examples/, the lists of all settings and metrics, and an API reference from the docstrings: one page per package of pvg.
Links are adapted to their new places.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # pvg is not installed in this environment: these modules need neither torch nor a build

from pvg.config import describe  # noqa: E402
from pvg.telemetry import catalogue  # noqa: E402

# Page of the site -> file of the repository.
OWN = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
# Other files of the repository that guides link to. The site has a copy of each in files/.
ATTACHED = ("CITATION.cff",)
# Folders of code that other processes run: it is not part of the importable package.
ELSEWHERE = {"server_side", "inside"}
API = """# Python API

For people who use pvg as a library. [The notebook](../examples/pvg_in_a_notebook.md) shows all of it.

::: pvg.api

::: pvg.verifier.scorer.VerifierScorer
"""
MODULES = """# Modules

For people who change pvg: the docstrings of all modules, one page per package.

"""


def on_files(files: Files, config: Any) -> Files:
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in OWN.items()}
    pages |= {f"examples/{path.stem}.md": _program(path) for path in sorted((ROOT / "examples").glob("*.py"))}
    pages |= {f"examples/{path.stem}.md": _notebook(path) for path in sorted((ROOT / "examples").glob("*.ipynb"))}
    names = sorted(path.parent.name for path in (ROOT / "pvg").glob("*/__init__.py"))
    packages = {name: _package(name) for name in names}
    pages |= {f"reference/{name}.md": text for name, text in packages.items()}
    pages["settings.md"] = describe.page()
    pages["metrics.md"] = catalogue.page()
    pages["reference/api.md"] = API
    pages["reference/modules.md"] = MODULES + "\n".join(f"- [pvg.{name}]({name}.md)" for name in packages)
    for page, text in pages.items():
        files.append(File.generated(config, page, content=_linked(page, text)))
    for source in ATTACHED:
        files.append(File.generated(config, _attached(source), content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri in OWN else _linked(page.file.src_uri, markdown)


def _linked(page: str, text: str) -> str:
    """Links to files that are elsewhere in the repository, as links to their pages."""
    if page in OWN:  # these are a folder above docs/
        text = text.replace("](docs/", "](")
    for source in ATTACHED:
        text = text.replace(f"](../{source})", f"]({_attached(source)})")
    text = re.sub(r"\]\((?:\.\./)?examples/(\w+)\.(?:py|ipynb)\)", r"](examples/\1.md)", text)
    return re.sub(r"\]\(\.\./(CONTRIBUTING|CHANGELOG|SECURITY)\.md", r"](\1.md", text)


def _attached(source: str) -> str:
    return f"files/{Path(source).name}"


def _program(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    return f"# {path.name}\n\n`examples/{path.name}`\n\n```python\n{source}```\n"


def _notebook(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if is_code else text for text, is_code in texts) + "\n"


def _package(name: str) -> str:
    modules = [path for path in sorted((ROOT / "pvg" / name).rglob("*.py")) if not ELSEWHERE & set(path.parts)]
    described = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules if _has_docstring(path)]
    blocks = (f"::: {module.removesuffix('.__init__')}" for module in described)
    return f"# pvg.{name}\n\n" + "\n\n".join(blocks) + "\n"


def _has_docstring(path: Path) -> bool:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is not None
