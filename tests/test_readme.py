"""The README names the flags, defaults, files and tools that exist, and no others."""

import dataclasses
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import train_dflash_pipeline as pipeline

ROOT = Path(pipeline.__file__).parent
README = (ROOT / "README.md").read_text()
FIELDS = {"--" + f.name.replace("_", "-"): f for G in pipeline.ARGUMENT_GROUPS for f in dataclasses.fields(G)}


def test_flag_tables_hold_every_flag_with_its_default_and_help():
    rows = dict(re.findall(r"^\| `(--[a-z0-9-]+)`[^|]*\| (.*) \|$", README, re.M))
    assert rows.keys() == FIELDS.keys()
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


def test_every_tool_is_named_and_prints_its_help():
    def show_help(tool: Path):
        return subprocess.run([sys.executable, tool, "--help"], capture_output=True, text=True, timeout=300)

    tools = sorted((ROOT / "tools").glob("*.py"))
    with ThreadPoolExecutor(max_workers=2) as pool:
        for tool, shown in zip(tools, pool.map(show_help, tools)):
            assert f"tools/{tool.name}" in README
            assert shown.returncode == 0 and "usage" in shown.stdout, shown.stderr
