"""The pages of docs/ and of the root: links, examples, the site's hooks, the workflow."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from sfumato.decisions import read_questions

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def headings(page: Path) -> list[str]:
    """The titles of a Markdown page, code fences left out."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """As the forge makes it: lower case, punctuation dropped, a hyphen for each space."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors(page: Path) -> None:
    """Also that no anchor has two hyphens in a row, which the site's builder would make one."""
    titles = [anchor(heading) for heading in headings(page)]
    assert len(set(titles)) == len(titles), "two headings have the same anchor"
    broken = [title for title in titles if "--" in title]
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        exists = target.is_relative_to(ROOT) and target.exists()
        if not exists or (fragment and fragment not in map(anchor, headings(target))):
            broken.append(link)
    assert broken == []


def test_the_answers_name_what_exists() -> None:
    text = (ROOT / "docs" / "life-of-a-request.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| [A-Z].*\? \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert len(answers) == 11
    for files, names in answers:
        paths = [ROOT / "src" / "sfumato" / file for file in re.findall(r"`(\S+)`", files)]
        code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^( {{4}})?(def |class )?{name}\b", code, re.MULTILINE), (
                files,
                name,
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`?\b((?:[a-z_]+/)+(?:[a-z_]+\.py|(?=`)))", text))
    places = (ROOT, ROOT / "src" / "sfumato", ROOT / "src" / "sfumato" / "diffusion")
    missing = {name for name in named if not any((place / name).exists() for place in places)}
    assert missing <= {"ops/triton/kernels.py"}  # a recipe's example


QUAINT = re.compile(
    r"\b(amid|anybody|company|crowd(ed)?|fate|law|likeliest|nobody|told|whoever)\b", re.IGNORECASE
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words(page: Path) -> None:
    """The rule of language at its edges; names in code are left out, as in tables of renames."""
    text = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert [match[0] for match in QUAINT.finditer(text)] == []


def test_every_page_is_on_the_site_and_in_the_contents() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    contents = (ROOT / "docs" / "contents.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in text, page.name
        assert f"]({page.name})" in contents or page.name == "contents.md", page.name


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    """What a stranger reads first; what is checked there is what it says."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    assert "](docs/contents.md)" in text and ".venv/bin/sfumato" not in text
    assert all(f"\n```sh\n{command}\n```\n" in text for command in ("make demo", "make test"))


def test_the_site_links_to_the_reference() -> None:
    hooks: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    modules = set(re.findall(r"^::: (\S+)$", "".join(hooks["reference_pages"]().values()), re.M))
    assert {"sfumato", "sfumato.tasks.alone", "sfumato.ops.cpu"} <= modules

    def rewritten(text: str, page: str) -> str:
        return hooks["site_links"](text, ROOT / "docs" / "a.md", page)

    loop = "[loop](../src/sfumato/tasks/alone.py)"
    assert rewritten(loop, "a.md") == "[loop](reference/tasks.md#sfumato.tasks.alone)"
    assert rewritten("[d](engine.md#a-step)", "a.md") == "[d](engine.md#a-step)"
    assert rewritten("[r](../README.md)", "reference/a.md") == "[r](../index.md)"
    assert rewritten("[m](../Makefile), [t](https://a.example)", "a.md") == (
        "m, [t](https://a.example)"
    )
    assert rewritten(f"```\n{loop}\n```", "a.md") == f"```\n{loop}\n```"


def run_examples(page: Path) -> dict[str, Any]:
    """The names that a page's Python code defines, run from top to bottom."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(page), "exec", dont_inherit=True), names)
    return names


def test_the_examples_for_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_examples(ROOT / "docs" / "python.md")
    printed = capsys.readouterr().out
    assert printed.startswith("Model(embedded, ") and "\n106 32 " in printed
    assert "The capital is Paris.\neos\n" in printed
    assert names["reply"].stop_reason == "stop"
    assert names["logits"].isfinite().all()
    run_examples(ROOT / "docs" / "engine.md")
    assert capsys.readouterr().out.split()[-2:] == ["Settled", "Finished"]
    logs = run_examples(ROOT / "docs" / "causal.md")["logs"]
    assert logs.isfinite().all() and (logs <= 0).all() and logs.min() < 0


def test_the_examples_of_decisions_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = ROOT / "docs" / "decisions.md"
    names = run_examples(page)
    printed = capsys.readouterr().out
    assert printed.startswith("urgent: ") and names["ticket"].team in ("billing", "tech", "other")
    (tmp_path / "tickets.toml").write_text(
        page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0], encoding="utf-8"
    )
    file = read_questions(tmp_path / "tickets.toml")
    assert file.state and file.state.columns == ["subject", "body"]
    assert list(file.questions) == ["urgent", "team", "anger"]


def test_the_examples_of_fills_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_examples(ROOT / "docs" / "fill.md")
    printed = capsys.readouterr().out
    assert printed.startswith("The capital is Paris.\nParis ")
    assert "\n1342\n2413\n4231\n3124\n" in printed and names["filled"].stats.steps == [2]


def test_the_workflow_runs_what_the_authors_run() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["test"]
    assert job["steps"][-1]["run"] == ".ci/run" and job["defaults"]["run"]["shell"] == "bash"
    runners = " ".join(entry["runner"] for entry in job["strategy"]["matrix"]["include"])
    for system in ("ubuntu", "arm", "macos", "windows"):
        assert system in runners
    assert "Untried" in text and "Linux x86-64 only" in text
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_site_is_set_up() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["site_dir"] == "site" and config["theme"]["font"] is False
    assert "/site/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "mkdocs-material==" in pinned and "mkdocstrings-python==" in pinned
