"""Files that publish, install and report: workflows, images, forms, the hub's entry."""

from __future__ import annotations

import datetime
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import sfumato
from sfumato.cli.arguments import CommandLine
from sfumato.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "deploy" / "docker"
WORKFLOWS = ROOT / ".github" / "workflows"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PACKAGE = f'__version__ = "{sfumato.__version__}"\n'
TAG = f"v{sfumato.__version__}"
TODAY = datetime.date(2026, 12, 31)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def notes(changelog: str, tag: str = TAG) -> str:
    script = runpy.run_path(str(ROOT / "deploy" / "release.py"))
    return script["notes"](tag, PACKAGE, changelog, TODAY)


def section(day: str = "2026-12-31", body: str = "### Added\n\n- A fast path.") -> str:
    released = f"## {TAG[1:]} - {day}\n\n{body}\n\n## 0.0.1 - 2026-01-01\n\n- Old.\n"
    return f"# Changelog\n\n## Unreleased\n\n{released}"


def test_notes_of_a_release_are_its_section() -> None:
    assert notes(section()) == "### Added\n\n- A fast path."
    assert notes(section().partition("\n\n## 0.0.1")[0]) == "### Added\n\n- A fast path."


@pytest.mark.parametrize(
    ("changelog", "tag", "why"),
    [
        (section(), "v9.9.9", f"so write {TAG}"),
        (section(), TAG[1:], f"so write {TAG}"),
        (section(), "", f"so write {TAG}"),
        (section(body="### Added"), TAG, "lists no change"),
        (section(body=""), TAG, "lists no change"),
        (section(day="2027-01-01"), TAG, "no day up to today"),
        (section(day="soon"), TAG, "no day up to today"),
        (section().replace(TAG[1:], "9.9.9"), TAG, "first released section"),
        ("# Changelog\n\n## Unreleased\n\n- A fast path.\n", TAG, "first released section"),
    ],
)
def test_a_tag_that_may_not_be_released(changelog: str, tag: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        notes(changelog, tag)


def test_the_package_has_the_version_that_the_script_reads() -> None:
    script = runpy.run_path(str(ROOT / "deploy" / "release.py"))
    package = (ROOT / "src" / "sfumato" / "__init__.py").read_text(encoding="utf-8")
    assert script["version_of"](package) == sfumato.__version__
    assert load(ROOT / "CITATION.cff")["version"] == sfumato.__version__
    with pytest.raises(ValueError, match="__version__"):
        script["version_of"]("")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    script["check_citation"](citation, sfumato.__version__)
    with pytest.raises(ValueError, match=r"CITATION.cff: its version must be 9\.9\.9"):
        script["check_citation"](citation, "9.9.9")


def test_the_release_publishes_last_and_stores_no_token() -> None:
    workflow = load(WORKFLOWS / "release.yml")
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    jobs = workflow["jobs"]
    assert "secrets." not in text and workflow["permissions"] == {"contents": "read"}
    writers = {name: set(job["permissions"]) for name, job in jobs.items() if "permissions" in job}
    assert writers == {
        "image": {"packages"},
        "publish": {"id-token", "attestations"},
        "announce": {"contents"},
        "docs": {"pages", "id-token"},
    }
    assert jobs["publish"]["environment"] == "pypi" and "tag" in jobs["publish"]["if"]
    assert jobs["announce"]["needs"] == jobs["docs"]["needs"] == "publish"
    runners = {entry["runner"] for entry in jobs["test"]["strategy"]["matrix"]["include"]}
    assert {name.split("-")[0] for name in runners} == {"ubuntu", "macos", "windows"}
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used)


def test_images_run_without_root_and_have_a_health_check() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    final = text[text.rindex("\nFROM ") :]
    lines = final.splitlines()
    user, entry = lines.index("USER 1000:1000"), lines.index('ENTRYPOINT ["sfumato"]')
    assert user < entry and final.count("USER") == 1
    assert "HEALTHCHECK" in final and "VOLUME /models" in lines
    script = (DOCKER / "steps.sh").read_text(encoding="utf-8")
    steps = set(re.findall(r"^(\w+)\)$", script, re.MULTILINE))
    run = re.findall(r"^RUN sh \S+/steps\.sh (\w+)|steps\.sh\", \"(\w+)\"", text, re.MULTILINE)
    assert steps == {name for names in run for name in names if name}
    assert "useradd --uid 1000" in script
    for name in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / one).exists() for one in name.split())


def test_the_context_of_images_has_what_they_are_built_from() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*" and "dist/*.whl" in allowed
    assert all((ROOT / name).exists() for name in allowed - {"dist/*.whl"})
    copied = re.findall(r"LICENSE .* src", (DOCKER / "try.sh").read_text(encoding="utf-8"))
    assert set(copied[0].split()) == allowed - {"dist/*.whl", "deploy/docker/steps.sh"}


def test_compose_starts_the_server_and_the_page_on_this_machine_alone() -> None:
    compose = load(DOCKER / "compose.yaml")
    server, page = compose["services"]["sfumato"], compose["services"]["webui"]
    assert (DOCKER / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    assert page["environment"]["OPENAI_API_BASE_URL"] == "http://sfumato:8080/v1"
    assert page["environment"]["OPENAI_API_KEY"].startswith("${SFUMATO_API_KEY")
    assert server["environment"]["SFUMATO_API_KEY"].startswith("${SFUMATO_API_KEY:?")
    assert server["read_only"] and server["cap_drop"] == ["ALL"]
    for service in (server, page):
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(
            compose["volumes"]
        )
    cuda = load(DOCKER / "compose.cuda.yaml")["services"]
    assert cuda["sfumato"]["build"]["args"] == {"DEVICE": "cuda"}


def test_forms_ask_for_what_the_command_line_prints() -> None:
    forms = {path.stem: load(path) for path in FORMS}
    assert set(forms) == {"config", "fault", "model"}
    for name in ("fault", "model"):
        assert {"name", "description", "body"} <= set(forms[name])
        fields = {one["id"]: one for one in forms[name]["body"] if "id" in one}
        assert "`sfumato doctor --json`" in fields["doctor"]["attributes"]["label"]
        assert fields["doctor"]["validations"]["required"]
    assert "sfumato verify-model" in json.dumps(forms["model"])
    assert CommandLine().parse_args(["doctor", "--json"]).json


def test_the_entry_for_the_hub_names_what_is_here() -> None:
    text = (ROOT / "deploy" / "hub" / "local-apps.ts").read_text(encoding="utf-8")
    gguf, config = (set(json.loads(one)) for one in re.findall(r"(\[.*\])\.includes", text))
    # Architectures that other networks have too are not among them.
    assert gguf == {family.architecture for family in FAMILIES if not family.gguf_keys}
    assert config == {family.model_type for family in FAMILIES}
    commands = re.findall(r"content: [`\"]sfumato (.+)[`\"],", text)
    assert len(commands) == text.count("content:")
    for command in commands:
        CommandLine().parse_args(command.replace("${name}", "hf:owner/name:Q4_K_M").split())
