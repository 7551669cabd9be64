"""Which SQL an analyst may run, with which settings and limits; pure.

The engine's ``readonly=1`` refuses writes, changed settings and most table functions. It lets pass what reads or
writes the host's files by other names (the function ``file``, INTO OUTFILE), tells whether a file exists (the
database ``default`` takes paths for tables), runs text as a query (``eval``) or looks into the process (some system
tables, KILL). What is judged here is the statement as the engine itself prints it: one statement, without comments,
one spelling for each thing; and what was judged is what runs. Functions, databases and kinds of SHOW pass when they
are named here.
"""

import re
from collections.abc import Mapping

STATEMENTS = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "EXISTS", "EXPLAIN"})

ABOUT = {
    "SHOW": frozenset({"tables", "columns", "databases", "indexes", "setting", "settings", "functions", "create"})
    | {"full", "extended", "changed", "temporary"},
    "SHOW CREATE": frozenset({"table", "view"}),
    "EXISTS": frozenset({"table", "view", "database", "temporary"}),
}
"""What may follow these words, as the engine prints them."""

TABLE_FUNCTIONS = frozenset(
    {"numbers", "numbers_mt", "zeros", "zeros_mt", "generateseries", "generate_series", "values", "view", "null"}
    | {"format", "generaterandom", "input"}
)
"""Those that compute (``input`` works in inserts alone); every other one is refused by its name, wherever it stands."""

FUNCTION_CATEGORIES = frozenset(
    {"Aggregate Functions", "Arithmetic", "Arrays", "Bit", "Bitmap", "Comparison", "Conditional", "Dates and Times"}
    | {"Distance", "Encoding", "Encryption", "Financial", "Geo", "Geo Polygon", "Hash", "IP Address", "JSON", "Logical"}
    | {"Map", "Mathematical", "Null", "NumericIndexedVector", "QBit", "Random Number", "Rounding", "String"}
    | {"String Replacement", "String Search", "String Splitting", "Time Series", "Time Window", "Tuple"}
    | {"Type Conversion", "URL", "UUID"}
)
"""The engine's categories of functions that compute, and nothing else."""

FUNCTIONS = frozenset(
    {"currentDatabase", "currentUser", "currentRoles", "currentProfiles", "enabledRoles", "getSetting"}
    | {"version", "revision", "displayName"}  # drivers ask when they connect
    | {"toTypeName", "toColumnTypeName", "dumpColumnStructure", "defaultValueOfArgumentType", "defaultValueOfTypeName"}
    | {"variantType", "variantElement", "getSubcolumn", "getSizeOfEnumType", "lowCardinalityIndices"}
    | {"lowCardinalityKeys", "identity", "materialize", "ignore", "transform", "indexHint", "isConstant", "throwIf"}
    | {"isDecimalOverflow", "countDigits", "digits", "bar", "byteSize", "blockSize", "blockNumber", "rowNumberInBlock"}
    | {"rowNumberInAllBlocks", "neighbor", "runningAccumulate", "runningDifference"}
    | {"runningDifferenceStartingWithFirstValue", "finalizeAggregation", "initializeAggregation", "visibleWidth"}
    | {"formatReadableSize", "formatReadableDecimalSize", "formatReadableQuantity", "formatReadableTimeDelta"}
    | {"parseReadableSize", "parseReadableSizeOrNull", "parseReadableSizeOrZero", "parseTimeDelta"}
    | {"parseISO8601Duration", "minSampleSizeConversion", "minSampleSizeContinuous", "caseWithExpression", "nested"}
)
"""Those of other categories that pass. Every other function is refused by its name, wherever it stands: it may reach
out of the database (``file``), name a table in a text (``hasColumnInTable``), or tell of the host."""

WORDS = frozenset({"outfile", "infile", "eval", "processlist"})
"""Refused besides: they reach out of the database."""

SYSTEM_TABLES = frozenset(
    {"one", "numbers", "numbers_mt", "zeros", "databases", "tables", "columns", "functions", "table_functions"}
    | {"table_engines", "data_type_families", "formats", "settings", "parts", "parts_columns", "keywords", "time_zones"}
    | {"collations", "build_options", "aggregate_function_combinators", "data_skipping_indices", "dictionaries"}
    | {"macros", "projections", "constraints", "contributors", "licenses", "merge_tree_settings"}
)

DESCRIBING = frozenset({"system", "information_schema"})
"""Databases beside the ledger's that may be named: they describe the schema."""

_PASSING = (
    "SELECT name FROM system.functions WHERE alias_to = ''"
    f" AND (has({sorted(FUNCTION_CATEGORIES)}, trim(categories)) OR has({sorted(FUNCTIONS)}, name))"
)
FUNCTION_NAMES = (
    f"WITH passing AS ({_PASSING}) SELECT lower(name) FROM system.functions"
    " WHERE if(alias_to = '', name, alias_to) NOT IN passing AND lower(name) NOT IN (SELECT lower(name) FROM passing)"
    f" UNION ALL SELECT lower(name) FROM system.table_functions WHERE NOT has({sorted(TABLE_FUNCTIONS)}, lower(name))"
)
"""Asks the engine for the names of functions that ``check`` refuses."""

DATABASE_NAMES = "SELECT lower(name) FROM system.databases WHERE name != currentDatabase()"
"""Asks the engine for the names of databases other than the ledger's."""

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

_TIME_ZONE = re.compile(r"[A-Za-z0-9_+/-]{1,64}\Z")

_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|`((?:[^`\\]|\\.)*)`|([A-Za-z_][A-Za-z0-9_]*)|(.)", re.DOTALL)


class Forbidden(ValueError):
    """The statement is not for this endpoint; the text says why."""


def check(statement: str, functions: frozenset[str], databases: frozenset[str]) -> None:
    """Raise Forbidden unless ``statement``, as ``formatQuerySingleLine`` prints it, only reads the ledger's database.

    ``functions``, ``databases``: the engine's answers to FUNCTION_NAMES and DATABASE_NAMES.
    """
    first, words = "", []
    for quoted, plain, sign in _TOKEN.findall(statement):
        word = (quoted or plain).lower()
        first = first or plain.upper() or (sign if sign not in " (" else "")
        if word or not sign.isspace():
            words.append(word or sign)
    if first not in STATEMENTS:
        raise Forbidden(f"only {', '.join(sorted(STATEMENTS))} are answered here")
    _check_subject(first, words[1:], databases)
    for word in words:
        if word in WORDS or word in functions:
            raise Forbidden(f"{word!r} is not allowed here, also not as a name")
    for one, two, three in zip(words, words[1:], words[2:], strict=False):
        if (one, two) == ("system", ".") and three not in SYSTEM_TABLES:
            raise Forbidden(f"system.{three} is not shown here")
        if two == "." and one in databases and one not in DESCRIBING:
            raise Forbidden(f"the database {one!r} is not shown here")
        if (one, two, three) == (":", "identifier", "}"):
            raise Forbidden("a name cannot be a parameter here: it would not have been judged")
        if one == "settings" and three == "=":  # in a subquery the engine does not refuse them
            raise Forbidden("settings cannot be changed here")


def _check_subject(first: str, rest: list[str], databases: frozenset[str]) -> None:
    """What a statement about the schema is about."""
    if first == "SHOW" and rest[:1] == ["create"]:
        subject, follows = "SHOW CREATE", rest[1]
    else:
        subject, follows = first, rest[0]
    if subject in ABOUT and follows not in ABOUT[subject]:
        raise Forbidden(f"{subject} {follows.upper()} is not answered here")
    if first not in ("SELECT", "WITH", "EXPLAIN"):
        for word in rest:
            if word in databases and word not in DESCRIBING:
                raise Forbidden(f"the database {word!r} is not shown here")


def format_of(statement: str, default: str) -> str:
    """The format that a printed statement is answered in."""
    found = re.search(r" FORMAT ([A-Za-z0-9]+)(?: SETTINGS [^']*)?\Z", statement)
    return found[1] if found else default


def client_settings(parameters: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's parameters that say how its answer looks; the values are the client's, unquoted."""
    return {name: value for name, value in parameters.items() if _CLIENT_SETTING.match(name)}


def limits(parameters: Mapping[str, str]) -> dict[str, str]:
    """LIMITS, narrower where the client asks for it, and in the client's time zone; raises Forbidden if it is none."""
    narrowed = dict(LIMITS)
    if zone := parameters.get("session_timezone"):
        if not _TIME_ZONE.match(zone):
            raise Forbidden("session_timezone: this is no time zone")
        narrowed["session_timezone"] = f"'{zone}'"  # the engine refuses what it does not know
    for name in _LOWERED:
        asked = parameters.get(name, "")
        if asked.isascii() and asked.isdecimal() and 0 < int(asked) < int(LIMITS[name]):
            narrowed[name] = asked
    if parameters.get("result_overflow_mode") == "break":
        narrowed["result_overflow_mode"] = "'break'"
    return narrowed
