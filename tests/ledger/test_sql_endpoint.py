"""The read-only SQL endpoint over the real engine: what passes, what does not, and that nothing leaves the database."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import pytest

from ledger.sql_endpoint import http as sql_http
from ledger.sql_endpoint import policy
from ledger.sql_endpoint.connections import STRANGERS_PER_ADDRESS_MAX
from ledger.sql_endpoint.http import STRANGER_BYTES_MAX, SqlEndpoint
from ledger.sql_endpoint.policy import QUERY_BYTES_MAX
from ledger.sql_endpoint.session import QUERIES_MAX, Sessions
from ledger.store import Store
from tests.support.polling import metric, wait_until

AUTH = ("ann", "secret")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlEndpoint]:
    directory = tmp_path_factory.mktemp("sql")
    store = Store(f"chdb://{directory}", "headrace")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.open())
    endpoint = SqlEndpoint(Sessions(str(directory), "headrace", *AUTH), "127.0.0.1:0")
    endpoint.start()
    yield endpoint
    endpoint.close()
    loop.run_until_complete(store.close())
    loop.close()


@pytest.fixture
def http_client(endpoint: SqlEndpoint) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{endpoint.address}", auth=AUTH, trust_env=False, timeout=60) as client:
        yield client


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ask(client: httpx.Client, query: str, **params: str) -> httpx.Response:
    return client.post("/", content=query, params=params)


def test_ping_needs_no_password(endpoint: SqlEndpoint) -> None:
    for path in ("/ping", "/", "/replicas_status"):
        answer = httpx.get(f"http://{endpoint.address}{path}", trust_env=False)
        assert (answer.status_code, answer.text) == (200, "Ok.\n")


def test_every_way_to_name_oneself(endpoint: SqlEndpoint) -> None:
    url = f"http://{endpoint.address}/"
    ways: tuple[dict[str, Any], ...] = (
        {"auth": AUTH},
        {"headers": {"X-ClickHouse-User": "ann", "X-ClickHouse-Key": "secret"}},
        {"params": {"user": "ann", "password": "secret"}},
    )
    for how in ways:
        how.setdefault("params", {})["query"] = "SELECT 1"
        answer = httpx.get(url, trust_env=False, **how)
        assert (answer.status_code, answer.text) == (200, "1\n")


@pytest.mark.parametrize(
    "auth", [None, ("ann", ""), ("ann", "Secret"), ("", "secret"), ("bob", "secret"), ("änn", "ü")]
)
def test_nobody_else_gets_in(endpoint: SqlEndpoint, auth: tuple[str, str] | None) -> None:
    answer = httpx.get(f"http://{endpoint.address}/", params={"query": "SELECT 1"}, auth=auth, trust_env=False)
    assert answer.status_code == (403 if auth else 401)
    assert answer.headers["x-clickhouse-exception-code"] == "516"
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("query", "params", "text"),
    [
        ("SELECT 1 + 1", {}, "2\n"),
        ("SELECT 1 AS a FORMAT JSONEachRow", {}, '{"a":1}\n'),
        ("SELECT 1 AS a, 'x' AS b", {"default_format": "CSVWithNames"}, '"a","b"\n1,"x"\n'),
        ("SELECT {n:UInt8}, {s:String}", {"param_n": "7", "param_s": "it's"}, "7\tit\\'s\n"),
        ("SELECT 'a;\\nb -- file(' /* file() */;\n", {"default_format": "TSVRaw"}, "a;\nb -- file(\n"),
        ("WITH 1 AS x SELECT x", {}, "1\n"),
        ("SELECT sum(number) FROM numbers(10)", {}, "45\n"),
        ("SELECT timezone()", {}, "UTC\n"),
        ("SELECT currentDatabase()", {"database": "default"}, "headrace\n"),
        ("SELECT count() FROM usage", {}, "0\n"),
        ("EXISTS TABLE attempts", {}, "1\n"),
        ("SELECT getSetting('readonly')", {"readonly": "0"}, "1\n"),
        ("SELECT 12345678901 AS a FORMAT JSONEachRow", {"output_format_json_quote_64bit_integers": "1"},
         '{"a":"12345678901"}\n'),
    ],
)  # fmt: skip
def test_what_analysts_ask(http_client: httpx.Client, query: str, params: dict[str, str], text: str) -> None:
    answer = ask(http_client, query, **params)
    assert (answer.status_code, answer.text) == (200, text)


def test_d30_a_session_has_its_time_zone_or_an_error(http_client: httpx.Client, endpoint: SqlEndpoint) -> None:
    query = "SELECT timezone(), toString(toDateTime(0)), toString(toDateTime64(0, 3, 'UTC'))"
    found = ask(http_client, query, session_timezone="America/New_York")
    assert found.text == "America/New_York\t1969-12-31 19:00:00\t1970-01-01 00:00:00.000\n"
    for unknown in ("Nowhere/Land", "' , readonly = 0 --", "x" * 65):
        answer = ask(http_client, "SELECT 1", session_timezone=unknown)
        assert answer.status_code >= 400 and "time zone" in answer.text
    host, port = endpoint.address.split(":")
    connect = {"host": host, "port": int(port), "username": "ann", "password": "secret"}
    with pytest.raises(clickhouse_connect.driver.exceptions.ProgrammingError, match="session_timezone is readonly"):
        clickhouse_connect.get_client(**connect, settings={"session_timezone": "America/New_York"})


def test_query_by_get_and_split_between_url_and_body(http_client: httpx.Client) -> None:
    assert http_client.get("/", params={"query": "SELECT 1"}).text == "1\n"
    assert http_client.post("/", content="1", params={"query": "SELECT"}).text == "1\n"
    answer = http_client.get("/", params={"query": "SELECT 5 FORMAT JSON"})
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-clickhouse-format"] == "JSON"


def test_answers_are_packed_when_asked_for(endpoint: SqlEndpoint) -> None:
    connection = http.client.HTTPConnection(endpoint.address)
    path = "/?enable_http_compression=1&user=ann&password=secret&query=SELECT%20repeat('a',1000)"
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    assert answer.getheader("Content-Encoding") == "gzip"
    assert gzip.decompress(answer.read()) == b"a" * 1000 + b"\n"
    connection.close()


def test_answers_name_their_format_and_what_was_read(http_client: httpx.Client) -> None:
    answer = ask(http_client, "SELECT number FROM numbers(300000)", default_format="RowBinaryWithNamesAndTypes")
    assert answer.headers["x-clickhouse-format"] == "RowBinaryWithNamesAndTypes"
    assert len(answer.content) > 300_000 * 8
    summary = json.loads(answer.headers["x-clickhouse-summary"])
    assert (summary["read_rows"], summary["result_bytes"]) == ("300000", str(len(answer.content)))
    assert int(summary["elapsed_ns"]) > 0


def test_old_clients_and_heads(endpoint: SqlEndpoint) -> None:
    """HTTP/1.0 knows no chunks, so what is packed while it is sent comes plain."""
    path = "/?enable_http_compression=1&user=ann&password=secret&query=SELECT%207"
    with connected(endpoint.address) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n".encode())
        with connection.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == b"7\n"
    client = http.client.HTTPConnection(endpoint.address)
    for method, text in (("HEAD", b""), ("GET", b"7\n")):
        client.request(method, path)
        assert client.getresponse().read() == text
    client.close()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT currentUser() AS user, timezone() AS timezone, version() AS version LIMIT 1",
        "SELECT name AS TABLE_SCHEM, NULL::Nullable(String) AS TABLE_CATALOG FROM system.databases ORDER BY name",
        "SELECT t.database AS TABLE_SCHEM, t.name AS TABLE_NAME, if(t.is_temporary = 1, concat('Temporary', t.engine),"
        " t.engine) AS TABLE_TYPE, t.comment AS REMARKS, d.engine AS TYPE_SCHEM FROM system.tables t"
        " JOIN system.databases d ON system.tables.database = system.databases.name WHERE t.database LIKE '%'"
        " AND t.name LIKE '%' AND ((t.engine IN ('File', 'URL', 'MySQL', 'S3', 'Executable', 'Loop'))"
        " OR (t.engine NOT IN ('Null') AND NOT t.engine LIKE 'System%' AND t.is_temporary = 0))",
        "SELECT arrayJoin(['TABLE', 'VIEW']) AS TABLE_TYPE ORDER BY TABLE_TYPE",
        "SELECT database AS TABLE_SCHEM, table AS TABLE_NAME, name AS COLUMN_NAME, type AS TYPE_NAME,"
        " toInt32(multiIf(character_octet_length IS NOT NULL, character_octet_length, system.columns.type == 'Int8', 1,"
        " numeric_precision IS NOT NULL, numeric_precision, 0)) AS COLUMN_SIZE,"
        " toInt32(position(type, 'Nullable(') >= 1 ?1 : 0) as NULLABLE, system.columns.comment AS REMARKS,"
        " character_octet_length::Nullable(Int32) AS CHAR_OCTET_LENGTH FROM system.columns"
        " WHERE database LIKE 'headrace' AND table LIKE 'attempts' AND name LIKE '%'"
        " ORDER BY TABLE_SCHEM, TABLE_NAME, system.columns.position",
        "SELECT system.tables.name AS TABLE_NAME, trim(c.1) AS COLUMN_NAME, CAST(c.2 AS Int16) AS KEY_SEQ FROM"
        " system.tables ARRAY JOIN arrayZip(splitByChar(',', primary_key), arrayEnumerate(splitByChar(',',"
        " primary_key))) as c WHERE system.tables.primary_key <> '' AND system.tables.database ILIKE 'headrace'",
        "SELECT CAST(NULL as Nullable(Int16)) AS SCOPE LIMIT 0",
        "SELECT tenant, count() AS n FROM usage WHERE tenant = 'demo' AND requested_at > '2026-01-01' GROUP BY tenant",
        "SELECT * FROM usage_days WHERE tenant = 'demo' LIMIT 5",
        "SELECT 1 -- the driver asks this to see whether the connection lives\n",
    ],
)  # fmt: skip
def test_what_jdbc_asks_as_it_asks(http_client: httpx.Client, query: str) -> None:
    """The statements of its DatabaseMetaData, shortened, with the headers and settings that it sends."""
    settings = {"query_id": "q-1", "compress": "0", "async_insert": "0", "wait_end_of_query": "1"}
    headers = {"X-ClickHouse-Format": "RowBinaryWithNamesAndTypes", "X-ClickHouse-Database": "default",
               "X-ClickHouse-Query-Id": "q-1", "Content-Type": "text/plain"}  # fmt: skip
    answer = http_client.post("/", content=query, params=settings, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-clickhouse-format"] == "RowBinaryWithNamesAndTypes"
    assert answer.headers["x-clickhouse-query-id"] == "q-1"
    assert answer.headers["x-clickhouse-timezone"] == "UTC"
    assert answer.content


def test_a_client_may_ask_for_less(http_client: httpx.Client) -> None:
    less = {"max_result_rows": "3", "max_block_size": "1"}
    assert ask(http_client, "SELECT number FROM numbers(1000)", **less).headers["x-clickhouse-exception-code"] == "396"
    assert ask(http_client, "SELECT number FROM numbers(3)", **less).text == "0\n1\n2\n"
    cut = ask(http_client, "SELECT number FROM numbers(200000)", result_overflow_mode="break", **less)
    assert 3 <= cut.text.count("\n") < 200000  # whole blocks, as ClickHouse does
    for more in ("0", "-1", "2000000", "1e9", "'3'"):
        found = ask(http_client, "SELECT getSetting('max_result_rows')", max_result_rows=more)
        assert found.text == "1000000\n"


def test_gzipped_queries(http_client: httpx.Client) -> None:
    answer = http_client.post("/", content=gzip.compress(b"SELECT 1"), headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.text) == (200, "1\n")


OUTSIDE = [
    "SELECT file('{path}')",
    "SELECT `file`('{path}')",
    "SELECT * APPLY(file) FROM (SELECT '{path}')",
    "SELECT arrayMap(file, ['{path}'])",
    "SELECT * FROM file('{path}')",
    "SELECT * FROM `file`('{path}', 'LineAsString')",
    "SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'a Int8')",
    "SELECT * FROM s3('http://127.0.0.1:1/bucket/key', 'CSV', 'a Int8')",
    "SELECT * FROM remote('127.0.0.1:1', 'system', 'one')",
    "SELECT * FROM mysql('127.0.0.1:1', 'a', 'b', 'c', 'd')",
    "SELECT * FROM sqlite('{path}', 'a')",
    "SELECT * FROM executable('/bin/ls', 'TSV', 'a String')",
    "SELECT * FROM python('os')",
    "SELECT * FROM Python(os)",
    "SELECT * FROM filesystem('/etc')",
    "SELECT * FROM eval('SELECT file(\\'{path}\\')')",
    "SELECT * FROM merge('system', 'stack_trace')",
    "SELECT * FROM loop(numbers(1))",
    "SELECT aiGenerate('x')",
    "EXISTS TABLE default.`{path}`",
    "EXISTS TABLE default.`{path}.none`",
    "EXISTS default.`{path}`",
    "EXISTS VIEW `default`.`{path}`",
    "EXISTS DICTIONARY default.`{path}`",
    "EXISTS DICTIONARY a",
    "DESCRIBE default.`{path}`",
    "DESCRIBE TABLE default.`{path}.none`",
    "DESCRIBE file('{path}')",
    "DESCRIBE (SELECT * FROM default.`{path}`)",
    "EXPLAIN SELECT * FROM default.`{path}.none`",
    "EXPLAIN AST SELECT * FROM default.`{path}.none`",
    "SHOW CREATE TABLE default.`{path}`",
    "SHOW CREATE DATABASE default",
    "SHOW CREATE USER default",
    "SHOW TABLES FROM default",
    "SHOW COLUMNS FROM `{path}` FROM default",
    "SHOW INDEX FROM `{path}` FROM default",
    "SHOW GRANTS",
    "SHOW ACCESS",
    "SHOW DICTIONARIES",
    "SHOW CLUSTERS",
    "SHOW ENGINES",
    "SELECT * FROM default.`{path}`",
    "SELECT * FROM default.`{path}.none`",
    "SELECT 1 IN default.`{path}`",
    "SELECT * FROM attempts AS a JOIN default.`{path}` AS b ON 1",
    "SELECT hasColumnInTable('default', '{path}.none', 'a')",
    "SELECT joinGet('default.{path}', 'a', 1)",
    "SELECT dictGet('{path}', 'a', 1)",
    "SELECT * FROM dictionary('a')",
    "SELECT regionToName(1)",
    "SELECT evalMLMethod(1)",
    "SELECT naiveBayesClassifier('a', 'b')",
    "SELECT hostname(), FQDN(), serverUUID(), getServerSetting('path'), getMacro('a'), tcpPort()",
    "SELECT * FROM system.query_log",
    "SELECT * FROM system.users",
    "SELECT 1 INTO OUTFILE '{path}.out'",
    "SELECT 1 INTO/**/OUTFILE '{path}.out' TRUNCATE",
    "EXPLAIN SELECT 1 INTO OUTFILE '{path}.out'",
    "SELECT 1; SELECT file('{path}')",
    "SELECT * FROM system.stack_trace",
    "SELECT * FROM `system`.`processes`",
    "SELECT sleep(3)",
    "SHOW PROCESSLIST",
    "SELECT * FROM (SELECT 1 SETTINGS max_execution_time = 0)",
    "WITH x AS (SELECT 1 SETTINGS `readonly` = 0) SELECT * FROM x",
]
WRITES = [
    "INSERT INTO prices (model) VALUES ('x')",
    "INSERT INTO prices SELECT * FROM prices",
    "INSERT INTO prices FROM INFILE '{path}' FORMAT CSV",
    "CREATE TABLE t (a Int8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE t (a Int8)",
    "CREATE FUNCTION f AS x -> x",
    "DROP TABLE attempts",
    "TRUNCATE TABLE attempts",
    "ALTER TABLE attempts DELETE WHERE 1",
    "OPTIMIZE TABLE attempts",
    "RENAME TABLE attempts TO a",
    "DETACH TABLE attempts",
    "ATTACH TABLE t FROM '{path}' (a Int8) ENGINE = Memory",
    "BACKUP TABLE attempts TO File('{path}.out')",
    "KILL QUERY WHERE 1",
    "SYSTEM SHUTDOWN",
    "SET readonly = 0",
    "SET max_memory_usage = 0",
    "USE system",
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT 1 SETTINGS max_result_rows = 0",
    "SELECT 1 SETTINGS max_execution_time = 0",
    "GRANT ALL ON *.* TO default",
    "CREATE USER u",
    "nonsense",
    "",
]


@pytest.mark.parametrize("query", OUTSIDE + WRITES)
def test_nothing_else_passes(http_client: httpx.Client, tmp_path: Path, query: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("hidden-in-a-file\n")
    answer = ask(http_client, query.replace("{path}", str(secret)))
    assert answer.status_code >= 400, answer.text
    assert answer.headers["x-clickhouse-exception-code"] in {"164", "62", "81", "60", "47"}, answer.text
    assert "hidden-in-a-file" not in answer.text
    assert os.listdir(tmp_path) == ["secret.csv"]


def test_settings_in_the_url_lift_nothing(http_client: httpx.Client) -> None:
    lifted = {"readonly": "0", "max_result_rows": "0", "max_execution_time": "0", "allow_ddl": "1"}
    assert ask(http_client, "DROP TABLE attempts", **lifted).headers["x-clickhouse-exception-code"] == "164"
    assert ask(http_client, "SELECT number FROM numbers(2000000)", **lifted).status_code == 500
    quoted = ask(http_client, "SELECT 1", output_format_tsv_crlf_end_of_line="1', readonly = '0")
    assert quoted.status_code >= 400
    assert ask(http_client, "DROP TABLE attempts").headers["x-clickhouse-exception-code"] == "164"


def test_settings_of_formats_reach_no_file(http_client: httpx.Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden-in-a-file ${data}\n${a:CSV}\n")
    for query, params in (
        ("SELECT 1 AS a FORMAT Template", {"format_template_row": str(secret)}),
        ("SELECT 1 AS a FORMAT Template", {"format_template_resultset": str(secret)}),
        ("SELECT 1 AS a FORMAT Protobuf", {"format_schema": f"{secret}:a", "format_schema_source": "file"}),
        ("SELECT 1 AS a FORMAT Protobuf", {"output_format_schema": str(tmp_path / "written")}),
    ):
        assert "hidden-in-a-file" not in ask(http_client, query, **params).text
        assert os.listdir(tmp_path) == ["secret"]


def test_a_parameter_is_a_value_and_no_name(http_client: httpx.Client) -> None:
    answer = ask(http_client, "SELECT * FROM {d:Identifier}.{t:Identifier}", param_d="system", param_t="processes")
    assert answer.headers["x-clickhouse-exception-code"] == "164"
    assert ask(http_client, "SELECT {d:String}", param_d="system.processes").text == "system.processes\n"


@pytest.mark.parametrize("name", ["DataFrame", "arrowtable", "CSV INTO OUTFILE '/x'", "Nope"])
def test_only_formats_of_the_engine_are_answered_in(http_client: httpx.Client, name: str) -> None:
    answer = ask(http_client, "SELECT 1", default_format=name)
    assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (404, "73")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT version(), timezone() FORMAT JSONCompact",
        "SELECT displayName(), version(), revision(), timezone()",
        "SELECT currentUser() AS user, timezone() AS timezone, version() AS version, getSetting('readonly')",
        "SELECT name, value, readonly FROM system.settings LIMIT 1",
        "SELECT name FROM system.databases",
        "SELECT * FROM system.tables WHERE database = 'headrace' FORMAT JSON",
        "SELECT database, table, name, type FROM system.columns WHERE database = 'headrace'",
        "SELECT table_name FROM information_schema.tables",
        "SHOW TABLES FROM headrace",
        "DESCRIBE TABLE usage",
        "SHOW CREATE TABLE attempts",
        "(SELECT 1) UNION ALL (SELECT 2)",
    ],
)
def test_what_clients_ask_when_they_connect(http_client: httpx.Client, query: str) -> None:
    """Drivers also send settings in the URL, a session and compression by HTTP."""
    more = {"session_id": "s", "max_execution_time": "60", "enable_http_compression": "1", "wait_end_of_query": "1"}
    answer = ask(http_client, query, **more)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.text


def test_other_databases_are_closed(http_client: httpx.Client) -> None:
    answer = ask(http_client, "SELECT * FROM stack_trace", database="system")
    assert answer.headers["x-clickhouse-exception-code"] == "81"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("SELECT number FROM numbers(1000001)", "396"),
        ("SELECT groupArray(number) FROM numbers(1000000000)", "241"),
        ("SELECT nosuch", "47"),
        ("SELECT * FROM nosuch", "60"),
    ],
)
def test_limits_and_errors_have_clickhouses_codes(http_client: httpx.Client, query: str, code: str) -> None:
    answer = ask(http_client, query)
    assert answer.headers["x-clickhouse-exception-code"] == code, answer.text
    assert answer.text.startswith(f"Code: {code}. DB::Exception: ")


def test_what_is_not_spoken_is_refused_with_a_reason(http_client: httpx.Client) -> None:
    for answer in (
        ask(http_client, "SELECT 1", compress="1"),
        ask(http_client, "SELECT 1", decompress="1"),
        ask(http_client, "SELECT 1", default_format="Native", client_protocol_version="54468"),
        http_client.post("/", files={"query": b"SELECT 1"}),
        http_client.post("/", content=b"SELECT 1", headers={"content-encoding": "zstd"}),
        http_client.post("/", content=b"SELECT 1", headers={"content-encoding": "gzip"}),
        http_client.post("/", content=gzip.compress(b" " * (1 << 22) + b"1"), headers={"content-encoding": "gzip"}),
        http_client.post("/", content=b"SELECT '" + b"a" * QUERY_BYTES_MAX + b"'"),
        http_client.post("/", content=b"SELECT '\xff'"),
    ):
        assert answer.status_code in (400, 501), answer.text
        assert "DB::Exception" in answer.text
    assert http_client.get("/play").status_code == 404


ENDLESS = "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"


def hang_up(endpoint: SqlEndpoint, after_s: float) -> None:
    with httpx.Client(base_url=f"http://{endpoint.address}", auth=AUTH, trust_env=False, timeout=after_s) as client:
        with pytest.raises(httpx.TimeoutException):
            ask(client, ENDLESS)


def test_a_query_ends_when_its_client_hangs_up(endpoint: SqlEndpoint, http_client: httpx.Client) -> None:
    """Also one that waits for a place: then it never begins."""
    abandoned = metric("headrace_ledger_sql_abandoned_total")
    with ThreadPoolExecutor(2 * QUERIES_MAX) as pool:
        running = [pool.submit(hang_up, endpoint, 3.0) for _ in range(QUERIES_MAX)]
        wait_until(lambda: len(endpoint._sessions._running) == QUERIES_MAX, "the first queries")
        for waiting in [pool.submit(hang_up, endpoint, 0.5) for _ in range(QUERIES_MAX)]:
            waiting.result()
        for ended in running:
            ended.result()
    started = time.monotonic()
    assert ask(http_client, "SELECT 1").text == "1\n"
    assert time.monotonic() - started < 2
    assert metric("headrace_ledger_sql_abandoned_total") == abandoned + QUERIES_MAX


def test_a_closed_endpoint_leaves_no_query_behind(endpoint: SqlEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tells its client that it was ended. Here a second endpoint to the same engine."""
    monkeypatch.setattr(sql_http, "GRACE_S", 1)
    second = SqlEndpoint(Sessions(endpoint._sessions._directory, "headrace", *AUTH), "127.0.0.1:0")
    second.start()
    address = second.address
    with ThreadPoolExecutor(1) as pool, httpx.Client(auth=AUTH, trust_env=False, timeout=60) as client:
        running = pool.submit(client.post, f"http://{address}/", content=ENDLESS)
        time.sleep(0.5)
        started = time.monotonic()
        second.close()
        assert time.monotonic() - started < 10
        assert running.result().headers["x-clickhouse-exception-code"] == "394"
    with pytest.raises(OSError, match="refused"):
        connected(address)


def test_queries_are_measured(http_client: httpx.Client) -> None:
    before = metric("headrace_ledger_sql_seconds_count")
    ask(http_client, "SELECT 1")
    assert metric("headrace_ledger_sql_seconds_count") == before + 1


def cut_off(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


CHUNKED = b"POST /?query=SELECT HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
PING = b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"
WRONG = b"GET /?query=SELECT HTTP/1.1\r\nHost: a\r\n\r\n"
RIGHT = b"GET /?query=SELECT+1&user=ann&password=secret HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (CHUNKED, b"10000\r\n" + b"a" * 65536 + b"\r\n"),
        (CHUNKED, b"1\r\na\r\n" * 10_000),
        (CHUNKED + b"0\r\n", b"x: " + b"a" * 60 + b"\r\n"),
        (b"", PING * 1000),
        (b"", WRONG * 1000),
        (PING.replace(b"GET", b"POST")[:-2] + b"Content-Length: 999999999\r\n\r\n", b"a" * 65536),
        (b"GET /ping HTTP/1.1\r\n", b"x: " + b"a" * 65536),
        (b"GET /ping HTTP/1.1\r\n", b"a:b\r\n" * 1000),
        (b"GET /", b"a" * 65536),
    ],
    ids=["chunks", "one-byte chunks", "trailers", "pings", "strangers", "body", "header", "headers", "address"],
)
def test_little_is_read_of_a_stranger(
    endpoint: SqlEndpoint, monkeypatch: pytest.MonkeyPatch, head: bytes, more: bytes
) -> None:
    """Whatever it sends, and as fast as it can."""
    monkeypatch.setattr(sql_http, "STRANGER_S", 0.3)
    with connected(endpoint.address) as connection:
        connection.sendall(head)
        sent = 0
        with pytest.raises(OSError):  # noqa: PT012 (it may end at any of these)
            while sent < 64 << 20:
                connection.sendall(more)
                sent += len(more)
                protocol = endpoint_protocol(endpoint, connection)
                assert protocol is None or protocol._read_bytes <= STRANGER_BYTES_MAX
                assert protocol is None or len(protocol._kept) <= 1 << 20


def endpoint_protocol(endpoint: SqlEndpoint, connection: socket.socket) -> Any:
    """The server's side of it; None when it is closed."""
    own = connection.getsockname()
    return next((each for each in protocols(endpoint) if each.client == own), None)


def protocols(endpoint: SqlEndpoint) -> list[Any]:
    """Of the open connections."""
    return list(endpoint._server.server_state.connections)


@pytest.mark.parametrize(
    "size", [b"-5", b"-0", b"+5", b"0x5", b"5_0", b" 5", b"fffffffffffffffff", b"", b"5;a=" + b"b" * 70_000]
)
def test_a_size_that_is_none_ends_the_connection(endpoint: SqlEndpoint, size: bytes) -> None:
    with connected(endpoint.address) as connection:
        connection.sendall(CHUNKED + size + b"\r\n" + b"a" * 100)
        assert b"200 OK" not in everything(connection)


def everything(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_who_is_silent_keeps_nobody_out(endpoint: SqlEndpoint) -> None:
    """Also not who asks with a wrong password, or takes no answers; all from the same address as the analyst."""
    silent = [connected(endpoint.address) for _ in range(200)]
    for number, connection in enumerate(silent):
        with contextlib.suppress(OSError):
            connection.sendall((b"", WRONG, PING * 500, b"GET /")[number % 4])
    with connected(endpoint.address) as known:
        known.sendall(RIGHT)
        assert b"200 OK" in known.recv(4096)
        silent += [connected(endpoint.address) for _ in range(200)]
        known.sendall(RIGHT)
        assert b"200 OK" in known.recv(4096)
    wait_until(
        lambda: sum(each._stranger for each in protocols(endpoint)) <= STRANGERS_PER_ADDRESS_MAX, "the others' end"
    )
    for connection in silent:
        connection.close()


def test_a_stranger_has_little_time(endpoint: SqlEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_http, "STRANGER_S", 2.0)
    many = [connected(endpoint.address) for _ in range(3)]
    many[1].sendall(b"GET /ping HTTP/1.1\r\n")
    many[2].sendall(PING)
    assert b"Ok." in many[2].recv(4096)
    assert all(cut_off(connection) for connection in many)
    for connection in many:
        connection.close()


def test_a_known_connection_may_rest_but_not_begin_and_stop(
    endpoint: SqlEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(endpoint.address) as known:
        for _ in range(2):
            known.sendall(RIGHT)
            assert b"200 OK" in known.recv(4096)
            assert endpoint_protocol(endpoint, known)._timer is None
        monkeypatch.setattr(sql_http, "IDLE_S", 0.2)
        known.sendall(RIGHT[:10])
        assert cut_off(known)


def test_a_query_beyond_a_strangers_bound_is_read_once_it_is_known(endpoint: SqlEndpoint) -> None:
    """Head and body come in one write."""
    query = b"SELECT 1 -- " + b"a" * (QUERY_BYTES_MAX - 100)
    head = b"POST /?user=ann&password=secret HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(query)
    for _ in range(5):
        with connected(endpoint.address) as connection:
            connection.sendall(head + query)
            assert everything(connection).endswith(b"\r\n\r\n1\n")


def test_wrong_passwords_are_counted(endpoint: SqlEndpoint) -> None:
    before = metric("headrace_ledger_sql_refused_total")
    with connected(endpoint.address) as connection:
        connection.sendall(WRONG)
        assert b"connection: close" in everything(connection).lower()
    assert metric("headrace_ledger_sql_refused_total") == before + 1


def test_many_may_ask_at_once_and_sessions_are_apart(endpoint: SqlEndpoint, http_client: httpx.Client) -> None:
    started = threading.active_count()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask(http_client, f"SELECT {number}", session_id="s").text, range(24)))
    assert answers == [f"{number}\n" for number in range(24)]
    assert threading.active_count() < started + 64


def test_clickhouse_connect_reads_types_names_and_frames(endpoint: SqlEndpoint) -> None:
    host, port = endpoint.address.split(":")
    with clickhouse_connect.get_client(host=host, port=int(port), username="ann", password="secret") as client:
        found = client.query(
            "SELECT toUInt64(1) AS a, toDateTime64('2026-11-29 18:00:00.123', 3, 'UTC') AS b, [1, 2] AS c,"
            " toLowCardinality('x') AS d, toNullable(NULL) AS e, toInt128(-5) AS f, generateUUIDv4() AS g"
        )
        assert found.column_names == ("a", "b", "c", "d", "e", "f", "g")
        assert found.first_row[2:6] == ([1, 2], "x", None, -5)
        assert client.server_settings["readonly"].value == "1"
        assert [row[0] for row in client.query("SHOW TABLES").result_rows].count("attempts") == 1
        assert client.command("SELECT {n:Int32} + 1", parameters={"n": 41}) == 42
        with client.query_row_block_stream("SELECT * FROM numbers(100000)") as blocks:
            assert sum(len(block) for block in blocks) == 100_000
        with pytest.raises(clickhouse_connect.driver.exceptions.DatabaseError):
            client.command("DROP TABLE attempts")


def test_sql_is_judged_as_the_engine_prints_it() -> None:
    functions, databases = frozenset({"url"}), frozenset({"default", "system"})
    policy.check("SELECT 'url(' AS a, `b` FROM numbers(1)", functions, databases)
    for text in (
        "SELECT url(1)",
        "SELECT a.URL(1)",
        "SELECT `url`(1)",
        "DROP TABLE a",
        "( INSERT INTO a SELECT 1",
        "SELECT {a:Identifier}",
    ):
        with pytest.raises(policy.Forbidden):
            policy.check(text, functions, databases)
    assert policy.format_of("SELECT 1 FORMAT CSV SETTINGS a = 1", "Native") == "CSV"
    assert policy.format_of("SELECT ' FORMAT CSV'", "Native") == "Native"
