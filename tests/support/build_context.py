"""What ``docker build`` sends of a folder: .dockerignore as BuildKit reads it (moby/patternmatcher), without Docker."""

import re
from collections.abc import Iterable
from posixpath import normpath


def sent(paths: Iterable[str], dockerignore: str) -> list[str]:
    """Those of the files, named from the context's root, that are not ignored."""
    rules = [rule for line in dockerignore.splitlines() if (rule := _rule(line)) is not None]
    return [path for path in paths if not _ignored(path, rules)]


def _rule(line: str) -> tuple[re.Pattern[str], bool] | None:
    """The pattern and whether it ignores; None for a line that says nothing."""
    text = line.strip()
    if not text or line.startswith("#"):
        return None
    ignores = not text.startswith("!")
    pattern = normpath(text.removeprefix("!").strip()).lstrip("/")
    return re.compile(_regex(pattern)), ignores


def _regex(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)


def _ignored(path: str, rules: Iterable[tuple[re.Pattern[str], bool]]) -> bool:
    """The last rule decides that matches the file or a folder above it."""
    names = path.split("/")
    above = ["/".join(names[: length + 1]) for length in range(len(names))]
    ignored = False
    for pattern, ignores in rules:
        if any(pattern.fullmatch(each) for each in above):
            ignored = ignores
    return ignored
