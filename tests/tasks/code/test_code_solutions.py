"""What is taken for code, what for a certificate, and what a verifier may read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.tasks.code_problems import Certificate, extract_code, read_certificate, shown

pytestmark = pytest.mark.slow


LONG_SUM = "def f(x):\n    return x" + " + 1" * 2000  # deeper than Python may call


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("Words.\n```python\ndef f(): pass\n```\nMore words.", "def f(): pass"),
        ("```\nfirst\n```\nBetter:\n```py\nsecond\n```", "second"),
        ("```python\nwithout an end", "without an end"),
        ("~~~python\n```\ninside\n~~~", "```\ninside"),
        ("```bash\npip install it\n```", ""),
        ("```python\n\n```", ""),
        # A fence in a list is indented, and so is the code in it.
        ("  ```python\n  x = 1\n  ```", "x = 1"),
        ("1. So:\n   ```python\n   def f():\n       pass\n\n   f()\n   ```", "def f():\n    pass\n\nf()"),
        ("   ```python\ndef f():\n    pass\n   ```", "def f():\n    pass"),
        ("  ```python\n\n      x = 1\n      y = 2", "\n    x = 1\n    y = 2"),
        ("\t~~~\n\tif x:\n\t\tpass", "if x:\n\tpass"),
        ("", ""),
        ("```python\ngood\n```\nCERTIFICATE: [1]\n```python\nhidden\n```", "good"),
        ("```python\ncut off\n# certificate: [1]\nnever seen\n```", "cut off"),
        # An example of its use is not the program, and a fence in a docstring does not end it.
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nprint(f())\n```", "def f(): pass"),
        ("```\ndef f(): pass\n```\n```\n>>> f()\n```\n```\ndef g(): f()\n```", "def f(): pass"),
        ("```\ndef f(): 1\n```\nBetter:\n```\nf = lambda: 2\n```\nSo:\n```\nf()\n```", "f = lambda: 2"),
        # Neither is a stub, unless there is nothing else.
        ("```\ndef f(): 1\n```\nFill in:\n```\ndef f():\n    'So.'\n    pass\n```", "def f(): 1"),
        ("```\nclass S:\n  def f(self): 1\n```\n```\nclass S:\n  def f(self): ...\n```", "class S:\n  def f(self): 1"),
        ("```\ndef f(): 1\n```\n```\ndef f(n):  # yours\n    raise NotImplementedError('f')\n```", "def f(): 1"),
        ("```\ndef f(): 1\n```\n```\ndef f(): ...\ndef f(): 2\n```", "def f(): ...\ndef f(): 2"),
        ("```\ndef f(): ...\n```\nOr:\n```\ndef f(n): pass\n```", "def f(n): pass"),
        (
            '```python\ndef f():\n    """So:\n    ```\n    f()\n    ```\n    """\n    return 1\n```\nEnd.',
            'def f():\n    """So:\n    ```\n    f()\n    ```\n    """\n    return 1',
        ),
        ('```\nx = """\n```\nWords.\n```\ny = 2\n```', "y = 2"),
        (f"```\n{LONG_SUM}\n```\n```\n{LONG_SUM}\n```", LONG_SUM),
    ],
)
def test_code(completion: str, code: str) -> None:
    assert extract_code(completion, "f") == code


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("no such line", None),
        ("a certificate: [1]", Certificate(complaint="its certificate is not on a separate line")),
        ("Certificate\n[1]", Certificate(complaint="its certificate is not on a separate line")),
        ("x\nCERTIFICATE: [[1, 2], 3]", Certificate([[1, 2], 3])),
        ("x\n**Certificate:** [1]", Certificate([1])),
        ("x\n# certificate : `[1]`", Certificate([1])),
        ('CERTIFICATE: "3\\n1 2 3"', Certificate("3\n1 2 3")),
        ("CERTIFICATE: [1]\nCERTIFICATE: [2]", Certificate([1])),
        ("CERTIFICATE:\n[1]", Certificate(complaint="its certificate names nothing")),
        ("CERTIFICATE: (1,)", Certificate(complaint="its certificate is not JSON")),
        ("CERTIFICATE: [NaN]", Certificate(complaint="its certificate is not JSON")),
        ("CERTIFICATE: " + "[" * 3000, Certificate(complaint="its certificate is not JSON")),
        ("CERTIFICATE: [" + "1," * 3000 + "1]", Certificate(complaint="its certificate is far too long")),
        ("CERTIFICATE: " + "1" * 3999 + "0" * 5000, Certificate(complaint="its certificate is far too long")),
    ],
)
def test_certificates(completion: str, expected: Certificate | None) -> None:
    assert read_certificate(completion) == expected


PIECES = st.lists(st.sampled_from(["```python\n", "def f(): pass\n", "words\n", "```\n", "\n", "  "]), max_size=8).map(
    "".join
)
CERTIFICATES = st.sampled_from(
    ["CERTIFICATE: [1]", "certificate:", "> **Certificate:** x", "# CERTIFICATE: [1]\nand more", "\tCertificate :[2]\n"]
)


@given(PIECES, CERTIFICATES, CERTIFICATES)
def test_what_is_shown_tells_nothing_of_a_certificate(solution: str, one: str, other: str) -> None:
    """Whether there is one, which, and how much follows it: a verifier reads the same."""
    assert shown(f"{solution}\n{one}") == shown(f"{solution}\n{other}\n{one}") == shown(solution)
    assert extract_code(f"{solution}\n{one}") == extract_code(solution)


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["CERTIFICATE", "certi", "ficate", ": ", "\n", "* "]), max_size=9).map("".join)
)
def test_any_text_is_read(text: str) -> None:
    assert "certificate" not in shown(text).lower()
    assert shown(shown(text)) == shown(text)
    read_certificate(text)
    extract_code(text)
