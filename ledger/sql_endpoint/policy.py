"""Which SQL an analyst may run, with which settings and limits; pure.

The engine's ``readonly=1`` refuses writes, changed settings and most table functions. It lets pass what reads or
writes the host's files by other names (the function ``file``, INTO OUTFILE), runs text as a query (``eval``) or
looks into the process (some system tables, KILL). What is judged here is the statement as the engine itself prints
it: one statement, without comments, one spelling for each thing; and what was judged is what runs.
"""

import re
from collections.abc import Mapping

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

FUNCTION_NAMES = (
    "SELECT lower(name) FROM system.table_functions"
    " UNION ALL SELECT lower(name) FROM system.functions WHERE match(name, '^ai[A-Z]')"  # they call models elsewhere
)
"""Asks the engine for the names that ``check`` is given."""

QUERY_BYTES_MAX = 1 << 20

LIMITS = {
    "max_execution_time": "30",
    "max_memory_usage": str(1 << 30),
    "max_result_rows": "1000000",
    "max_result_bytes": str(256 << 20),
    "result_overflow_mode": "'throw'",
    "max_threads": "2",
    "max_query_size": str(QUERY_BYTES_MAX),
    "max_ast_elements": "50000",
    "session_timezone": "'UTC'",
    "do_not_merge_across_partitions_select_final": "1",
    "allow_introspection_functions": "0",
    "readonly": "1",
}
"""Set before a query in this order, the last one for good. Seconds, bytes, rows."""

_LOWERED = ("max_execution_time", "max_result_rows", "max_result_bytes")
"""Limits that a client may make narrower (``Statement.setMaxRows`` of JDBC); with ``result_overflow_mode=break``."""

_CLIENT_SETTING = re.compile(
    r"(output_format_(?!schema\Z)[a-z0-9_]+|format_(csv|tsv|custom)_[a-z0-9_]+|date_time_output_format)\Z"
)
"""Settings that a client may send: how answers look. Others are ignored: those of templates and schemas read and
write files (``output_format_schema`` too), the rest cannot be changed here."""

_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|`((?:[^`\\]|\\.)*)`|([A-Za-z_][A-Za-z0-9_]*)|(.)", re.DOTALL)


class Forbidden(ValueError):
    """The statement is not for this endpoint; the text says why."""


def check(statement: str, functions: frozenset[str]) -> None:
    """Raise Forbidden unless ``statement``, as ``formatQuerySingleLine`` prints it, only reads the database.

    ``functions``: the engine's table functions and others to refuse, in lower case (FUNCTION_NAMES).
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


def client_settings(parameters: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's parameters that say how its answer looks; the values are the client's, unquoted."""
    return {name: value for name, value in parameters.items() if _CLIENT_SETTING.match(name)}


def limits(parameters: Mapping[str, str]) -> dict[str, str]:
    """LIMITS, narrower where the client asks for it."""
    narrowed = dict(LIMITS)
    for name in _LOWERED:
        asked = parameters.get(name, "")
        if asked.isascii() and asked.isdecimal() and 0 < int(asked) < int(LIMITS[name]):
            narrowed[name] = asked
    if parameters.get("result_overflow_mode") == "break":
        narrowed["result_overflow_mode"] = "'break'"
    return narrowed
