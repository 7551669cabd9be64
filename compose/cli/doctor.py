"""``headrace doctor``: what is missing or wrong on this machine."""

import os
from typing import Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, show
from compose.stack.data_dir import default_data_dir


def doctor(
    data_dir: DataDirOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that `headrace up` would use.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Say in plain words what is missing or wrong on this machine."""
    from compose.stack.doctor import examine

    findings = examine(data_dir or default_data_dir(os.environ), port)
    marks = ["ok     " if finding.ok else "WRONG  " if finding.needed else "note   " for finding in findings]
    lines = [f"{mark} {finding.name}: {finding.text}" for mark, finding in zip(marks, findings, strict=True)]
    show(findings, "\n".join(lines), as_json=as_json)
    raise typer.Exit(1 if any(finding.needed and not finding.ok for finding in findings) else 0)
