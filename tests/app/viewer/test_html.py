"""The viewer's page as a file: complete, self-contained, small; `outrider trace` in a fresh folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.viewer import html
from outrider.core.errors import OutriderError

RECORDINGS = {name: json.loads(path.read_bytes()) for name, path in html.recordings().items()}


@pytest.fixture(scope="module")
def page() -> str:
    return html.page()


def outrider(*arguments: Any) -> str:
    result = CliRunner().invoke(cli, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_page_is_one_small_file_that_loads_nothing(page: str) -> None:
    assert len(page.encode()) < html.LARGEST
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", page.partition("<script>")[0])
    assert "{policy}" not in page and "default-src 'none'" in page
    markup = page.partition("<script type")[0]
    assert " on" not in "".join(re.findall(r"<\w+[^>]*", markup))  # no inline handlers
    assert not re.search(r'\bstyle="', markup)


def test_scripts_write_texts_and_never_markup() -> None:
    for name in (*html.SCRIPTS, html.LIVE):
        source = html.text(name)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source), (
            name
        )


def test_data_cannot_end_its_block() -> None:
    evil = json.dumps({"prompt": "</script><script>window.hit = 1</script><!--"})
    page = html.page(evil, '"><script>window.hit = 1</script>')
    assert page.count("window.hit") == 2 and "<script>window.hit" not in page
    block = re.search(r'id="opened" data-name="[^"]*">(.*?)</script>', page)
    assert block is not None and json.loads(block[1]) == json.loads(evil)


def test_ten_chapters_show_steps_that_exist() -> None:
    chapters = html.chapters()
    assert len(chapters) == 10
    for chapter in chapters:
        paragraphs = chapter["paragraphs"]
        assert isinstance(paragraphs, list) and len(paragraphs) == 3
        for one in paragraphs:
            recording = RECORDINGS[one["recording"]]
            run = recording["plain"] if one.get("run") == "plain" else recording
            assert 1 <= one["step"] <= len(run["trace"]["steps"]), one["text"]
            assert one.get("view", "guesses") in ("read", "who", "guesses") and len(one["text"]) < 420


def test_view_writes_a_page_for_a_bare_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bare = {**RECORDINGS["text-copying-prompt-lookup"]["trace"]}
    bare["options"] = {**bare["options"], "model": "../../nowhere"}  # a file's model is not fetched
    (tmp_path / "t.json").write_text(json.dumps(bare))
    assert "trace.html" in outrider("trace", "view", "t.json")
    assert 'id="opened" data-name="t.json"' in (tmp_path / "trace.html").read_text()
    outrider("trace", "view", "-o", "other.html")
    assert 'id="opened"' not in (tmp_path / "other.html").read_text()


def test_convert_writes_each_format(tmp_path: Path) -> None:
    file = html.recordings()["text-a-small-model-drafts"]
    trace = RECORDINGS["text-a-small-model-drafts"]["trace"]
    record = json.loads(outrider("trace", "convert", file, "--to", "aiperf"))
    assert record["num_spec_steps"] == sum(bool(step["drafted"]) for step in trace["steps"])
    assert json.loads(outrider("trace", "convert", file, "--to", "trace"))["steps"][3]["emitted"] == [1962]
    assert json.loads(outrider("trace", "convert", file, "--to", "summary"))["tokens"] == 48
    outrider("trace", "convert", file, "-o", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["recording"] == 1
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(OutriderError, match="none of these"):
        outrider("trace", "view", tmp_path / "bad.json")
    with pytest.raises(OutriderError, match="can't be read"):
        outrider("trace", "convert", tmp_path / "none.json")
    assert CliRunner().invoke(cli, ["trace", "convert", str(file), "--to", "csv"]).exit_code == 2
