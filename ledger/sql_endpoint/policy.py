"""Which SQL an analyst may run; pure.

The engine's ``readonly=1`` refuses writes, changed settings and most table functions. It lets pass what reads or
writes the host's files by other names (the function ``file``, INTO OUTFILE), runs text as a query (``eval``) or
looks into the process (some system tables, KILL). What is judged here is the statement as the engine itself prints
it: one statement, without comments, one spelling for each thing; and what was judged is what runs.
"""

import re

STATEMENTS = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "EXISTS", "EXPLAIN"})

TABLE_FUNCTIONS = frozenset(
    {"numbers", "numbers_mt", "zeros", "zeros_mt", "generateseries", "generate_series", "values", "view", "null"}
    | {"format", "generaterandom", "input"}
)
"""Those that compute (``input`` works in inserts alone); every other one is refused by its name, wherever it stands."""

WORDS = frozenset(
    {"file", "outfile", "infile", "eval", "sleep", "sleepeachrow", "logtrace", "getclienthttpheader", "processlist"}
    | {"filesystemavailable", "filesystemcapacity", "filesystemunreserved"}
    | {"addresstoline", "addresstolinewithinlines", "addresstosymbol"}
)
"""Refused besides: they reach out of the database, or only waste time."""

SYSTEM_TABLES = frozenset(
    {"one", "numbers", "numbers_mt", "zeros", "databases", "tables", "columns", "functions", "table_functions"}
    | {"table_engines", "data_type_families", "formats", "settings", "parts", "parts_columns", "keywords", "time_zones"}
    | {"collations", "build_options", "aggregate_function_combinators", "data_skipping_indices", "dictionaries"}
    | {"macros", "projections", "constraints", "contributors", "licenses", "merge_tree_settings"}
)

_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|`((?:[^`\\]|\\.)*)`|([A-Za-z_][A-Za-z0-9_]*)|(.)", re.DOTALL)


class Forbidden(ValueError):
    """The statement is not for this door; the text says why."""


def check(statement: str, functions: frozenset[str]) -> None:
    """Raise Forbidden unless ``statement``, as ``formatQuerySingleLine`` prints it, only reads the database.

    ``functions``: the engine's table functions and others to refuse, in lower case.
    """
    first, words = "", []
    for quoted, plain, sign in _TOKEN.findall(statement):
        word = (quoted or plain).lower()
        first = first or plain.upper() or (sign if sign not in " (" else "")
        if word or not sign.isspace():
            words.append(word or sign)
    if first not in STATEMENTS:
        raise Forbidden(f"only {', '.join(sorted(STATEMENTS))} are answered here")
    for word in words:
        if word in WORDS or (word in functions and word not in TABLE_FUNCTIONS):
            raise Forbidden(f"{word!r} is not allowed here, also not as a name")
    for one, two, three in zip(words, words[1:], words[2:], strict=False):
        if (one, two) == ("system", ".") and three not in SYSTEM_TABLES:
            raise Forbidden(f"system.{three} is not shown here")
        if (one, two, three) == (":", "identifier", "}"):
            raise Forbidden("a name cannot be a parameter here: it would not have been judged")
        if one == "settings" and three == "=":  # in a subquery the engine does not refuse them
            raise Forbidden("settings cannot be changed here")


def format_of(statement: str, default: str) -> str:
    """The format that a printed statement is answered in."""
    found = re.search(r" FORMAT ([A-Za-z0-9]+)(?: SETTINGS [^']*)?\Z", statement)
    return found[1] if found else default
