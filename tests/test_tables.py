from __future__ import annotations

from pathlib import Path

from docs import tables

from sfumato.cli.arguments import CommandLine
from sfumato.options.table import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == tables.options(), "make options writes it"


def test_the_page_of_exclusions_is_up_to_date() -> None:
    written = PAGE.with_name("exclusions.md").read_text(encoding="utf-8")
    assert written == tables.exclusions(), "make options writes it"


def test_the_choices_of_tuning_are_up_to_date() -> None:
    page = PAGE.with_name("tuning.md").read_text(encoding="utf-8")
    assert tables.tuning() in page, "paste what `python docs/tables.py tuning` prints"


def test_the_metrics_of_gateways_are_up_to_date() -> None:
    page = PAGE.with_name("scale.md").read_text(encoding="utf-8")
    assert tables.gateways() in page, "paste what `python docs/tables.py gateways` prints"


def test_its_example_is_a_file_of_options(tmp_path: Path) -> None:
    example = tables.options().split("```toml\n")[1].split("```")[0]
    (tmp_path / "sfumato.toml").write_text(example, encoding="utf-8")
    args = CommandLine().parse_args(["serve", "--config", str(tmp_path / "sfumato.toml")], {})
    assert (args.threads, args.max_body, len(args.cors_origin)) == (8, 16 * 2**20, 2)


def test_every_option_is_on_the_page() -> None:
    rows = [line for line in tables.options().splitlines() if line.startswith("| `-")]
    assert len(rows) == len(OPTIONS)
    assert all(line.replace("\\|", "").count("|") == 6 for line in rows)
