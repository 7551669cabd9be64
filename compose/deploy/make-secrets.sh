#!/bin/sh
# make-secrets.sh DIRECTORY: makes the secrets that are missing there, a folder for each that is mounted alone.
#
#   pepper/pepper                    keys the HMAC of API keys: without it all keys are lost
#   clickhouse/url                   ClickHouse with the ledger's user and password
#   clickhouse-users/headrace.xml    that user for ClickHouse itself, with the password's SHA-256
set -eu
umask 077
cd "$1"

random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }

mkdir -p pepper clickhouse clickhouse-users
if [ ! -s pepper/pepper ]; then
    random > pepper/.new
    mv pepper/.new pepper/pepper
fi
if [ ! -s clickhouse/url ]; then
    password=$(random)
    hash=$(printf %s "$password" | sha256sum | cut -d' ' -f1)
    cat > clickhouse-users/headrace.xml <<XML
<clickhouse>
    <users>
        <default remove="remove"/>
        <headrace>
            <password_sha256_hex>$hash</password_sha256_hex>
            <networks><ip>::/0</ip></networks>
            <profile>default</profile>
            <quota>default</quota>
        </headrace>
    </users>
</clickhouse>
XML
    chmod 755 clickhouse-users
    chmod 644 clickhouse-users/headrace.xml # ClickHouse runs as another user
    printf 'http://headrace:%s@clickhouse:8123' "$password" > clickhouse/.new
    mv clickhouse/.new clickhouse/url
fi
