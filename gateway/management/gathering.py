"""The metrics of a stack on one machine on one page: those of each process, told apart by the label ``service``.

Which processes there are stands in the stack's run.json, which is read anew for each page. Whoever may read the
gateway's own metrics may read this: the same small server, the same address.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 2.0
"""For one process; all are asked at once. A frozen one must not cost the page of the others."""
UP = "headrace_service_up"

_direct = build_opener(ProxyHandler({}))


class Gathering:
    """``page`` may be called from any thread."""

    def __init__(self, run_file: Path) -> None:
        self._run_file = run_file

    def page(self) -> bytes:
        """In Prometheus' text format."""
        urls = self._urls()
        with ThreadPoolExecutor(max(1, len(urls))) as threads:
            pages = dict(zip(urls, threads.map(_fetched, urls.values()), strict=True))
        up = "".join(f'{UP}{{service="{name}"}} {int(page is not None)}\n' for name, page in pages.items())
        head = f"# HELP {UP} Whether the process told its metrics.\n# TYPE {UP} gauge\n"
        return (head + up + merged({name: page for name, page in pages.items() if page is not None})).encode()

    def _urls(self) -> dict[str, str]:
        """By the process's name; nothing before the stack serves."""
        try:
            by_role = json.loads(self._run_file.read_text("utf-8"))["metrics_urls"]
        except (OSError, ValueError, KeyError):
            return {}
        return {f"{role}-{index}": url for role, urls in by_role.items() for index, url in enumerate(urls)}


def _fetched(url: str) -> str | None:
    try:
        with _direct.open(url, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (URLError, OSError, ValueError):
        return None


def merged(pages: dict[str, str]) -> str:
    """One page of several: each family once, with the samples of all."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, page in pages.items():
        known = set(families)
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head, _ = families.setdefault(family, ([], []))
                if family not in known:
                    head.append(line)
            elif line and not line.startswith("#"):
                families.setdefault(family, ([], []))[1].append(_labelled(line, name))
    return "\n".join(_lines(families)) + "\n"


def _lines(families: dict[str, tuple[list[str], list[str]]]) -> Iterator[str]:
    for head, samples in families.values():
        yield from head
        yield from samples


def _labelled(line: str, service: str) -> str:
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space:
        return f'{line[: brace + 1]}service="{service}"{"" if line[brace + 1] == "}" else ","}{line[brace + 1 :]}'
    return f'{line[:space]}{{service="{service}"}}{line[space:]}'
