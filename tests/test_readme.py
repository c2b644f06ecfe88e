"""The examples in README.md run, in order, and what they claim with `assert` holds."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
FENCED = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """The python blocks, each behind as many empty lines as stand before it in the file.

    So a traceback gives the README's line.
    """
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in FENCED.finditer(text)]


def test_every_python_block_is_found():
    other = "```\nno\n```\n```bash\nno\n```\n"
    text = "a\n```python\nx = 1\n\ny = 2\n```\n" + other + "```python\nz = 3\n```\n"
    assert blocks(text) == ["\n\nx = 1\n\ny = 2\n", "\n" * 13 + "z = 3\n"]


def test_readme_blocks_run(tmp_path, monkeypatch):
    found = blocks(README.read_text(encoding="utf-8"))
    assert found, "README.md has no python block"
    monkeypatch.chdir(tmp_path)  # what an example writes is not left behind
    monkeypatch.delenv("POLYSCAN_BACKEND", raising=False)
    namespace = {"__name__": "readme"}  # one, so that a block may build on those before it
    for block in found:
        exec(compile(block, str(README), "exec"), namespace)


def test_a_block_that_fails_is_seen_with_its_line():
    (block,) = blocks("one\n```python\n\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        exec(compile(block, "README.md", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 4
