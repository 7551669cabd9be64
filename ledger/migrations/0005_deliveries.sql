-- What gateways saw of requests (contracts.messages.deliveries), for the question why one was slow. None of it is
-- billed, and what was lost on the way here is lost. Copies meet as those of attempts do.
CREATE TABLE IF NOT EXISTS deliveries
(
    tenant            LowCardinality(String),
    requested_at      DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    request_id        UUID CODEC(ZSTD(1)),
    key_id            LowCardinality(String),
    model             LowCardinality(String),
    version           LowCardinality(String),
    endpoint          LowCardinality(String),
    outcome           LowCardinality(String),
    code              LowCardinality(String),
    status            UInt16,
    stream            Bool,
    attempt           UInt16,
    prompt_tokens     UInt32 CODEC(T64, ZSTD(1)),
    upload_ms         Float32 CODEC(ZSTD(1)),
    edge_ms           Float32 CODEC(ZSTD(1)),
    admission_ms      Float32 CODEC(ZSTD(1)),
    first_chunk_ms    Float32 CODEC(ZSTD(1)) COMMENT '0: there was none',
    ended_ms          Float32 CODEC(ZSTD(1)),
    blocked_ms        Float32 CODEC(ZSTD(1)),
    total_ms          Float32 CODEC(ZSTD(1)),
    client_request_id String CODEC(ZSTD(1)),
    traceparent       String CODEC(ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(requested_at)
ORDER BY (tenant, requested_at, request_id)
TTL toDateTime(requested_at) + INTERVAL 35 DAY
SETTINGS fsync_after_insert = 0;
