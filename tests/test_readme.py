"""The README names the flags, defaults, files and tools that exist, and no others."""

import dataclasses
import re
import runpy
import sys
from pathlib import Path

import pytest
import train_dflash_pipeline as pipeline

ROOT = Path(pipeline.__file__).parent
README = (ROOT / "README.md").read_text()
FIELDS = {"--" + f.name.replace("_", "-"): f for G in pipeline.ARGUMENT_GROUPS for f in dataclasses.fields(G)}


def test_flag_tables_hold_every_flag_with_its_default_and_help():
    named = re.findall(r"^\| `(--[a-z0-9-]+)`( / `--no-[a-z0-9-]+`)? \| (.*) \|$", README, re.M)
    rows = {flag: rest for flag, _, rest in named}
    assert rows.keys() == FIELDS.keys()
    for flag, off, _ in named:  # what is on by default has a flag that turns it off
        assert off == (f" / `{flag.replace('--', '--no-', 1)}`" if FIELDS[flag].default is True else ""), flag
    for flag, field in FIELDS.items():
        default, help = (cell.strip() for cell in rows[flag].split("|", 1))
        shown = {"None": "", "True": "on", "False": "off"}.get(str(field.default), str(field.default))
        assert default == shown.removeprefix(f"{ROOT}/"), flag
        assert help == field.metadata["help"], flag


def test_commands_use_flags_that_the_pipeline_accepts():
    commands = re.findall(r"train_dflash_pipeline\.py\s((?:[^\n`]*\\\n)*[^\n`]*)", README)
    used = {flag for command in commands for flag in re.findall(r"--[a-z0-9-]+", command)}
    assert used and used <= FIELDS.keys() | {"--help"}


def test_files_it_names_exist():
    named = set(re.findall(r"\b(?:launch|tools|ds_configs)/[a-z0-9_]+\.(?:sh|py|json|yaml)", README))
    assert named and all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("tool", sorted((ROOT / "tools").glob("*.py")), ids=lambda path: path.name)
def test_every_tool_is_named_and_prints_its_help(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(tool), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(tool), run_name="__main__")
    assert f"tools/{tool.name}" in README
    assert not end.value.code and "usage" in capsys.readouterr().out
