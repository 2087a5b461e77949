"""HTML pages: the templates of this package, and one file out of a title, a header and sections.

    write_page(path, page("first: pvg report", header, sections))

All markup is in templates/*.html.j2. Jinja escapes every value except `Markup`, and templates alone make `Markup`. So
text of models, of configurations and of files stays text wherever a template puts it.

Invariant: a page loads nothing. Its content security policy forbids loading, and allows the page's own script by its
hash. A script that a model wrote could not run even if it came through the escaping.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import pvg
from pvg.errors import MissingRequirementError
from pvg.store.atomic import write_output

# Control characters that HTML does not allow, and marks that change the direction of the following text.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LegendKey:
    """An entry of a legend: `style` is its colour's class, `dash` "", "dashed" or "dotted", `shape` "line" or "box"."""

    label: str
    style: str
    dash: str = ""
    shape: str = "line"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of the page under a heading, with `lead` as the sentence below it. The page leaves out a section whose
    body is empty."""

    anchor: str
    title: str
    body: Sequence[object]
    lead: str = ""


def showable(value: object) -> object:
    """What a template writes for a value: nothing for None, U+FFFD for each character that a page cannot hold."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else UNSHOWABLE.sub("\ufffd", str(value))


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    written = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if written in ("-0", "") else written


def attributes(values: Mapping[str, object]) -> Markup:
    """` name="value"` for each value but None: `class_` is written as `class`, `data_name` as `data-name`."""
    written = Markup()
    for name, value in values.items():
        if value is not None:
            shown = number(value) if isinstance(value, (int, float)) else showable(value)
            written += Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), escape(shown))
    return written


TEMPLATES = Environment(
    loader=PackageLoader("pvg.reporting"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=showable,
)
TEMPLATES.filters |= {"number": number, "attributes": attributes}


class TemplateMacros:
    """The macros of a template as functions that return Markup: `elements.badge("ok", "good")`."""

    def __init__(self, template: str) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Callable[..., Markup]:
        return getattr(TEMPLATES.get_template(self._template).module, name)  # type: ignore[no-any-return]


elements = TemplateMacros("elements.html.j2")
chart = TemplateMacros("charts.html.j2")


def page(title: str, header: Sequence[object], sections: Sequence[PageSection]) -> str:
    """The whole page as one file."""
    style, script = _shipped("page.css"), _shipped("page.js")
    values: dict[str, Any] = {
        "title": title,
        "header": header,
        "sections": [section for section in sections if any(section.body)],
        "style": Markup(style),
        "script": Markup(script),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "version": pvg.__version__,
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    }
    return TEMPLATES.get_template("page.html.j2").render(values)


def write_page(path: Path, text: str) -> None:
    """Replace `path` by the page, whole or not at all. Raises MissingRequirementError where it cannot be written."""
    remedy = "Write the page elsewhere with --html FILE, or leave it out with --no-html."
    try:
        write_output(path, text.encode())
    except MissingRequirementError as error:  # its own remedy is for a run, which can be resumed
        raise MissingRequirementError(error.message, remedy) from error
    except OSError as error:
        raise MissingRequirementError(f"The page {path} cannot be written: {error.strerror}.", remedy) from error


def _shipped(name: str) -> str:
    return TEMPLATES.loader.get_source(TEMPLATES, name)[0]  # type: ignore[union-attr]
